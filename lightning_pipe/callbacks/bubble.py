"""Measurement of a pipeline's bubble during training, compared with the bubble inherent in its schedule."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich import box
from rich.console import Group
from rich.text import Text

from lightning_pipe.callbacks.common import CallbackWithProcessGroup, log_values
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.common.report_table import ReportTable, print_report
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects
from lightning_pipe.llm.schedules.bubble import BubbleReport, StepBubble, build_bubble_report, compute_step_bubble
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.strategies.strategy_info import PipelineInfo, get_strategy_info

_KEPT = 1000  # steps; more would hardly change the medians


class BubbleMonitor(CallbackWithProcessGroup):
    """Measure the bubble of an :class:`~lightning_pipe.strategies.LLMPipelineStrategy` and print a table after fit.

    For each measured step the callback logs two values:

    - ``bubble``: share of all ranks' time in which they compute neither forward nor backward;
    - ``bubble_simulated``: the same share in a simulation of the schedule's actions alone, with the durations that the
      actions of each stage had in this step.

    All ranks start a measured step together, after a barrier, so that earlier waits do not count as bubble. Each rank
    records every forward, backward and wait of the step, and the ranks exchange their records afterwards. Steps that
    are not measured have no overhead. With several data-parallel pipelines, the pipeline of rank 0 is shown.

    Args:
        every_n_steps: interval between measured steps, in optimizer steps (default 50). All batches that a measured
            step accumulates are measured.
        warmup: number of batches at the beginning of a fit that are not measured (default 3), because schedules are
            built and memory is allocated in them.

    Raises:
        SetupError: If ``every_n_steps`` or ``warmup`` is too small, or, when fit begins, if the strategy is not an
            ``LLMPipelineStrategy``.
    """

    def __init__(self, every_n_steps: int = 50, warmup: int = 3) -> None:
        check_whole_number("every_n_steps", every_n_steps, 1)
        check_whole_number("warmup", warmup, 0)
        self._every = every_n_steps
        self._warmup = warmup
        self._steps: deque[StepBubble] = deque(maxlen=_KEPT)
        self._seen = 0
        self._before: tuple[int, bool] | None = None
        self._report: BubbleReport | None = None

    @property
    def report(self) -> BubbleReport | None:
        """Results of the last fit, available after it has ended; None if no step was measured."""
        return self._report

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _require_pipeline_info(trainer)
        self._steps.clear()
        self._seen, self._before, self._report = 0, None, None
        self._make_group()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        if self._seen <= self._warmup or (trainer.global_step + 1) % self._every:
            return
        runner = _require_pipeline_info(trainer).runner
        self._before = len(runner.events), runner.record_events
        runner.record_events = True
        if self._group is not None:
            dist.barrier(group=self._group)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        stages = _require_pipeline_info(trainer)
        runner, (count, was_recording) = stages.runner, self._before
        self._before = None
        events = runner.events[count:]
        runner.record_events = was_recording
        if not was_recording:
            del runner.events[count:]
        events_by_rank = all_gather_objects(events, self._group)
        size = stages.mesh.size(0)
        pipeline = stages.mesh.mesh.reshape(size, -1)[:, 0].tolist()
        actions = list_compute_actions(stages.schedule, size, stages.num_microbatches, stages.stages_per_rank)
        step = compute_step_bubble([events_by_rank[rank] for rank in pipeline], actions)
        self._steps.append(step)
        values = {"bubble": step.measured}
        if step.simulated is not None:
            values["bubble_simulated"] = step.simulated
        log_values(trainer, values)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._destroy_group()
        if not self._steps:
            rank_zero_warn(
                f"BubbleMonitor measured no step in {self._seen} batches: with every_n_steps={self._every} and"
                f" warmup={self._warmup}, no step was due. Decrease `every_n_steps` or `warmup`, or train longer."
            )
            return
        stages = _require_pipeline_info(trainer)
        self._report = build_bubble_report(stages.schedule, stages.num_microbatches, self._steps)
        if trainer.is_global_zero:
            print_report(bubble_table(self._report))


def _require_pipeline_info(trainer: pl.Trainer) -> PipelineInfo:
    stages = get_strategy_info(trainer.strategy).stages
    if stages is None:
        raise SetupError(
            f"BubbleMonitor expected an LLMPipelineStrategy, got {type(trainer.strategy).__name__}: only a pipeline of"
            " stages has a bubble. Use an llm_* strategy such as strategy='llm_1f1b_pipeline', or remove BubbleMonitor."
        )
    return stages


def bubble_table(report: BubbleReport) -> Group:
    """Text form of a report: time of each rank by activity, and the measured, simulated and theoretical bubble."""
    medians = report.medians
    ranks = ReportTable(box=box.SIMPLE, padding=(0, 1))
    for column in ("rank", "busy", "waits forward", "waits backward", "other", "done", "idle"):
        ranks.add_column(column, justify="right", overflow="fold")
    for rank, rank_times in enumerate(medians.ranks):
        times = (
            rank_times.busy,
            rank_times.wait_forward,
            rank_times.wait_backward,
            rank_times.overhead,
            rank_times.wait_end,
        )
        idle = _percent(1 - rank_times.busy / rank_times.step_duration) if rank_times.step_duration else "-"
        ranks.add_row(str(rank), *map(_milliseconds, times), idle)

    bubble = ReportTable.create_with_number_columns("bubble", "share", "step")
    bubble.add_row("measured", _percent(medians.measured), _milliseconds(medians.step))
    if medians.simulated is not None and medians.simulated_step is not None:
        bubble.add_row(
            "simulated, median durations", _percent(medians.simulated), _milliseconds(medians.simulated_step)
        )
    if report.textbook is not None:
        bubble.add_row("(P - 1) / (m + P - 1)", _percent(report.textbook), "")

    title = (
        f"schedule {report.schedule}: {_format_counted_noun(len(medians.ranks), 'rank')},"
        f" {_format_counted_noun(report.num_microbatches, 'micro-batch', 'micro-batches')}; medians of"
        f" {_format_counted_noun(report.steps, 'step')}, in ms"
    )
    return Group(Text(title), ranks, bubble)


def _format_counted_noun(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or f'{singular}s'}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
