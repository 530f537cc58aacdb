"""Task profiles at chosen steps of a fit, as a table, logger values, a JSON file and an HTML report."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipe.callbacks.common import (
    CallbackWithProcessGroup,
    get_training_epoch_loop,
    join_path_with_suffix,
    pipeline_of,
)
from lightning_pipe.callbacks.monitor import exclude_step_from_monitors
from lightning_pipe.callbacks.report import write_profile_report
from lightning_pipe.engine import PipelinePlan, ProfileResult, SetupError, TaskSpan
from lightning_pipe.engine.common.atomic_file import atomic_write
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.observe.clocks import make_clock_converter, measure_offset
from lightning_pipe.engine.observe.timeline import Bar, Timeline, convert_bars_to_clock, task_bars
from lightning_pipe.engine.observe.trace import TraceRecorder
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.object_collectives import gather_objects_on_first_rank
from lightning_pipe.strategies.strategy_info import get_strategy_info

_PACKAGES = ("lightning-pipe", "torch", "lightning", "torchrec")
_TRACED = 6  # batches traced before a profile, for the report's timeline


class PipelineProfiler(CallbackWithProcessGroup):
    """Measure the cost of each task after chosen optimizer steps. For the strategies ``recsys_*``.

    The cost of a task is its exposed time: the time by which a step is shorter if the task is replayed
    (:class:`~lightning_pipe.engine.profiling.profiler.TaskProfiler`). A long task that overlaps with other work may
    cost nothing. To measure it, the callback trains the latest batches again, in more than 2,000 iterations by default.
    It restores parameters, optimizers, metrics and random generators afterwards, so training continues as if no profile
    had been taken. All ranks profile at the same step. Rank 0 reports its own measurements:

    - a printed table;
    - ``exposed/TASK`` and ``own/TASK`` in seconds for the trainer's loggers;
    - a JSON file, which ``ProfileResult.from_json`` reads;
    - an HTML report with the costs, the plan and a picture of the timeline before the profile. The report is a single
      file that can be opened offline. Its pictures require Matplotlib.

    If a file cannot be written, training continues with a warning. A profile is postponed to the next optimizer step
    while another callback records a trace, and while no batch is available to profile with, as in a pipeline that has
    just started.

    Args:
        at_steps: optimizer steps after which to profile, counted like ``trainer.global_step`` from the beginning of
            training (default none).
        every_n_steps: interval between profiles, in optimizer steps (default None). Can be combined with *at_steps*.
        tasks: names of the tasks to measure (default None: all tasks).
        rounds: number of measurements of each task (default 7). More rounds give narrower confidence intervals and
            take proportionally longer.
        iterations: number of iterations in each measurement (default 10).
        batches: number of latest batches to profile with (default 4).
        path: path of the JSON file, relative to the trainer's log folder (default ``"profile.json"``); None writes no
            file. If several profiles are taken, the step is added to the file name.
        report: path of the HTML report, as for *path* (default ``"report.html"``).
        show: print the table (default True).

    Raises:
        SetupError: If a number is too small or no step is given; when fit begins, if the strategy's tasks cannot be
            profiled.
    """

    def __init__(
        self,
        at_steps: Sequence[int] = (),
        every_n_steps: int | None = None,
        *,
        tasks: Sequence[str] | None = None,
        rounds: int = 7,
        iterations: int = 10,
        batches: int = 4,
        path: str | Path | None = "profile.json",
        report: str | Path | None = "report.html",
        show: bool = True,
    ) -> None:
        steps = [*at_steps, *([] if every_n_steps is None else [every_n_steps])]
        if not steps or any(not isinstance(step, int) or step < 1 for step in steps):
            raise SetupError(
                "PipelineProfiler needs the optimizer steps to profile after, 1 or later, got"
                f" at_steps={tuple(at_steps)} and every_n_steps={every_n_steps}. Pass for example at_steps=(100,) or"
                " every_n_steps=1000."
            )
        for name, number in (("rounds", rounds), ("iterations", iterations), ("batches", batches)):
            check_whole_number(name, number, 1)
        self._at_steps = sorted(set(at_steps))
        self._every = every_n_steps
        self._tasks = None if tasks is None else list(tasks)
        self._rounds, self._iterations = rounds, iterations
        self._path = None if path is None else Path(path)
        self._report = None if report is None else Path(report)
        self._show = show
        self._latest: deque[Any] = deque(maxlen=batches)
        self._profiles: dict[int, ProfileResult] = {}
        self._next_step: int | None = None  # optimizer step after which to profile next
        self._stepped = 0
        self._trace: TraceRecorder | None = None
        self._folder = Path()

    @property
    def profiles(self) -> dict[int, ProfileResult]:
        """Profiles of the last fit, by the optimizer step after which they were taken."""
        return dict(self._profiles)

    # ------------------------------------------------------------------ Lightning's hooks

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if get_strategy_info(trainer.strategy).profile is None:
            raise SetupError(
                "PipelineProfiler expected a strategy whose tasks can be profiled individually, got"
                f" {type(trainer.strategy).__name__}. Use a recsys_* strategy such as"
                " strategy='recsys_prefetch_pipeline'. For language models in stages use BubbleMonitor, for other"
                " pipelines PipelineMonitor or PipelineTrace."
            )
        self._latest.clear()
        self._profiles.clear()
        self._stepped = trainer.global_step
        self._next_step = self._find_next_profile_step(self._stepped)
        self._trace, self._warned = None, False
        self._make_group()
        requested = {"at_steps": self._at_steps, "every_n_steps": self._every, "tasks": self._tasks}
        # Ranks that profiled at different steps would deadlock.
        described = [(name, str(value)) for name, value in requested.items()]
        check_agreement(described, "profile requested from PipelineProfiler", self._group, error_class=SetupError)
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir is a collective call

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stepped = trainer.global_step
        loop = get_training_epoch_loop(trainer)
        if self._next_step is None or loop.ledger is None:
            return
        # Keep the batch as the loader returned it, since the transfer hooks are called again. Batches already in flight
        # were not held and cannot be used.
        loop.ledger.keeps_batches = True
        if loop.ledger.oldest.batch is not None:
            self._latest.append(move_data_to_device(loop.ledger.oldest.batch, torch.device("cpu")))
        pipeline = pipeline_of(trainer, self)
        if pipeline.trace is None and (self._next_step - self._stepped) * trainer.accumulate_grad_batches <= _TRACED:
            pipeline.start_trace((_TRACED + pipeline.plan.pipeline_depth) * len(pipeline.plan.tasks))
            self._trace = pipeline.trace

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, next_step = trainer.global_step, self._next_step
        # Only after an optimizer step: in the middle of an accumulation the gradients would be lost.
        if next_step is None or step == self._stepped or step < next_step or not self._latest:
            return
        active_trace = pipeline_of(trainer, self).trace
        if active_trace is not None and active_trace is not self._trace:
            return
        self._profile(trainer, step)
        self._next_step = self._find_next_profile_step(step)
        self._latest.clear()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_trace(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._destroy_group()
        if not self._profiles:
            rank_zero_warn(
                f"PipelineProfiler took no profile in {trainer.global_step} optimizer steps, with"
                f" at_steps={tuple(self._at_steps)} and every_n_steps={self._every}. Profile at earlier steps, or train"
                " longer."
            )

    def _find_next_profile_step(self, step: int) -> int | None:
        """First step after *step* at which to profile; None if no profile is left."""
        later = [at_step for at_step in self._at_steps if at_step > step]
        if self._every is not None:
            later.append((step // self._every + 1) * self._every)
        return min(later, default=None)

    # ------------------------------------------------------------------ profiles and files

    def _profile(self, trainer: pl.Trainer, step: int) -> None:
        pipeline, measure = pipeline_of(trainer, self), get_strategy_info(trainer.strategy).profile
        assert measure is not None
        spans = self._stop_trace(trainer)
        bars = self._bars_of_all(trainer, spans)
        profile = measure(list(self._latest), self._tasks, rounds=self._rounds, iterations=self._iterations)
        self._profiles[step] = profile
        exclude_step_from_monitors(trainer)
        if trainer.is_global_zero:
            self._publish(trainer, step, profile, pipeline.plan, bars)

    def _publish(
        self,
        trainer: pl.Trainer,
        step: int,
        profile: ProfileResult,
        plan: PipelinePlan,
        bars: Sequence[Bar],
    ) -> None:
        if self._show:
            profile.print_report()
        values = {f"own/{name}": seconds for name, seconds in profile.task_seconds.items()}
        values.update({f"exposed/{name}": seconds for name, seconds in profile.exposed.items()})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        path, report = self._path, self._report
        if path is not None:
            self._write_or_warn(lambda: _write_json(self._get_output_path(path, step), profile))
        if report is not None:
            timeline = Timeline(bars, plan.dependencies) if bars else None
            facts = _collect_run_facts(trainer, step, profile)
            self._write_or_warn(
                lambda: write_profile_report(self._get_output_path(report, step), profile, plan, timeline, facts)
            )

    def _stop_trace(self, trainer: pl.Trainer) -> list[TaskSpan]:
        """Stop this callback's trace, if it is the one being recorded, and return its spans."""
        trace, self._trace = self._trace, None
        program = get_training_epoch_loop(trainer).program
        if trace is None or program is None or program.pipeline.trace is not trace:
            return []
        return program.pipeline.stop_trace()

    def _bars_of_all(self, trainer: pl.Trainer, spans: Sequence[TaskSpan]) -> list[Bar]:
        """Gather the bars of all ranks on rank 0, on a common clock."""
        offset = measure_offset(self._group)
        local_bars = convert_bars_to_clock(make_clock_converter(offset, offset), task_bars(spans, trainer.global_rank))
        return [bar for bars in gather_objects_on_first_rank(local_bars, self._group) for bar in bars]

    def _get_output_path(self, path: Path, step: int) -> Path:
        number = f"-step{step}" if self._every is not None or len(self._at_steps) > 1 else ""
        return join_path_with_suffix(self._folder, path, number)


def _write_json(path: Path, profile: ProfileResult) -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text(profile.to_json(), encoding="utf-8")


def _collect_run_facts(trainer: pl.Trainer, step: int, profile: ProfileResult) -> dict[str, str]:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    ranks = f"{trainer.world_size} {'rank' if trainer.world_size == 1 else 'ranks'}"
    return {
        "Ranks": f"{ranks} on {trainer.strategy.root_device.type}",
        "Profiled": f"after optimizer step {step}, in {profile.rounds} rounds of {profile.iterations} iterations",
        "Date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "Strategy": type(trainer.strategy).__name__,
        "Versions": ", ".join(versions),
    }
