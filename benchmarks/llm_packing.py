"""Packed documents against padded ones, under the Trainer.

``torchrun --nproc-per-node 2 -m benchmarks.llm_packing`` trains the same documents in batches of the same number of
rows in three ways, alternating in one run: one document a row, padded to the longest of its batch, and packed by
``sequential`` and by ``best_fit``. It prints the share of pads and the tokens per second (without pads), and the median
over rounds of the ratio to padded batches, with its 95 % interval. Documents are topics of the Python documentation
(``pydoc_data.topics``), one token per byte, cut to log-normal lengths. The model is a small Llama.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import random
import statistics
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from benchmarks.figures import Figure, add_options, at_least, median_ratio, save
from lightning_pipe.llm.batches.packing import PackedDocuments
from lightning_pipe.strategies import HFCausalLM, LLMPipelineStrategy

WAYS = ("padded", "sequential", "best_fit")


class Timed(HFCausalLM):
    """Records the seconds of each batch."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 32}
        kind = {"model_type": "llama", "vocab_size": 256, "tie_word_embeddings": False}
        super().__init__(kind | sizes | {"num_hidden_layers": layers, "max_position_embeddings": length})
        self.times: list[float] = []
        self._began = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter() - self._began)


def documents_of(options: argparse.Namespace) -> list[list[int]]:
    """Bytes of the documentation, from random places, with log-normal lengths; the same on every rank."""
    choice = random.Random(options.seed)
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()
    documents = []
    for _ in range(options.documents):
        size = min(max(int(choice.lognormvariate(options.mean, options.deviation)), 2), options.length)
        start = choice.randrange(len(text) - size)
        documents.append(list(text[start : start + size]))
    return documents


def batches_of(way: str, options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """All documents in batches of whole rows."""
    documents = documents_of(options)
    if way != "padded":
        return list(PackedDocuments(documents, options.length, options.rows, method=way))
    batches = []
    for start in range(0, len(documents), options.rows):
        rows = [torch.tensor(document) for document in documents[start : start + options.rows]]
        labels = [torch.cat([row[1:], torch.tensor([-100])]) for row in rows]
        batches.append(
            {
                "input_ids": pad_sequence(rows, batch_first=True),
                "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            }
        )
    return batches


def seconds(batches: list[dict[str, Tensor]], options: argparse.Namespace) -> float:
    """Seconds of all batches in one epoch, after an epoch that makes the schedules of all lengths."""
    module = Timed(options.width, options.layers, options.length)
    strategy = LLMPipelineStrategy(
        options.schedule, num_microbatches=options.micro_batches, timeout=timedelta(minutes=5)
    )
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **quiet)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return sum(module.times[len(batches) :])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--mean", type=float, default=4.5, help="mean of the logarithm of lengths")
    parser.add_argument("--deviation", type=float, default=1.0, help="standard deviation of the logarithm of lengths")
    for option, default in (
        ("width", 256), ("layers", 2), ("rows", 8), ("micro-batches", 4), ("length", 512), ("documents", 96),
        ("rounds", 3), ("seed", 0)
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    batches = {way: batches_of(way, options) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            times[way].append(seconds(batches[way], options))
    if dist.get_rank() == 0:
        tokens = sum(map(len, documents_of(options)))
        figures: list[Figure] = []
        for way in WAYS:
            positions = sum(batch["input_ids"].numel() for batch in batches[way])
            pads = 1 - tokens / positions
            ratio, spread = median_ratio(times["padded"], times[way])
            print(
                f"{way}: {len(batches[way])} batches of {options.rows} rows, {pads:.1%} pads,"
                f" {tokens / statistics.median(times[way]):,.0f} tokens per second, {ratio:.2f} of padded"
                f" ({spread[0]:.2f} to {spread[1]:.2f})",
                flush=True,
            )
            if way == "best_fit":
                figures.append(at_least("LLM, packed / padded documents: tokens per second", ratio, 1.0, spread))
                figures.append(Figure("LLM, packed documents: share of pads", pads, "ratio", (pads, pads)))
        save(figures, options.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
