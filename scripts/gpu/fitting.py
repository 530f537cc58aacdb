"""Train a small recommender with a Trainer under recsys strategies, and save all values of each way.

A way is the name of a plan or ``auto``, with ``:resumed`` (a checkpoint in the middle of the epoch), ``:bf16``,
``:fp16``, ``:traced`` (a trace for ui.perfetto.dev, in which every task must occur) or ``:profiled`` (exposed time of
each task). The measurements of ``auto``, of traces and of profiles are saved as figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from benchmarks.figures import Figure, add_options, quartiles
from benchmarks.figures import save as save_figures
from benchmarks.recsys_model import EPS, RATE, batches, seed_tables
from benchmarks.recsys_step import Trained
from lightning_pipe.callbacks import PipelineProfiler, PipelineTrace
from lightning_pipe.recsys.plans.recsys_plans import PLANS
from lightning_pipe.strategies import RecsysPipelineStrategy
from scripts.gpu.devices import backend, parser, save
from scripts.gpu.trainers import fit
from scripts.gpu.training import SIZES

__all__: list[str] = []


class Seeded(pl.Callback):
    """Fills the tables as in :mod:`scripts.gpu.training`, before the first batch of a run from the start."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.global_step:
            assert isinstance(trainer.strategy, RecsysPipelineStrategy)
            seed_tables(trainer.strategy.sharded_model.dmp)


def strategy(plan: str, kind: str) -> RecsysPipelineStrategy:
    tables = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}}
    search = {"exploration": {"iterations": 4, "rounds": 2, "extra_rounds": 1}} if plan == "auto" else None
    return RecsysPipelineStrategy(plan, sparse_optimizer=tables, auto=search, process_group_backend=backend(kind))


def state(trainer: pl.Trainer) -> dict[str, Any]:
    assert isinstance(trainer.strategy, RecsysPipelineStrategy)
    model: nn.Module = trainer.strategy.sharded_model.dmp
    return {**model.state_dict(), "state tables": trainer.strategy.sharded_model.fused_optimizer.state_dict()["state"]}


def figures_of(name: str, folder: Path, trainer: pl.Trainer, profiler: PipelineProfiler | None) -> list[Figure]:
    """Figures of a trace, a profile or a search."""
    assert isinstance(trainer.strategy, RecsysPipelineStrategy)
    figures = []
    if (trace := folder / "trace.json").exists():
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        if missing := PLANS[name].schedule.keys() - {event.get("name") for event in events}:
            raise SystemExit(f"{trace} has no span of {', '.join(sorted(missing))}")
        figures.append(Figure(f"events in {trace.name} of plan {name}", len(events), "events", (len(events),) * 2))
    if profiler is not None:
        for profile in profiler.profiles.values():
            for task, task_profile in profile.tasks.items():
                if task_profile.exposed is not None and task_profile.low is not None and task_profile.high is not None:
                    spread = (1e6 * task_profile.low, 1e6 * task_profile.high)
                    figures.append(
                        Figure(f"exposed time of {task}, plan {profile.plan}", 1e6 * task_profile.exposed, "us", spread)
                    )
        if not figures:
            raise SystemExit(f"the profile of plan {name} has no exposed time")
    if (choice := trainer.strategy.plan_choice) is not None:
        for plan, times in choice.measured.items():
            chosen = " (chosen)" if plan == choice.plan.name else ""
            middle = [1e3 * seconds for seconds in times]
            spread = quartiles(middle) if len(middle) > 1 else (middle[0], middle[0])
            figures.append(Figure(f"auto: iteration of plan {plan}{chosen}", statistics.median(middle), "ms", spread))
    return figures


def main() -> None:
    arg_parser = parser(__doc__, "plans")
    arg_parser.add_argument("--batch", type=int, default=SIZES["batch"], help="samples of a batch on each rank")
    add_options(arg_parser)
    options = arg_parser.parse_args()
    sizes = argparse.Namespace(**{**SIZES, "batch": options.batch})
    results: dict[str, Any] = {}
    figures: list[Figure] = []
    for way in options.ways:
        plan, _, variant = way.partition(":")
        folder = options.save.parent / way.replace(":", "-")
        batch_pool = batches(sizes, 0, options.device == "cuda")
        data = [batch_pool[index % len(batch_pool)] for index in range(400 if plan == "auto" else options.steps)]
        profiler = PipelineProfiler((3,), rounds=3, iterations=3, path=folder / "profile.json", report=None)
        extra: list[pl.Callback] = [profiler] if variant == "profiled" else []
        if variant == "traced":
            extra = [PipelineTrace(folder / "trace.json", steps=(2, 3), picture=None)]
        results[way], trainer = fit(
            variant,
            options.device,
            folder,
            lambda: Trained(sizes),
            lambda: strategy(plan, options.device),  # noqa: B023  # called before the next way
            data,
            state,
            [Seeded(), *extra],
        )
        figures += figures_of(plan, folder, trainer, profiler if variant == "profiled" else None)
        save(results, options.save)
    save_figures(figures, options.json)


if __name__ == "__main__":
    main()
