"""Measurement of each task's exposed time: an iteration is timed with the task and with a replay of the task.

    round    | all run | A replayed | all run | B replayed | ...      the runs of a pair are adjacent in time
    exposed(A) = median over rounds of (time of all) - (time with A replayed)

A task that overlaps with others, in another thread or on another stream, can take long without making the iteration
longer. Only its exposed time does.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import PlanError, SetupError
from lightning_pipe.engine.observe.trace import TaskSpan
from lightning_pipe.engine.plans.task import IterContext, PipelineTask
from lightning_pipe.engine.profiling.profile import ProfileResult, TaskProfile
from lightning_pipe.engine.runtime.captured import Snapshot, take_snapshot
from lightning_pipe.engine.runtime.pipeline import SWPipeline

_RESAMPLES = 2000
# A task counts as reduced by the replay of another task if at most this share of its time is left.
_LEFT = 0.5


class Snapshottable(Protocol):
    """Protocol for snapshots of training state: parameters, optimizer states, buffers, random generators."""

    def snapshot(self) -> Any:
        """Take a snapshot of the current state."""
        ...

    def restore(self, state: Any) -> None:
        """Restore the state from a snapshot."""
        ...


class TaskProfiler:
    """Profiler for the tasks of a pipeline. Every rank makes the same calls.

    The profiler trains the given batches repeatedly and restores the state that *training_state* saves. The pipeline
    must not have an open period; batches in flight are trained first.

    Args:
        pipeline: pipeline whose tasks are measured.
        batches: batches on the host, in the form in which a loader supplies them. Use several: repeated rows of a
            single batch are found in caches, which rows of real data are not.
        training_state: snapshot and restore of the state that iterations change (default None: nothing is restored).
        rounds: number of measurements of each task (default 7). More rounds give narrower intervals.
        iterations: number of iterations per measurement (default 10). The time of a profile grows with rounds x
            iterations x tasks.

    Raises:
        PlanError: *batches* is empty, or *rounds* or *iterations* is less than 1.
    """

    def __init__(
        self,
        pipeline: SWPipeline,
        batches: Sequence[Any],
        training_state: Snapshottable | None = None,
        *,
        rounds: int = 7,
        iterations: int = 10,
    ) -> None:
        if not batches or rounds < 1 or iterations < 1:
            raise PlanError(
                f"a profile has {len(batches)} batches, {rounds} rounds and {iterations} iterations; expected at least"
                " one of each"
            )
        self._pipeline = pipeline
        # Snapshots, so that in-place changes of a batch do not reach later iterations.
        self._batches = [take_snapshot(batch) for batch in batches]
        self._keeper = training_state
        self._rounds = rounds
        self._iterations = iterations
        self._source = _CyclicBatchIterator(self._batches)

    def profile(self, task: str | PipelineTask) -> TaskProfile:
        """Measure one task.

        Raises:
            PlanError: the task is unknown or cannot be replayed.
            SetupError: the task has effects that it does not declare.
        """
        name = task if isinstance(task, str) else task.name
        planned = self._pipeline.plan.tasks.get(name)
        if planned is not None and (reason := planned.not_replayable):
            raise PlanError(f"task {name!r} cannot be replayed, since {reason}; use profile_many() to measure its time")
        return self.profile_many([name]).tasks[name]

    def profile_many(self, tasks: Sequence[str | PipelineTask] | None = None, *, check: bool = True) -> ProfileResult:
        """Measure several tasks. For tasks that cannot be replayed, only the own time is measured.

        Args:
            tasks: names or tasks of the plan (default all).
            check: run :meth:`check` for each task first (default True). Costs two serial iterations per task.

        Raises:
            PlanError: a task is unknown, or ranks profile different tasks.
            SetupError: a task has effects that it does not declare.
        """
        plan = self._pipeline.plan
        names = [
            task if isinstance(task, str) else task.name for task in (list(plan.tasks) if tasks is None else tasks)
        ]
        for name in names:
            if name not in plan.tasks:
                raise PlanError(f"the plan has no task {name!r}; its tasks are {', '.join(plan.tasks)}")
        measured = [name for name in names if not plan.tasks[name].not_replayable]
        # Ranks that run different numbers of iterations would wait for each other forever.
        settings = {
            "rounds": self._rounds,
            "iterations": self._iterations,
            "batches": len(self._batches),
            "check": check,
        }
        described = [("tasks", ", ".join(names)), *((name, str(value)) for name, value in settings.items())]
        self._pipeline.check_agreement(described, "profile")
        with self._state_restored():
            if check:
                for name in measured:
                    self._check_task_replay(name)
            return self._measure_exposed_times(names, measured)

    def check_task_replay(self, task: str | PipelineTask) -> None:
        """Check that later tasks compute the same after a replay of a task as after a run of the task.

        Two serial iterations train the same batch from the same state, the second one with the task replayed.

        Raises:
            SetupError: a later task wrote different values, so the task has effects that it does not declare.
        """
        with self._state_restored():
            self._check_task_replay(task if isinstance(task, str) else task.name)

    # ------------------------------------------------------------------ measuring

    def _measure_exposed_times(self, names: Sequence[str], measured: Sequence[str]) -> ProfileResult:
        pipeline = self._pipeline
        pipeline.drain()
        for _ in range(pipeline.plan.pipeline_depth + len(self._batches)):
            self._run_iteration()
        all_run: list[float] = []
        cores_before = _read_core_times()
        run_times: dict[str, list[float]] = {name: [] for name in pipeline.plan.tasks}
        saved: dict[str, list[float]] = {name: [] for name in measured}
        run_times_without: dict[str, dict[str, list[float]]] = {
            name: {task: [] for task in pipeline.plan.tasks} for name in measured
        }
        for _ in range(self._rounds):
            for name in measured or [""]:
                all_run.append(self._measure_mean_iteration_time(run_times))
                if not name:
                    continue
                pipeline.enable_shortcut(name, key=self._make_batch_key_fn())
                # Capture once per batch, then continue until the pipeline only holds replayed iterations.
                for _ in range(len(self._batches) + pipeline.plan.pipeline_depth):
                    self._run_iteration()
                saved[name].append(all_run[-1] - self._measure_mean_iteration_time(run_times_without[name]))
                pipeline.disable_shortcut(name)
                for _ in range(pipeline.plan.pipeline_depth):
                    self._run_iteration()
        medians = {name: statistics.median(times) for name, times in run_times.items() if times}
        tasks: dict[str, TaskProfile] = {}
        for name in names:
            if name in saved:
                low, high = _compute_confidence_interval(saved[name])
                left = {task: statistics.median(times) for task, times in run_times_without[name].items() if times}
                along = _find_tasks_reduced_by_replay(name, medians, left)
                exposed = statistics.median(saved[name])
                tasks[name] = TaskProfile(medians.get(name, 0.0), exposed, low, high, along)
            else:
                reason = f"not replayed: {pipeline.plan.tasks[name].not_replayable}"
                tasks[name] = TaskProfile(medians.get(name, 0.0), unmeasured_reason=reason)
        seconds = statistics.median(all_run)
        busy = None if pipeline.device.type == "cuda" else _compute_busy_share(cores_before, _read_core_times())
        return ProfileResult(pipeline.plan.name, seconds, tasks, self._rounds, self._iterations, busy)

    def _measure_mean_iteration_time(self, run_times: Mapping[str, list[float]]) -> float:
        """Mean time of the iterations of one measurement in seconds. Appends each task's time to *run_times*."""
        self._pipeline.start_trace()
        self._synchronize()
        begun = time.perf_counter()
        for _ in range(self._iterations):
            self._run_iteration()
        self._synchronize()
        seconds = (time.perf_counter() - begun) / self._iterations
        spans: list[TaskSpan] = self._pipeline.stop_trace()
        for span in spans:
            run_times[span.task].append(span.end - span.start)
        return seconds

    def _run_iteration(self) -> IterContext:
        return self._pipeline.progress(self._source)

    def _make_batch_key_fn(self) -> Callable[[IterContext], int]:
        """Key function that maps an iteration to the index of its batch."""
        # Iterations are numbered in the order of their start, and batches are supplied cyclically.
        offset = (self._source.yielded - self._pipeline.num_started) % len(self._batches)
        return lambda ctx: (ctx.iter_idx + offset) % len(self._batches)

    def _synchronize(self) -> None:
        if self._pipeline.device.type == "cuda":
            torch.cuda.synchronize(self._pipeline.device)

    # ------------------------------------------------------------------ state

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        pipeline = self._pipeline
        pipeline.drain()
        snapshot = None if self._keeper is None else self._keeper.snapshot()
        try:
            yield
        finally:
            # Batches in flight of a failed pipeline cannot be trained.
            pipeline.abandon()
            if not pipeline.failed:
                pipeline.disable_shortcut()
            if self._keeper is not None:
                self._keeper.restore(snapshot)

    def _check_task_replay(self, name: str) -> None:
        pipeline = self._pipeline
        pipeline.drain()
        snapshot = None if self._keeper is None else self._keeper.snapshot()
        names = list(pipeline.plan.tasks)
        later = names[names.index(name) + 1 :]
        pipeline.enable_shortcut(name, replay_first=True)
        written = []
        try:
            for _ in range(2):
                with pipeline.reading_contexts_after_tasks(
                    later, _make_written_fields_snapshot_fn(pipeline.plan.tasks)
                ) as seen:
                    pipeline.run_one_serial_iter(self._batches[0].copy_captured_value())
                written.append(seen)
                if self._keeper is not None:
                    self._keeper.restore(snapshot)
        finally:
            if not pipeline.failed:
                pipeline.disable_shortcut(name)
        _check_fields_equal(name, written[0], written[1])


# Tensors that later tasks wrote, by task and field.
Seen = dict[tuple[str, str], list[Tensor]]


def _make_written_fields_snapshot_fn(tasks: Mapping[str, PipelineTask]) -> Callable[[str, IterContext], Seen]:
    def snapshot_written_fields(name: str, ctx: IterContext) -> Seen:
        # Fields of declared effects may hold pending communication, whose buffers are not yet filled.
        owned = {field for io in tasks[name].io for field in io.fields}
        fields = [field for field in tasks[name].writes if field in vars(ctx) and field not in owned]
        return {(name, field): take_snapshot(getattr(ctx, field)).tensors() for field in fields}

    return snapshot_written_fields


def _check_fields_equal(name: str, first: Seen, second: Seen) -> None:
    for (task, field), tensors in first.items():
        second_tensors = second.get((task, field), [])
        if len(tensors) != len(second_tensors) or not all(map(_are_tensors_close, tensors, second_tensors)):
            raise SetupError(
                f"task {name!r} has effects that it does not declare: after a replay, {task!r} wrote a different"
                f" {field!r}. Declare the effects with PipelineTask(..., io=[DeclaredIO(capture, restore)]), or set"
                " not_replayable"
            )


def _are_tensors_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_floating_point():
        return torch.allclose(first, second, rtol=1e-5, atol=1e-6, equal_nan=True)
    return torch.equal(first, second)


def _find_tasks_reduced_by_replay(
    name: str, medians: Mapping[str, float], left: Mapping[str, float]
) -> tuple[str, ...]:
    most = max(medians.values(), default=0.0)
    return tuple(
        other_task
        for other_task, seconds in medians.items()
        # The times of very short tasks are too noisy to compare.
        if other_task != name and seconds > 0.01 * most and left.get(other_task, seconds) < _LEFT * seconds
    )


def _compute_confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median: percentiles of the bootstrap (Efron, 1979)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]


def _read_core_times() -> tuple[int, int]:
    """Time for which the cores of this machine were busy and existed, in ticks since its start; zeros if unknown."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without "idle" and "iowait"


def _compute_busy_share(before: tuple[int, int], after: tuple[int, int]) -> float | None:
    busy, ticks = after[0] - before[0], after[1] - before[1]
    return busy / ticks if ticks > 0 else None


class _CyclicBatchIterator(Iterator[Any]):
    """Endless iterator over the same batches."""

    def __init__(self, batches: Sequence[Snapshot]) -> None:
        self._batches = batches
        self.yielded = 0

    def __next__(self) -> Any:
        batch = self._batches[self.yielded % len(self._batches)]
        self.yielded += 1
        return batch.copy_captured_value()
