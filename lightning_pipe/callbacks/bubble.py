"""Measures the bubble of a pipeline while it trains, and prints it beside the one that its schedule has by itself."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich import box
from rich.console import Group
from rich.text import Text

from lightning_pipe.callbacks.common import log_values
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.fitted_table import FittedTable, print_report
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.engine.ranks.together import gather
from lightning_pipe.llm.schedules.bubble import BubbleReport, StepBubble, measure_step, summarise
from lightning_pipe.llm.schedules.simulation import actions_of
from lightning_pipe.strategies.running_work import RunningStages, running

__all__ = ["BubbleMonitor", "bubble_table"]

_KEPT = 1000  # steps; medians of more say no more


class BubbleMonitor(pl.Callback):
    """Measures some steps under an :class:`~lightning_pipe.strategies.LLMPipelineStrategy`; prints a table at the end.

    Of each measured step it logs ``bubble``, the share of all ranks' time in which they neither compute forward nor
    backward, and ``bubble_simulated``, the same of the schedule's actions alone, each of which takes as long as those
    of its stage did in this step. All ranks begin a measured step together, since what they wait for before it is no
    matter of the schedule's; they note every forward, backward and wait in it, and tell each other afterwards. Other
    steps cost nothing. Of several data-parallel pipelines, the one of rank 0 is shown.

    Args:
        every_n_steps: measure each n-th optimiser step, with all batches that it accumulates.
        warmup: batches of a fit that are not measured, at its beginning, where schedules are made and memory is new.

    Raises:
        SetupError: a number that is too small; when fit begins, another strategy.
    """

    def __init__(self, every_n_steps: int = 50, warmup: int = 3) -> None:
        if every_n_steps < 1 or warmup < 0:
            raise SetupError(
                f"every_n_steps is {every_n_steps} and warmup {warmup}; needed are at least 1 and at least 0"
            )
        self._every = every_n_steps
        self._warmup = warmup
        self._steps: deque[StepBubble] = deque(maxlen=_KEPT)
        self._seen = 0
        self._before: tuple[int, bool] | None = None
        self._group: dist.ProcessGroup | None = None
        self._report: BubbleReport | None = None

    @property
    def report(self) -> BubbleReport | None:
        """What the last fit came to, once it has ended; None where no step was measured."""
        return self._report

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _stages(trainer)
        self._steps.clear()
        self._seen, self._before, self._report = 0, None, None
        # Its own, on the CPU: others may be under way at the same time.
        self._group = new_group(backend="gloo")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        if self._seen <= self._warmup or (trainer.global_step + 1) % self._every:
            return
        runner = _stages(trainer).runner
        self._before = len(runner.events), runner.record_events
        runner.record_events = True
        dist.barrier(group=self._group)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        stages = _stages(trainer)
        runner, (count, wanted) = stages.runner, self._before
        self._before = None
        events = runner.events[count:]
        runner.record_events = wanted
        if not wanted:
            del runner.events[count:]
        found = gather(events, self._group)
        size = stages.mesh.size(0)
        pipeline = stages.mesh.mesh.reshape(size, -1)[:, 0].tolist()
        actions = actions_of(stages.schedule, size, stages.num_microbatches, stages.stages_per_rank)
        step = measure_step([found[rank] for rank in pipeline], actions)
        self._steps.append(step)
        values = {"bubble": step.measured}
        if step.simulated is not None:
            values["bubble_simulated"] = step.simulated
        log_values(trainer, values)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        dist.destroy_process_group(self._group)
        self._group = None
        if not self._steps:
            rank_zero_warn(
                f"BubbleMonitor measured no step: {self._seen} batches were trained; it measures every"
                f" {self._every}th step after {self._warmup} batches"
            )
            return
        stages = _stages(trainer)
        self._report = summarise(stages.schedule, stages.num_microbatches, self._steps)
        if trainer.is_global_zero:
            print_report(bubble_table(self._report))


def _stages(trainer: pl.Trainer) -> RunningStages:
    stages = running(trainer.strategy).stages
    if stages is None:
        raise SetupError(
            f"the strategy is a {type(trainer.strategy).__name__}; only a pipeline of stages has a bubble: needed is an"
            " LLMPipelineStrategy, by class or as llm_1f1b_pipeline and the like"
        )
    return stages


def bubble_table(report: BubbleReport) -> Group:
    """A report as text: what each rank did with its time, and the bubble, measured and expected."""
    medians = report.medians
    ranks = FittedTable(box=box.SIMPLE, padding=(0, 1))
    for column in ("rank", "busy", "waits forward", "waits backward", "other", "done", "idle"):
        ranks.add_column(column, justify="right", no_wrap=True)
    for rank, one in enumerate(medians.ranks):
        times = (one.busy, one.wait_forward, one.wait_backward, one.other, one.done)
        idle = _percent(1 - one.busy / one.step) if one.step else "-"
        ranks.add_row(str(rank), *map(_milliseconds, times), idle)

    bubble = FittedTable.of_figures("bubble", "share", "step")
    bubble.add_row("measured", _percent(medians.measured), _milliseconds(medians.step))
    if medians.simulated is not None and medians.bound is not None:
        bubble.add_row("simulated, median durations", _percent(medians.simulated), _milliseconds(medians.bound))
    if report.textbook is not None:
        bubble.add_row("(P - 1) / (m + P - 1)", _percent(report.textbook), "")

    title = (
        f"schedule {report.schedule}: {_count(len(medians.ranks), 'rank')},"
        f" {_count(report.num_microbatches, 'micro-batch', 'micro-batches')}; medians of"
        f" {_count(report.steps, 'step')}, in ms"
    )
    return Group(Text(title), ranks, bubble)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
