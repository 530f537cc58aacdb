"""The choice of ``llm_auto_pipeline`` against each named schedule, on the same model and batch in the same run.

``torchrun --nproc-per-node 2 -m benchmarks.llm_auto`` runs the automatic strategy, and then trains with its choice and
with every named schedule under a Trainer. The named schedules run with their default split, with the default number of
micro-batches and with the chosen number. A step is timed from batch to batch, including the optimizer, in every round.
The choice runs twice in each round, and the difference between the two is noise. Aim: the choice is not slower than the
best named schedule by more than this noise.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.figures import Figure, add_options, save
from benchmarks.llm_step_time import Language, batches_of
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.schedules.specs import SCHEDULES
from lightning_pipe.strategies import AutoLLMPipelineStrategy, LLMPipelineStrategy

QUIET: dict[str, Any] = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


def fit(strategy: LLMPipelineStrategy, options: argparse.Namespace, steps: int) -> list[float]:
    """Seconds of each step except the first, on the slowest rank."""
    module = Language(options.width, options.layers)
    torch.manual_seed(1)
    data: Any = batches_of(options)[: steps + 1]
    batches: DataLoader[Any] = DataLoader(data, batch_size=None)
    pl.Trainer(strategy=strategy, devices=dist.get_world_size(), **QUIET).fit(module, batches)
    seconds = torch.tensor([later - earlier for earlier, later in pairwise(module.began[1:])])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    step_times: list[float] = seconds.tolist()
    return step_times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (
        ("width", 256), ("layers", 6), ("rows", 16), ("length", 64), ("steps", 5), ("rounds", 3)
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    auto = AutoLLMPipelineStrategy()
    began = time.perf_counter()
    fit(auto, options, 2)
    assert auto.choice is not None
    chosen = auto.choice.chosen.candidate
    choice = {
        "schedule": chosen.spec.name,
        "num_microbatches": chosen.num_microbatches,
        "stages_per_rank": chosen.stages_per_rank,
        "split": {"layers_per_stage": chosen.layers_per_stage},
    }
    if dist.get_rank() == 0:
        print(f"chosen in {time.perf_counter() - began:.1f} s, including two training steps\n", flush=True)
    entries: dict[str, dict[str, Any]] = {"auto": choice}
    for count in sorted({2 * dist.get_world_size(), chosen.num_microbatches}):
        entries |= {f"{name}, {count}": {"schedule": name, "num_microbatches": count} for name in SCHEDULES}
    entries["auto again"] = choice
    seconds: dict[str, list[list[float]]] = {name: [] for name in entries}
    for _ in range(options.rounds):
        for name, arguments in entries.items():
            try:
                seconds[name].append(fit(LLMPipelineStrategy(**arguments), options, options.steps))
            except SetupError:
                seconds.pop(name, None)
        entries = {name: entries[name] for name in seconds}
    if dist.get_rank() == 0:
        save([report(seconds)], options.json)
    dist.barrier()
    dist.destroy_process_group()


def report(seconds: dict[str, list[list[float]]]) -> Figure:
    """Print medians, fastest first, with their ratios to the choice, and return the choice over the best named one."""
    medians = {name: statistics.median(value for row in rows for value in row) for name, rows in seconds.items()}
    auto_median = statistics.median(value for name in ("auto", "auto again") for row in seconds[name] for value in row)
    print(f"{'schedule, micro-batches':<30}{'ms per step':>11}{'/ auto':>9}   ms, by round")
    for name in sorted(medians, key=lambda name: medians[name]):
        rounds = "  ".join(f"{1e3 * statistics.median(row):.1f}" for row in seconds[name])
        print(f"{name:<30}{1e3 * medians[name]:>11.1f}{medians[name] / auto_median:>9.3f}   {rounds}")
    best_named = min(value for name, value in medians.items() if not name.startswith("auto"))
    ends = sorted((medians["auto"] / best_named, medians["auto again"] / best_named))
    difference = (ends[1] - ends[0]) * best_named / auto_median
    print(
        f"\nauto / best named schedule: {auto_median / best_named:.3f}; difference of the two runs of auto:"
        f" {100 * difference:.1f} %"
    )
    target = f"<= 1 within noise ({1 + difference:.3f})"
    name = "LLM step, the schedule chosen / the best by name"
    return Figure(
        name, auto_median / best_named, "ratio", (ends[0], ends[1]), target, auto_median / best_named <= 1 + difference
    )


if __name__ == "__main__":
    main()
