"""Breakdown of the step time while a Trainer fits, with a one-line diagnosis of the bottleneck."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_pipe._compat.lightning import batch_sizes, get_combined_loader
from lightning_pipe.callbacks.common import (
    CallbackWithProcessGroup,
    check_strategy_has_pipeline,
    get_training_epoch_loop,
    log_values,
    pipeline_of,
)
from lightning_pipe.callbacks.verdict import (
    BottleneckVerdict,
    StepBreakdown,
    Straggler,
    compute_forward_wait_seconds,
    compute_main_thread_wait_seconds,
    diagnose_bottleneck,
    find_straggler,
)
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.common.report_table import print_report
from lightning_pipe.engine.observe.meter import CallerTimeMeter
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, is_single_host
from lightning_pipe.strategies.strategy_info import get_strategy_info

_FEWEST = 3  # iterations of an epoch below which no verdict is given
_LATEST = 1000  # steps of an epoch over which the median wait is taken


@dataclass(frozen=True)
class _CounterSnapshot:
    """All counters at one moment, in seconds."""

    meter: CallerTimeMeter
    clock: float
    loader: float
    fetching: float
    waiting: float
    tasks: dict[str, float]


@dataclass
class _TotalsOverSteps:
    """Sums over several iterations; times in seconds."""

    iterations: int = 0
    seconds: float = 0.0
    loader: float = 0.0
    other_loaders: float = 0.0
    workers: float = 0.0
    tasks: dict[str, float] = field(default_factory=dict)
    in_flight: int = 0
    samples: int | None = 0  # None after a batch of unknown size

    def add(
        self, before: _CounterSnapshot, after: _CounterSnapshot, paused: float, in_flight: int, samples: int | None
    ) -> None:
        loader = after.loader - before.loader
        self.iterations += 1
        self.seconds += after.clock - before.clock - paused
        self.loader += loader
        self.other_loaders += max(0.0, after.fetching - before.fetching - loader)
        self.workers += after.waiting - before.waiting
        for name, seconds in after.tasks.items():
            self.tasks[name] = self.tasks.get(name, 0.0) + seconds - before.tasks.get(name, 0.0)
        self.in_flight += in_flight
        self.samples = None if samples is None or self.samples is None else self.samples + samples

    def mean(self) -> StepBreakdown:
        n = self.iterations
        return StepBreakdown(
            n,
            self.seconds / n,
            self.loader / n,
            self.other_loaders / n,
            self.workers / n,
            {name: seconds / n for name, seconds in self.tasks.items()},
            self.in_flight / n,
            None if self.samples is None else self.samples / n,
        )


class PipelineMonitor(CallbackWithProcessGroup):
    """Log a breakdown of the step time and print the bottleneck.

    For the strategies ``pipeline``, ``in_process_pipeline``, ``recsys_*`` and ``llm_*``. Means over the latest steps
    are written to the trainer's loggers and to its ``callback_metrics``:

    - ``pipeline/iteration_seconds``: time from the end of one batch to the end of the next;
    - ``pipeline/loader_seconds``: part of it in which the main thread fetches from this rank's data loader;
    - ``pipeline/forward_wait_seconds``: part of it in which the main thread waits for worker threads and, with several
      ranks, for the input exchange (``EmbInputDistWait``, ``EmbPrefetch``) in tasks that it runs itself;
    - ``pipeline/batches_in_flight``: number of batches started and not yet trained, including the current one;
    - ``pipeline/samples_per_second``: throughput of this rank. If the batch size is unknown because the tensors of a
      batch differ in length, ``pipeline/batches_per_second`` is logged instead.

    The main thread only reads its clock between the operations of a step. This costs about 50 µs per step, without
    messages between ranks and without device synchronization, so times are host times. Loggers receive the values of
    rank 0. At the end of each epoch the ranks exchange their values, and rank 0 prints the bottleneck if it is not the
    same as in the previous epoch, and once more at the end of fit. Validation is excluded, and so is the first batch of
    each epoch, which includes filling the pipeline.

    If all other ranks wait longer for messages and worker threads than one rank, and the difference is more than 5 % of
    the step, that rank is a straggler: the report names it, its host, and the activity in which it is slower. Its cost
    is the share of the step that would be saved if it were as fast as the next slowest rank. It is computed from the
    median of each rank over the latest 1000 steps of the epoch, so single slow batches do not count. Waits inside of a
    task, as in the backward under ``pipeline`` and in the schedule under ``llm_*``, are not seen.

    Args:
        every_n_steps: logging interval in batches (default None: the trainer's ``log_every_n_steps``).
        prog_bar: also show iteration time and throughput in the progress bar (default False).

    Raises:
        SetupError: If ``every_n_steps`` is less than 1, or, when fit begins, if the strategy has no pipeline.
    """

    def __init__(self, every_n_steps: int | None = None, prog_bar: bool = False) -> None:
        check_whole_number("every_n_steps", every_n_steps, 1, optional=True)
        self._every = every_n_steps
        self._prog_bar = prog_bar
        self._one_host = False
        self._trained = 0
        self._use: list[StepBreakdown] = []
        self._verdict: BottleneckVerdict | None = None
        self._printed: BottleneckVerdict | None = None
        self._window, self._epoch = _TotalsOverSteps(), _TotalsOverSteps()
        self._wait_shares: deque[float] = deque(maxlen=_LATEST)
        # State of the current step: counters at its start, excluded time, batches in flight and samples.
        self._before: _CounterSnapshot | None = None
        self._paused = self._pause_began = 0.0
        self._following = self._in_flight = 0
        self._samples: int | None = None

    @property
    def step_breakdown_by_rank(self) -> list[StepBreakdown]:
        """Mean step time of the last epoch by activity, one entry per rank; empty if the epoch had too few steps."""
        return list(self._use)

    @property
    def verdict(self) -> str | None:
        """Diagnosis of the last epoch; None before the first one."""
        return None if self._verdict is None else self._verdict.text

    @property
    def straggler(self) -> Straggler | None:
        """Rank that the others waited for in the last epoch, with its host and cost; None if there is none."""
        return None if self._verdict is None else self._verdict.straggler

    def exclude_step(self, num_following_steps: int = 0) -> None:
        """Exclude the current step from the means, because it includes work that is not training.

        Args:
            num_following_steps: number of later steps to exclude as well, in which other ranks may wait for this one
                (default 0).
        """
        self._before, self._following = None, num_following_steps

    # ------------------------------------------------------------------ Lightning's calls

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_strategy_has_pipeline(trainer, self)
        self._trained, self._use, self._verdict, self._printed = 0, [], None, None
        self._make_group()
        self._one_host = self._group is not None and is_single_host(self._group)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window, self._epoch = _TotalsOverSteps(), _TotalsOverSteps()
        self._wait_shares.clear()
        self.exclude_step()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._before is not None:
            self._in_flight = len(pipeline_of(trainer, self).in_flight)
            self._samples = _get_batch_size(batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        reading = _read_counters(trainer, self)
        # A step with another meter is not counted: the plan, and with it the pipeline, was replaced during the step.
        if self._before is not None and self._following:
            self._following -= 1
        elif self._before is not None and self._before.meter is reading.meter:
            step = _TotalsOverSteps()
            for total in (self._window, self._epoch, step):
                total.add(self._before, reading, self._paused, self._in_flight, self._samples)
            self._wait_shares.append(
                compute_main_thread_wait_seconds(step.mean(), trainer.world_size) / max(step.seconds, 1e-9)
            )
        self._before, self._paused = reading, 0.0
        self._trained += 1
        every = self._every or getattr(trainer, "log_every_n_steps", 0)
        if every and self._trained % every == 0 and self._window.iterations:
            self._log(trainer, self._window.mean())
            self._window = _TotalsOverSteps()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause_began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused += time.perf_counter() - self._pause_began

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        local_use = None
        if self._epoch.iterations >= _FEWEST:
            share = statistics.median(self._wait_shares)
            local_use = replace(self._epoch.mean(), wait_share=share, host=socket.gethostname())
        rank_uses = all_gather_objects(local_use, self._group)
        known_uses = [use for use in rank_uses if use is not None]
        self._use = known_uses if len(known_uses) == len(rank_uses) else []
        if not self._use:
            return
        verdict = diagnose_bottleneck(
            self._use,
            pipeline_of(trainer, self).plan,
            num_workers=_num_workers(trainer),
            cores=max(1, len(os.sched_getaffinity(0)) // max(1, trainer.num_devices)),
            has_pipe=get_strategy_info(trainer.strategy).has_pipe,
            one_host=self._one_host,
        )
        straggler = find_straggler(self._use)
        text = f"epoch {trainer.current_epoch}: {verdict.text}{f'; {straggler.text}' if straggler else ''}"
        self._verdict = replace(verdict, text=text, straggler=straggler)
        if self._printed is None or _get_kind_and_straggler(self._printed) != _get_kind_and_straggler(self._verdict):
            self._print_verdict(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._verdict is not None and self._printed is not self._verdict:
            self._print_verdict(trainer)
        self._destroy_group()

    # ------------------------------------------------------------------ helpers

    def _log(self, trainer: pl.Trainer, use: StepBreakdown) -> None:
        values = {
            "pipeline/iteration_seconds": use.seconds,
            "pipeline/loader_seconds": use.loader,
            "pipeline/forward_wait_seconds": compute_forward_wait_seconds(use, trainer.world_size),
            "pipeline/batches_in_flight": use.in_flight,
        }
        if use.samples is None:
            values["pipeline/batches_per_second"] = 1 / use.seconds
        else:
            values["pipeline/samples_per_second"] = use.samples / use.seconds
        log_values(trainer, values)
        if self._prog_bar:
            shown = [name for name in values if name.endswith("_per_second")]
            trainer.progress_bar_metrics.update({name: values[name] for name in ("pipeline/iteration_seconds", *shown)})

    def _print_verdict(self, trainer: pl.Trainer) -> None:
        self._printed = self._verdict
        assert self._verdict is not None
        if trainer.is_global_zero:
            print_report(self._verdict.text, soft_wrap=True)  # a single line, also on a narrow terminal


def exclude_step_from_monitors(trainer: pl.Trainer, following: int = 0) -> None:
    """Exclude the current step from all of the trainer's monitors; see :meth:`PipelineMonitor.exclude_step`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, PipelineMonitor):
            callback.exclude_step(following)


def _get_kind_and_straggler(verdict: BottleneckVerdict) -> tuple[str, int | None]:
    return verdict.kind, verdict.straggler.rank if verdict.straggler else None


def _read_counters(trainer: pl.Trainer, callback: pl.Callback) -> _CounterSnapshot:
    pipeline = pipeline_of(trainer, callback)
    if pipeline.meter is None:
        pipeline.meter = CallerTimeMeter()
    meter = pipeline.meter
    clock, loader = time.perf_counter(), get_training_epoch_loop(trainer).fetch_seconds
    return _CounterSnapshot(meter, clock, loader, meter.fetching, meter.waiting, dict(meter.tasks))


def _get_batch_size(batch: Any) -> int | None:
    """Number of samples of a batch; None if its tensors differ in size."""
    sizes = {size for size in batch_sizes(batch) if size is not None}
    return sizes.pop() if len(sizes) == 1 else None


def _num_workers(trainer: pl.Trainer) -> int | None:
    """Largest number of workers of any loader; None if no loader is PyTorch's ``DataLoader``."""
    combined = get_combined_loader(trainer.fit_loop)
    loaders = [] if combined is None else combined.flattened
    return max((loader.num_workers for loader in loaders if isinstance(loader, DataLoader)), default=None)
