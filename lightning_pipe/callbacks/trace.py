"""Trace of the tasks of a fit, written for ui.perfetto.dev and as a timeline picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipe.callbacks.common import (
    CallbackWithProcessGroup,
    check_strategy_has_pipeline,
    get_training_epoch_loop,
    join_path_with_suffix,
    pipeline_of,
)
from lightning_pipe.callbacks.monitor import exclude_step_from_monitors
from lightning_pipe.callbacks.recording import TraceRecording
from lightning_pipe.callbacks.timeline_picture import draw_timeline, require_matplotlib
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.observe.chrome_trace import export_chrome_trace
from lightning_pipe.engine.observe.clocks import make_clock_converter, measure_offset
from lightning_pipe.engine.observe.timeline import Timeline, convert_bars_to_clock
from lightning_pipe.engine.ranks.object_collectives import gather_objects_on_first_rank
from lightning_pipe.strategies.strategy_info import get_strategy_info

_DRAWN_OF_STAGES = 2  # batches; with more, the bars would be too narrow to see


class PipelineTrace(CallbackWithProcessGroup):
    """Record start and end of every task on every thread and stream, over some batches of a fit.

    For the strategies ``pipeline``, ``in_process_pipeline``, ``recsys_*`` and ``llm_*``. For ``llm_*`` strategies the
    path of the micro-batches through the stages is recorded too. Times of all ranks are converted to the clock of
    rank 0. The ranks of one machine share a clock; between machines the error is estimated from round trips
    (``clock_error_us`` in the file), and is usually some microseconds. Arrows show dependencies; ``arrows_left_out`` in
    the file counts those that this error reverses. Rank 0 writes two files after the recorded batches, or at the end of
    training if that comes first:

    - a trace for https://ui.perfetto.dev with everything that was recorded;
    - a picture of the last few batches, with one row for each thread and stream and with the critical path marked.

    After an exception each rank writes its own trace, ``NAME.rankN.json``, because other ranks may no longer respond.
    If a file cannot be written, training continues with one warning.

    Recording adds less than 1 µs to a task (``benchmarks/trace_cost.py``). Outside the recorded batches the callback
    has no overhead. On a device with streams, a recording begins and ends with a device synchronization, and stages
    synchronize at each micro-batch, as they do for :class:`~lightning_pipe.callbacks.BubbleMonitor`. Work that ran
    ahead of the first batch of a fit is not recorded.

    PyTorch's profiler shows the same task names without this callback. It includes worker threads if it is created
    with ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``. NVTX shows the names
    too while a trace is recorded on a GPU.

    Args:
        path: path of the trace, relative to the trainer's log folder (default ``"trace.json"``).
        steps: first batch to record, counted from 0 in each fit, and number of batches (default ``(10, 4)``). None
            records all batches.
        every: interval in batches after which the recording is repeated (default None: record once). Must be at least
            the number of batches in *steps*. The number of the first recorded batch is added to the file names.
        picture: path of the picture, relative to the trainer's log folder (default ``"timeline.png"``). Its suffix
            selects the format, such as ``.png`` or ``.svg``. None writes no picture. Requires Matplotlib.
        max_spans: number of latest tasks, and of latest micro-batch records, that each rank keeps (default 100,000). An
            entry takes about 300 bytes.

    Raises:
        SetupError: If a number is too small or the picture cannot be drawn; when fit begins, if the strategy runs no
            tasks or a ``BubbleMonitor`` comes after this callback.
    """

    def __init__(
        self,
        path: str | Path = "trace.json",
        steps: tuple[int, int] | None = (10, 4),
        every: int | None = None,
        picture: str | Path | None = "timeline.png",
        max_spans: int = 100_000,
    ) -> None:
        if steps is not None and (len(steps) != 2 or steps[0] < 0 or steps[1] < 1):
            raise SetupError(
                "`steps` must be a first batch of at least 0 and a number of batches of at least 1, got"
                f" steps={steps}. Pass whole numbers, for example steps=(10, 4)."
            )
        check_whole_number("max_spans", max_spans, 1)
        check_whole_number("every", every, 1, optional=True)
        if every is not None and (steps is None or every < steps[1]):
            raise SetupError(
                "`every` must be at least the number of batches in steps=(first, number), so that recordings do not"
                f" overlap, got every={every} and steps={steps}. Increase `every`, or pass shorter `steps`."
            )
        self._path = Path(path)
        self._picture = None if picture is None else Path(picture)
        if self._picture is not None:
            require_matplotlib(self._picture)
        self._steps = steps
        self._every = every
        self._keep = max_spans
        self._trained = 0
        self._recording: TraceRecording | None = None
        self._folder = Path()
        self._evaluation_began: float | None = None
        self._timeline: Timeline | None = None
        self._batch_ends: list[float] = []

    @property
    def timeline(self) -> Timeline | None:
        """Timeline of all ranks in the last recording, on rank 0; None before its end and on other ranks."""
        return self._timeline

    @property
    def batch_ends(self) -> list[float]:
        """Times at which the batches of :attr:`timeline` ended, in seconds on its clock, after that of its begin."""
        return list(self._batch_ends)

    # ------------------------------------------------------------------ Lightning's hooks

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_strategy_has_pipeline(trainer, self)
        _check_callback_order(trainer, self)
        self._trained, self._recording, self._warned = 0, None, False
        self._make_group()
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir is a collective call

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_if_due(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._recording is None:
            return
        # Before the first batch of a fit its pipeline does not exist yet. Later, another plan may have replaced it.
        if self._trained == 0:
            self._recording.start(pipeline_of(trainer, self), 0)
        else:
            self._recording.switch_pipeline(pipeline_of(trainer, self), trainer.global_rank, self._trained)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        recording = self._recording
        if recording is not None:
            recording.record_batch_end(self._trained)
        self._trained += 1
        if recording is not None and self._steps is not None and self._trained == recording.first + self._steps[1]:
            self._end(trainer)
        self._begin_if_due(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recording is not None and self._recording.last is not None:
            self._end(trainer)
        elif self._steps is None or self._trained <= self._steps[0]:
            rank_zero_warn(
                f"PipelineTrace recorded no batch: {self._trained} batches were trained, with steps={self._steps}."
                " Start the recording at an earlier batch, or train longer."
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._destroy_group()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluation_began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recording is not None and self._evaluation_began is not None:
            self._recording.record_evaluation("validation", self._evaluation_began)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        suffix = f".rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self._get_output_path(self._path, recording, suffix)

        def write_rank_trace() -> None:
            program = get_training_epoch_loop(trainer).program
            pipeline = None if program is None else program.pipeline
            bars = convert_bars_to_clock(
                make_clock_converter(recording.clock, recording.clock), recording.stop(trainer.global_rank)
            )
            timeline = Timeline(bars, () if pipeline is None else pipeline.plan.dependencies)
            export_chrome_trace(timeline, path, {"ended by": repr(exception)})

        self._write_or_warn(write_rank_trace)

    # ------------------------------------------------------------------ recordings and files

    def _begin_if_due(self, trainer: pl.Trainer) -> None:
        first = 0 if self._steps is None else self._steps[0]
        repeats = self._every is not None and self._trained > first and (self._trained - first) % self._every == 0
        if self._recording is not None or not (self._trained == first or repeats):
            return
        clock = measure_offset(self._group)
        self._recording = TraceRecording(self._trained, clock, get_strategy_info(trainer.strategy), self._keep)
        if self._trained:
            self._recording.start(pipeline_of(trainer, self), self._trained)

    def _end(self, trainer: pl.Trainer) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        pipeline = pipeline_of(trainer, self)
        bars = recording.stop(trainer.global_rank)
        # Rank 0 writes the files, and the other ranks wait for it in the next step.
        exclude_step_from_monitors(trainer, following=1)
        end = measure_offset(self._group)
        bars_and_error = (
            convert_bars_to_clock(make_clock_converter(recording.clock, end), bars),
            max(recording.clock.error, end.error),
        )
        bars_and_errors = gather_objects_on_first_rank(bars_and_error, self._group)
        if trainer.global_rank:
            return
        timeline = Timeline((bar for rank_bars, _ in bars_and_errors for bar in rank_bars), pipeline.plan.dependencies)
        self._timeline, self._batch_ends = timeline, list(recording.ends)
        notes = {
            "plan": pipeline.plan.name,
            "strategy": type(trainer.strategy).__name__,
            "batches": [recording.first, recording.last],
            "clock_error_us": [round(1e6 * error, 1) for _, error in bars_and_errors],
        }
        self._write_or_warn(lambda: export_chrome_trace(timeline, self._get_output_path(self._path, recording), notes))
        if self._picture is not None:
            picture = self._get_output_path(self._picture, recording)
            name = get_strategy_info(trainer.strategy).title or f"plan {pipeline.plan.name}"
            self._write_or_warn(lambda: _draw_recording_timeline(timeline, picture, name, recording))

    def _get_output_path(self, path: Path, recording: TraceRecording, suffix: str = "") -> Path:
        number = "" if self._every is None else f"-{recording.first}"
        return join_path_with_suffix(self._folder, path, f"{number}{suffix}")


def _draw_recording_timeline(timeline: Timeline, path: Path, name: str, recording: TraceRecording) -> None:
    ends = list(recording.ends)[-_DRAWN_OF_STAGES - 1 if recording.records_micro_batches else 0 :]
    assert recording.last is not None
    first = recording.last - len(ends) + 2
    batches = f"batch {first}" if first == recording.last else f"batches {first} to {recording.last}"
    draw_timeline(timeline, path, f"{name}: timeline of {batches} of the fit", ends)


def _check_callback_order(trainer: pl.Trainer, trace: PipelineTrace) -> None:
    """Check that PipelineTrace comes after BubbleMonitor, which resets the stages' recording to its earlier state."""
    names = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    position = trainer.callbacks.index(trace)  # type: ignore[attr-defined]
    if "BubbleMonitor" in names[position:]:
        raise SetupError(
            "PipelineTrace must come after BubbleMonitor, which would otherwise switch off its recording of stages, got"
            f" callbacks {', '.join(names)}. Place PipelineTrace after BubbleMonitor in the list of callbacks."
        )
