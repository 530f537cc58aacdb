"""Batches padded to their longest sequence against batches padded to the model's maximum, under the Trainer.

``torchrun --nproc-per-node 2 -m benchmarks.llm_variable_lengths`` trains the same batches both ways, alternating in one
run, and prints the shares of positions and of time that variable lengths save. Sequences are random paragraphs of the
Python documentation (``pydoc_data.topics``), with one byte per token; the few that exceed the maximum are truncated.
With variable lengths, the schedule for a length is created when a batch first has that length, and this time is
included. The benchmark fails if the losses of the two ways differ on any batch.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import random
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from benchmarks.figures import add_options, at_least, interval, save
from benchmarks.llm_step_time import Language
from lightning_pipe.strategies import LLMPipelineStrategy


class Timed(Language):
    """Records the time of each batch, from its first hook to its last."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__(width, layers)
        self.times: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter() - self.began[-1])


def paragraphs() -> list[bytes]:
    """Paragraphs of the documentation, in the order of its topics."""
    topics = pydoc_data.topics.topics
    return [text.encode() for name in sorted(topics) for text in topics[name].split("\n\n") if len(text.encode()) > 1]


def batches_of(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Batches of rows padded to the longest, with labels for text only; the same on every rank."""
    corpus, choice = paragraphs(), random.Random(options.seed)
    batches = []
    for _ in range(options.steps + 1):
        texts = [choice.choice(corpus)[: options.maximum + 1] for _ in range(options.rows)]
        rows = [torch.tensor(list(text)) for text in texts]
        batches.append(
            {
                "input_ids": pad_sequence([row[:-1] for row in rows], batch_first=True),
                "labels": pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100),
            }
        )
    return batches


def trained(options: argparse.Namespace, *, variable: bool) -> tuple[list[float], list[float]]:
    """Seconds of each batch except the first on this rank, and losses."""
    module = Timed(options.width, options.layers)
    strategy = LLMPipelineStrategy(
        options.schedule,
        num_microbatches=options.micro_batches,
        batching={
            "variable_lengths": variable,
            "max_length": options.maximum,
            "pad_to_multiple_of": options.multiple_of,
        },
        timeout=timedelta(minutes=5),
    )
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **quiet)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(batches_of(options), batch_size=None))  # type: ignore[arg-type]
    return module.times[1:], module.losses


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b")
    for option, default in (
        ("width", 128), ("layers", 4), ("rows", 16), ("micro-batches", 8), ("maximum", 1024), ("multiple-of", 64),
        ("steps", 16), ("rounds", 3), ("seed", 0)
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    first: list[float] = []
    for _ in range(options.rounds):
        for variable, rounds in times.items():
            spent, losses = trained(options, variable=variable)
            rounds.append(spent)
            first = first or losses
            torch.testing.assert_close(losses, first, rtol=0, atol=1e-4)
    if dist.get_rank() == 0:
        # The median over rounds of each batch, because a disturbance of one round does not depend on the length.
        static, variable_ = (sum(map(statistics.median, zip(*rounds, strict=True))) for rounds in times.values())
        lengths = [batch["input_ids"].shape[1] for batch in batches_of(options)[1:]]
        padded = [-(-length // options.multiple_of) * options.multiple_of for length in lengths]
        text = sum(int((batch["labels"] != -100).sum()) for batch in batches_of(options)[1:])
        positions = options.rows * options.maximum * len(lengths)
        share, saved = 1 - sum(padded) / (options.maximum * len(lengths)), 1 - variable_ / static
        print(
            f"{len(lengths)} batches of {options.rows} paragraphs of at most {options.maximum} bytes; padded to"
            f" that, {text / positions:.1%} is text; {len(set(padded))} lengths from {min(padded)} to {max(padded)}\n"
            f"static {static:.2f} s, variable {variable_:.2f} s\n"
            f"positions saved {share:.1%}, time saved {saved:.1%}; aim {0.9 * share:.1%}:"
            f" {'reached' if saved >= 0.9 * share else 'MISSED'}",
            flush=True,
        )

        def part(indices: Sequence[int]) -> float:
            padded, short = (sum(sum(rounds[index]) for index in indices) for rounds in times.values())
            return (1 - short / padded) / share

        title = "LLM, lengths that vary: time saved / positions saved"
        save([at_least(title, saved / share, 0.9, interval(part, options.rounds))], options.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
