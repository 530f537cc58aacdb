"""Records what ran when while a Trainer fits: a trace to open in ui.perfetto.dev, and a picture of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipe.callbacks.common import (
    checked_path,
    group_of_its_own,
    leave_group,
    loop_of,
    numbered,
    pipeline_of,
)
from lightning_pipe.callbacks.monitor import leave_step_out
from lightning_pipe.callbacks.recording import Recording
from lightning_pipe.callbacks.timeline_picture import draw_timeline, require_matplotlib
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.observe.clocks import measure_offset, to_first_rank
from lightning_pipe.engine.observe.timeline import Timeline, on_clock
from lightning_pipe.engine.observe.trace_events import write_trace
from lightning_pipe.engine.ranks.together import gather_to_first
from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.strategies.running_work import running

__all__ = ["PipelineTrace"]

_DRAWN_OF_STAGES = 2  # batches; of more, no picture shows the bars


class PipelineTrace(pl.Callback):
    """Records the begin and the end of every task on every thread and stream, over some batches of a fit.

    For the strategies ``pipeline``, ``recsys_*`` and ``llm_*``; of the last, the micro-batches' way through the stages
    too. All ranks are put on one clock, rank 0's, which their messages tell to some microseconds (``clock_error_us`` in
    the file), and arrows show what depends on what. Two files are written by rank 0 at the end of the recorded batches,
    or of training if that comes first:

    - a trace, for https://ui.perfetto.dev: all that was recorded;
    - a picture: the last few batches, with a row for each thread and stream, and the critical path marked.

    After an exception each rank writes a trace of its own, ``NAME.rankN.json``, since others may not be there to ask.
    A file that cannot be written costs one warning, and training goes on.

    While it records, a task costs some microseconds more; otherwise nothing. On a device with streams, recording begins
    and ends with a wait until the device is idle; stages wait for theirs at each micro-batch, as they do for
    :class:`~lightning_pipe.callbacks.BubbleMonitor`. What ran ahead of the fit's very first batch is not recorded.
    PyTorch's profiler shows the same names by itself; of worker threads, if it is made with
    ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``. While a trace is recorded
    on a GPU, so does NVTX.

    Args:
        path: of the trace; relative to the folder that the trainer logs to.
        steps: the first batch to record, counted from 0 in each fit, and the number of batches; None for all.
        every: record as many again from each *every*-th batch after the first on. Files then have the number of their
            first batch in their names.
        picture: of what kind it is (``.png``, ``.svg``) its name says; relative as *path*. None for none. Needs
            Matplotlib.
        keep: the number of tasks, and of steps of micro-batches, that a rank keeps, the latest: some 300 bytes each.

    Raises:
        SetupError: a number that is too small, a picture that cannot be drawn; when fit begins, another strategy, or a
            BubbleMonitor after this callback.
    """

    def __init__(
        self,
        path: str | Path = "trace.json",
        steps: tuple[int, int] | None = (10, 4),
        every: int | None = None,
        picture: str | Path | None = "timeline.png",
        keep: int = 100_000,
    ) -> None:
        try:
            first, number = (0, 1) if steps is None else steps
            whole = all(isinstance(one, int) for one in (first, number, keep))
        except (TypeError, ValueError):
            first, number, whole = 0, 0, False
        if not whole or first < 0 or number < 1 or keep < 1:
            raise SetupError(
                f"steps is {steps} and keep {keep}; needed are the first batch, from 0, and a number of batches, at"
                " least 1, as in steps=(10, 4); and at least 1 to keep"
            )
        check_whole_number("every", every, 1, optional=True)
        if every is not None and (steps is None or every < number):
            raise SetupError(
                f"every is {every} and steps {steps}; needed are steps=(first, number), and an every that is no smaller"
                " than that number, or one recording would begin in another"
            )
        self._path = checked_path("path", path)
        self._picture = None if picture is None else checked_path("picture", picture)
        if self._picture is not None:
            require_matplotlib(self._picture)
        self._steps = steps
        self._every = every
        self._keep = keep
        self._trained = 0
        self._recording: Recording | None = None
        self._group: dist.ProcessGroup | None = None
        self._folder = Path()
        self._warned = False
        self._evaluation_began: float | None = None

    # ------------------------------------------------------------------ when

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(trainer.fit_loop.epoch_loop, PipelineTrainingEpochLoop):
            raise SetupError(
                f"the strategy is a {type(trainer.strategy).__name__}, which runs no tasks to trace; needed is"
                " strategy='pipeline', 'in_process_pipeline', or a recsys_* or llm_* one"
            )
        _check_order(trainer, self)
        self._trained, self._recording, self._warned = 0, None, False
        self._group = group_of_its_own()
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # every rank takes part in asking for it

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_if_due(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._recording is None:
            return
        # The first batch of a fit: its pipeline was not there before. Later another plan may have taken over.
        if self._trained == 0:
            self._recording.start(pipeline_of(trainer, self), 0)
        else:
            self._recording.follow(pipeline_of(trainer, self), trainer.global_rank, self._trained)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        recording = self._recording
        if recording is not None:
            recording.batch_done(self._trained)
        self._trained += 1
        if recording is not None and self._steps is not None and self._trained == recording.first + self._steps[1]:
            self._end(trainer)
        self._begin_if_due(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recording is not None and self._recording.last is not None:
            self._end(trainer)
        elif self._steps is None or self._trained <= self._steps[0]:
            rank_zero_warn(
                f"PipelineTrace recorded nothing: {self._trained} batches were trained, and steps is {self._steps};"
                " needed is a first batch among them"
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        leave_group(self._group)
        self._group = None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluation_began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recording is not None and self._evaluation_began is not None:
            self._recording.evaluated("validation", self._evaluation_began)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        suffix = f".rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self._named(self._path, recording, suffix)

        def leave() -> None:
            program = loop_of(trainer).program
            pipeline = None if program is None else program.pipeline
            bars = on_clock(to_first_rank(recording.clock, recording.clock), recording.stop(trainer.global_rank))
            timeline = Timeline(bars, () if pipeline is None else pipeline.plan.dependencies)
            write_trace(timeline, path, {"ended by": repr(exception)})

        self._try(leave)

    # ------------------------------------------------------------------ what

    def _begin_if_due(self, trainer: pl.Trainer) -> None:
        first = 0 if self._steps is None else self._steps[0]
        again = self._every is not None and self._trained > first and (self._trained - first) % self._every == 0
        if self._recording is not None or not (self._trained == first or again):
            return
        clock = measure_offset(self._group)
        self._recording = Recording(self._trained, clock, running(trainer.strategy), self._keep)
        if self._trained:
            self._recording.start(pipeline_of(trainer, self), self._trained)

    def _end(self, trainer: pl.Trainer) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        pipeline = pipeline_of(trainer, self)
        bars = recording.stop(trainer.global_rank)
        # The first rank writes and draws, and the others wait for it in the next step.
        leave_step_out(trainer, following=1)
        end = measure_offset(self._group)
        own = on_clock(to_first_rank(recording.clock, end), bars), max(recording.clock.error, end.error)
        found = gather_to_first(own, self._group)
        if trainer.global_rank:
            return
        timeline = Timeline((bar for of_rank, _ in found for bar in of_rank), pipeline.plan.dependencies)
        notes = {
            "plan": pipeline.plan.name,
            "strategy": type(trainer.strategy).__name__,
            "batches": [recording.first, recording.last],
            "clock_error_us": [round(1e6 * error, 1) for _, error in found],
        }
        self._try(lambda: write_trace(timeline, self._named(self._path, recording), notes))
        if self._picture is not None:
            picture = self._named(self._picture, recording)
            name = running(trainer.strategy).title or f"plan {pipeline.plan.name}"
            self._try(lambda: _draw(timeline, picture, name, recording))

    def _named(self, path: Path, recording: Recording, suffix: str = "") -> Path:
        number = "" if self._every is None else f"-{recording.first}"
        return numbered(self._folder, path, f"{number}{suffix}")

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, RuntimeError, ValueError) as error:  # of the file, or of a device that has failed
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"PipelineTrace could not write ({error}); training goes on. Give it another path")


def _draw(timeline: Timeline, path: Path, name: str, recording: Recording) -> None:
    ends = list(recording.ends)[-_DRAWN_OF_STAGES - 1 if recording.of_stages else 0 :]
    assert recording.last is not None
    first = recording.last - len(ends) + 2
    batches = f"batch {first}" if first == recording.last else f"batches {first} to {recording.last}"
    draw_timeline(timeline, path, f"{name}: what ran when, while {batches} of the fit trained", ends)


def _check_order(trainer: pl.Trainer, trace: PipelineTrace) -> None:
    """A BubbleMonitor sets the stages' recording back to what it found: this callback must be the later to set it."""
    names = [type(one).__name__ for one in trainer.callbacks]  # type: ignore[attr-defined]
    own = trainer.callbacks.index(trace)  # type: ignore[attr-defined]
    if "BubbleMonitor" in names[own:]:
        raise SetupError(
            f"the callbacks are {', '.join(names)}; PipelineTrace needs to come after BubbleMonitor, which sets the"
            " recording of stages back"
        )
