"""Step time of a language model with options of PyTorch's schedules, relative to the defaults, on two ranks.

``python -m benchmarks.slow_link --rate 200mbit benchmarks.schedule_options`` puts a slow link between the ranks. For
each schedule it prints the median step time with the defaults, and the ratio of each option to it, with the 95 %
interval over the rounds, in which they alternate. With ``--shard``, the ranks share all stages by FSDP2, which gathers
their parameters over the link; otherwise, they are the two ranks of a pipeline.
"""

from __future__ import annotations

import argparse
import os
import statistics
from datetime import timedelta
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.figures import median_ratio
from benchmarks.llm_step_time import Language, batches_of
from lightning_pipe.strategies import LLMPipelineStrategy

__all__: list[str] = []


class Timed(Language):
    """Records when each step begins and ends on all ranks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.run_batch(batch).loss


def seconds_per_step(options: argparse.Namespace, schedule: str, schedule_options: dict[str, Any]) -> float:
    """Median over the steps of a fit, without the first."""
    module, local = Timed(options.width, options.layers), int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = LLMPipelineStrategy(
        schedule,
        num_microbatches=options.micro_batches,
        stages_per_rank=options.stages,
        schedule_options=schedule_options,
        parallel={"pp": 1, "dp_shard": 2} if options.shard else {"pp": 2},
        timeout=timedelta(minutes=5),
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=local,
        num_nodes=2 // local,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(batches_of(options), batch_size=None))  # type: ignore[arg-type]
    return statistics.median(later - earlier for earlier, later in pairwise(module.began[1:]))


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["interleaved_1f1b", "interleaved_zero_bubble"])
    parser.add_argument("--shard", action="store_true", help="two ranks of FSDP2 instead of a pipeline")
    for option, default in (
        ("stages", 2), ("micro-batches", 4), ("width", 256), ("layers", 8), ("rows", 8), ("length", 64), ("steps", 6),
        ("rounds", 6),
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deferred: dict[str, Any] = {"defer_pp_recv": True}
    active = [{"max_active_stages": count} for count in range(1, options.stages + 1)]
    kinds: list[dict[str, Any]] = [{}, {}, *(active if options.shard else [deferred])]
    for schedule in options.schedules:
        times: list[list[float]] = [[] for _ in kinds]
        for turn in range(options.rounds):
            for index in range(len(kinds))[:: 1 if turn % 2 else -1]:
                times[index].append(seconds_per_step(options, schedule, kinds[index]))
        if dist.get_rank() == 0:
            print(f"{schedule}: {1e3 * statistics.median(times[0]):.0f} ms")
            for kind, spent in zip(kinds[1:], times[1:], strict=True):
                ratio, spread = median_ratio(spent, times[0])
                print(f"  {kind or 'again'}: {ratio:.3f} ({spread[0]:.3f} .. {spread[1]:.3f})", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
