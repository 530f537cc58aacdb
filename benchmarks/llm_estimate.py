"""Memory per rank as estimated by ``lightning-pipe llm estimate``, against the memory that training uses.

``torchrun --nproc-per-node 2 -m benchmarks.llm_estimate`` trains a model like that of ``examples/llm_text`` for a few
steps under each schedule, also with activation checkpointing, and counts the bytes of all tensors: those of parameters
and optimizer states at the end, and the peak of all tensors. It prints them with the estimates, which are made without
creating the model. Neither includes the scratch memory of operations. On a GPU (``--device cuda``), the peak is that of
the caching allocator, with scratch memory.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from benchmarks.figures import Figure, add_options, at_most, quartiles, save
from lightning_pipe.llm.measure.live_bytes import LiveBytes
from lightning_pipe.strategies import HFCausalLM, LLMPipelineStrategy
from lightning_pipe.strategies.language_model.stage_estimate import estimate_stages

MEBIBYTE = 2**20
CASES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "activation_checkpoint": {"mode": "full"}},
    {"schedule": "1f1b", "activation_checkpoint": {"mode": "selective"}},
    {"schedule": "looped_bfs"},
    {"schedule": "interleaved_1f1b"},
    {"schedule": "interleaved_zero_bubble"},
    {"schedule": "zbv_zero_bubble"},
    {"schedule": "dualpipev"},
    {"schedule": "zbv_zero_bubble", "activation_checkpoint": {"mode": "full"}},
]


class RealBytes(LiveBytes):
    """Counts live bytes without fake tensors, from which the strategy derives shapes."""

    def _add_storage_bytes(self, tensor: torch.Tensor, key: int) -> None:
        if not isinstance(tensor, FakeTensor):
            super()._add_storage_bytes(tensor, key)


class Counting(pl.Callback):
    """Counts bytes from the first batch to the end of training."""

    def __init__(self, device: str) -> None:
        self.live = None if device == "cuda" else RealBytes()
        self.parameters = self.states = self.peak = 0
        if self.live is None:
            gc.collect()  # the previous trainer
            self.before = torch.cuda.memory_allocated()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            if self.live is None:
                torch.cuda.reset_peak_memory_stats()
            else:
                self.live.__enter__()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.parameters = sum(parameter.nbytes for parameter in module.parameters())
        if self.live is None:
            self.peak = torch.cuda.max_memory_allocated() - self.before
        else:
            self.live.__exit__(None, None, None)
            self.peak = self.live.peak + self.parameters + sum(buffer.nbytes for buffer in module.buffers())
        states = [value for opt in trainer.optimizers for state in opt.state.values() for value in state.values()]
        self.states = sum(state.nbytes for state in states if isinstance(state, torch.Tensor))


def model(options: argparse.Namespace) -> HFCausalLM:
    """The model of ``examples/llm_text``, with sizes from the options."""
    return HFCausalLM(
        {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": options.width,
            "intermediate_size": 43 * options.width // 16,
            "num_hidden_layers": options.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": options.length,
            "tie_word_embeddings": False,
        }
    )


def measure(
    arguments: dict[str, Any], options: argparse.Namespace, batches: list[dict[str, torch.Tensor]]
) -> tuple[int, int, int]:
    """Bytes of the parameters, optimizer states and of all memory of this rank in training."""
    counting = Counting(options.device)
    trainer = pl.Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator=options.device,
        devices=dist.get_world_size(),
        max_epochs=1,
        strategy=LLMPipelineStrategy(**arguments),
        callbacks=[counting],
    )
    trainer.fit(model(options), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return counting.parameters, counting.states, counting.peak


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (
        ("width", 128), ("layers", 8), ("rows", 16), ("length", 256), ("micro-batches", 4), ("steps", 2)
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--schedules", nargs="+", default=sorted({case["schedule"] for case in CASES}))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--by-rank", action="store_true", help="save a figure for each case and rank instead of the worst"
    )
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    tokens = torch.randint(
        256, (options.steps, options.rows, options.length), generator=torch.Generator().manual_seed(0)
    )
    batches = [{"input_ids": input_ids, "labels": input_ids} for input_ids in tokens]
    if dist.get_rank() == 0:
        print(
            f"{options.micro_batches} micro-batches of {options.rows // options.micro_batches} x {options.length}"
            f" tokens, {options.layers} layers of width {options.width}; MiB, measured / estimated\n\n"
            f"{'schedule':<36}{'rank':>5}{'parameters':>15}{'optimizer':>15}{'all':>17}{'error':>9}"
        )
    errors: list[float] = []
    figures: list[Figure] = []
    for case in (case for case in CASES if case["schedule"] in options.schedules):
        arguments = {**case, "num_microbatches": options.micro_batches}
        estimate = estimate_stages(
            LLMPipelineStrategy(**arguments), model(options), batches[0], dist.get_world_size(), Precision()
        )
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, measure(arguments, options, batches))
        name = " ".join([case["schedule"], *case.get("activation_checkpoint", {}).values()])
        for rank, (measured, estimated) in enumerate(zip(rows, estimate.configured.memory, strict=True)):
            expected = estimated.parameters, estimated.optimizer, estimated.total
            columns = [
                f"{actual / MEBIBYTE:.2f} / {predicted / MEBIBYTE:.2f}"
                for actual, predicted in zip(measured, expected, strict=True)
            ]
            errors.append(estimated.total / measured[-1] - 1)
            ratio = measured[-1] / estimated.total
            counted = "allocator's peak (cuda)" if options.device == "cuda" else "live tensors, no allocator"
            title = f"memory of rank {rank} / llm estimate, {name}: {counted}"
            figures.append(at_most(title, ratio, 1.2, (ratio, ratio)))
            if dist.get_rank() == 0:
                print(
                    f"{name if rank == 0 else '':<36}{rank:>5}{columns[0]:>15}{columns[1]:>15}{columns[2]:>17}"
                    f"{100 * errors[-1]:>+8.1f}%",
                    flush=True,
                )
    if dist.get_rank() == 0:
        worst = max(map(abs, errors))
        title = "llm estimate: worst error of a rank's memory"
        save(figures if options.by_rank else [Figure(title, worst, "ratio", quartiles(errors))], options.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
