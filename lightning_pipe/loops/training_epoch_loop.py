"""Lightning's training epoch loop, driven by the engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call

from lightning_pipe.engine import IterContext, PipelineError, TaskError
from lightning_pipe.engine.plan import MAIN
from lightning_pipe.loops.batch_source import AgreedSource, BatchSource, Fetched, Source, Uneven
from lightning_pipe.loops.default_program import default_program
from lightning_pipe.loops.fit_loop import PipelineFitLoop
from lightning_pipe.loops.ledger import InFlightLedger
from lightning_pipe.loops.program import TrainingProgram
from lightning_pipe.loops.random_streams import RandomStreams, get_states, set_states
from lightning_pipe.loops.resumable_loader import State, end_of_epoch, is_resumable, load_states, snapshot
from lightning_pipe.loops.resume import ResumePoint

Transfer = Callable[[Any], Any]

# Profiles name a fetch as they do without this loop.
_FETCH = f"[{_TrainingEpochLoop.__name__}].train_dataloader_next"


@runtime_checkable
class BringsProgram(Protocol):
    """A strategy that brings a plan of its own."""

    def training_program(self, trainer: pl.Trainer, transfer: Transfer) -> TrainingProgram:
        """Build the program; *transfer* moves a batch to the device through the user's hooks, on the main thread."""
        ...


class PipelineTrainingEpochLoop(_TrainingEpochLoop):
    """Drop-in for Lightning's training epoch loop that takes its batches from a pipeline.

    Every hook, callback, logger and counter sees what it would see in Lightning's loop, for the batch being trained;
    only the batch-transfer hooks run earlier, for the batch being copied. With a strategy that brings no plan, the next
    batch is moved to the device while this one trains.

    Args:
        trainer: the trainer; put the loop into it with ``trainer.fit_loop.epoch_loop = ...``.
        min_steps: the fewest optimiser steps to run.
        max_steps: the most optimiser steps to run, -1 for no limit.
    """

    def __init__(self, trainer: pl.Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._prepare()

    def _prepare(self) -> None:
        self._program: TrainingProgram | None = None
        self._ledger: InFlightLedger | None = None
        self._streams: RandomStreams | None = None
        self._fetcher: _DataFetcher | None = None
        self._source: Source | None = None
        self._group: dist.ProcessGroup | None = None
        self._kept: list[Callable[[], Fetched]] = []
        self._initial: dict[str, Any] = {}
        self._resumed: ResumePoint | None = None
        self._iterators_due = False
        self._completes = False
        self._left: ResumePoint | None = None
        self.resume_point: ResumePoint | None = None

    @classmethod
    def install(cls, trainer: pl.Trainer) -> PipelineTrainingEpochLoop:
        """Put a pipelined loop in the place of the trainer's training epoch loop, with all that the latter holds.

        The fit loop around it becomes a :class:`~lightning_pipe.loops.PipelineFitLoop`.
        """
        PipelineFitLoop.install(trainer)
        present = trainer.fit_loop.epoch_loop
        if isinstance(present, cls):
            return present
        loop = cls.__new__(cls)
        # Others know its progress, results, validation loop and optimisation loops by now: the same objects.
        loop.__dict__.update(present.__dict__)
        loop._prepare()
        trainer.fit_loop.epoch_loop = loop
        return loop

    @property
    def program(self) -> TrainingProgram | None:
        """The program at work, once training has begun."""
        return self._program

    @property
    def ledger(self) -> InFlightLedger | None:
        """The present epoch's ledger."""
        return self._ledger

    @property
    def restarted_at_last_batch(self) -> bool:
        """Whether the checkpoint was written where the last batch of an epoch ended, and what follows it is due."""
        return self.restarted_on_train_batch_end and self.batch_progress.is_last_batch

    def reset(self) -> None:
        # Lightning goes on with the next batch, or epoch, without the validation and the ending that this one has yet.
        self._completes = isinstance(self.trainer.fit_loop, PipelineFitLoop) and self.restarted_on_train_batch_end
        stepped = self._batches_that_stepped
        if self._completes and self.batch_progress.is_last_batch:
            self.batch_progress.increment_completed()
            self.batch_progress.reset_on_restart()
            self.scheduler_progress.reset_on_restart()
            self.automatic_optimization.optim_progress.reset_on_restart()
        else:
            super().reset()
        if self._completes:
            self._batches_that_stepped = stepped  # it is counted where the batch is completed

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        self._resumed, self.resume_point = self.resume_point, None
        point, device = self._resumed, self.trainer.strategy.root_device
        if point is not None:
            # A new epoch makes its iterators when its first batch is due: a validation may come before.
            has_states = all(hasattr(one, "load_state_dict") for one in data_fetcher.combined_loader.flattened)
            self._iterators_due = has_states and not point.in_mid_epoch
            set_states(point.common if self._iterators_due else point.common_behind_iterators, device)
        super().on_run_start(data_fetcher)
        self._fetcher = data_fetcher
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            return
        if self._streams is None:
            self._streams = RandomStreams(device)
        if self._program is None:
            strategy = self.trainer.strategy
            build = strategy.training_program if isinstance(strategy, BringsProgram) else default_program
            self._program = build(self.trainer, self._transfer)
        self._streams.restart(None if point is None else point.streams)
        self._initial = self._now(data_fetcher)
        kept, self._kept = self._kept, []
        data_fetcher.fetched += len(kept)
        if kept and data_fetcher.done:
            kept[-1] = partial(_as_last, kept[-1])
        self._source = self._agreed(BatchSource(partial(self._fetch, data_fetcher), kept), data_fetcher)
        self._ledger = InFlightLedger(self._source, holds=_goes_on(data_fetcher))

    def run(self, data_fetcher: _DataFetcher) -> None:
        try:
            super().run(data_fetcher)
            if isinstance(self._source, AgreedSource):
                self._source.close()
            if self._iterators_due:
                # The epoch had ended when the checkpoint was written, and has ended again without a batch.
                self._put_loaders_back(data_fetcher)
        finally:
            # An epoch can end with batches in flight: max_steps, an early stop, an exception.
            if self._ledger is not None and self._program is not None:
                self._program.abandon()
                given_up = self._ledger.give_up()
                if _goes_on(data_fetcher):
                    ahead = getattr(data_fetcher, "batches", ())
                    read = self._source.unread() if self._source is not None else []
                    self._kept = given_up + read + [partial(self._read_before, batch) for batch, _, _ in ahead]

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train one batch: Lightning's sequence of hooks, around one period of the pipeline.

        Raises:
            StopIteration: the epoch is over, or a hook skips the rest of it.
        """
        if self._completes:
            self._completes = False
            self.val_loop.restarting = False
        elif isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            # The user's step fetches for itself: there is nothing to run ahead.
            super().advance(data_fetcher)
        elif not self._validation_goes_first(data_fetcher):
            try:
                self._advance()
            except TaskError as error:
                raised = self._user_error(error)
                raise raised from raised.__cause__

    def _advance(self) -> None:
        if dist.is_available() and dist.is_initialized() and self.trainer.world_size > 1:
            self._broadcast_sigterm_tensor()

        if self._iterators_due and self._fetcher is not None:
            self._put_loaders_back(self._fetcher)
            iter(self._fetcher)
            self._fetcher.fetched += self.batch_progress.current.ready
            self._initial = self._now(self._fetcher)
        trainer, program, ledger = self.trainer, self._program, self._ledger
        assert program is not None and ledger is not None
        batch_idx = self.batch_idx + 1
        ctx = program.begin(ledger)
        batch = ctx.batch
        self.batch_progress.is_last_batch = ledger.oldest.is_last
        self.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)

        output: Any = None
        skip_rest = False
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            call._call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
            response = call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
            call._call_strategy_hook(trainer, "on_train_batch_start", batch, batch_idx)
            skip_rest = response == -1
            if skip_rest:
                self.batch_progress.increment_by(0, is_last_batch=True)
            else:
                self.batch_progress.increment_started()
                with trainer.profiler.profile("run_training_batch"):  # type: ignore[attr-defined]
                    output = self._train(ctx, batch, batch_idx)
        if skip_rest:
            ledger.skip()
        else:
            program.finish()
            ledger.retire()
        # The context holds the batch and all that was computed from it: nothing needs it any more.
        del ctx

        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if skip_rest:
            raise StopIteration
        call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)
        trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

    def _on_before_fetch(self) -> None:
        self.trainer.profiler.start(_FETCH)  # type: ignore[attr-defined]

    def _on_after_fetch(self) -> None:
        self.trainer.profiler.stop(_FETCH)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None
        self._left = self.point_of_last_trained()
        self._ledger = self._fetcher = self._source = None
        self._kept = []
        group, self._group = self._group, None
        # The user may have left the world, and with it all groups.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        super().teardown()

    def point_of_last_trained(self) -> ResumePoint | None:
        """Where a run goes on that is taken up from a checkpoint written now; None before any data was read."""
        fetcher = self._fetcher
        if fetcher is None:
            # Loaded and not gone on from yet; or training is over, and a checkpoint is written of it.
            return self.resume_point or self._left
        common = get_states(self.trainer.strategy.root_device)
        loaders = fetcher.combined_loader.flattened
        epochs: Any = self.trainer.fit_loop.epoch_progress.current
        if self.batch_progress.is_last_batch or epochs.processed == epochs.started:
            states = [end_of_epoch(one) for one in loaders]
            last = None if self._ledger is None else self._ledger.last_trained
            if last is not None and not self.batch_progress.is_last_batch:
                # An epoch that was cut short: a loader with a state of its own goes on behind the last batch trained.
                behind = [None if state is None else state() for state in last.after["loaders"]]
                states = [
                    new if is_resumable(of) else old for of, new, old in zip(loaders, states, behind, strict=True)
                ]
            return ResumePoint(states, common)
        after: dict[str, Any]
        if self._ledger is None:  # the user's step fetches for itself
            after = self._now(fetcher)
        elif self._ledger.last_trained is None:
            after = self._initial
        else:
            after = self._ledger.last_trained.after
        states = [None if state is None else state() for state in after["loaders"]]
        return ResumePoint(states, common, {name: value for name, value in after.items() if name != "loaders"})

    def _agreed(self, source: Source, data_fetcher: _DataFetcher) -> Source:
        """Batches that all ranks have, where there are several."""
        strategy = self.trainer.strategy
        if self.trainer.world_size == 1 or not dist.is_initialized():
            return source
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=getattr(strategy, "_timeout", None))
        uneven: Uneven = getattr(strategy, "uneven_batches", "shortest")
        return AgreedSource(source, self._group, partial(_remaining, data_fetcher), uneven)

    def _put_loaders_back(self, data_fetcher: _DataFetcher) -> None:
        """Let the next iterators be made as if none had been made since the checkpoint."""
        assert self._resumed is not None
        load_states(data_fetcher.combined_loader.flattened, self._resumed.loaders)
        self._iterators_due = False

    def _now(self, data_fetcher: _DataFetcher) -> dict[str, Any]:
        """Where loaders and generators are."""
        return {"loaders": _snapshots(data_fetcher), "fetch": get_states(self.trainer.strategy.root_device)}

    def _train(self, ctx: IterContext, batch: Any, batch_idx: int) -> Any:
        trainer, program = self.trainer, self._program
        assert program is not None
        kwargs = self._build_kwargs(OrderedDict(), batch, batch_idx)
        if program.steps_whole_batch:
            program.begin_step()
        if trainer.lightning_module.automatic_optimization:
            # In automatic optimisation there is only one optimiser.
            output = self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        else:
            output = self.manual_optimization.run(kwargs)
        if program.steps_whole_batch:
            program.end_step()
        return output

    def _validation_goes_first(self, data_fetcher: _DataFetcher) -> bool:
        """Lightning's rule for a run resumed where a validation was due: whether to go there without training."""
        if self.restarting and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            self.val_loop.increment_progress_to_evaluation_end()
        self.val_loop.restarting = False
        return False

    def _fetch(self, data_fetcher: _DataFetcher) -> Fetched:
        assert self._streams is not None
        # Where it does not know the end, Lightning's fetcher is one batch ahead: what it loads now is the next one, and
        # a run that goes on behind this batch loads that again.
        ahead = bool(getattr(data_fetcher, "batches", ()))
        with self._streams.active("fetch"):
            before = self._now(data_fetcher) if ahead else None
            batch, _, _ = next(data_fetcher)
            is_last = data_fetcher.done
        after = before or {"loaders": _snapshots(data_fetcher), "fetch": self._streams.states("fetch")}
        batch = self._prepared(batch)
        after["prepare"] = self._streams.states("prepare")
        return batch, is_last, after

    def _prepared(self, batch: Any) -> Any:
        assert self._streams is not None
        with self._streams.active("prepare"):
            batch = self.trainer.precision_plugin.convert_input(batch)
            return self.trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)

    def _transfer(self, batch: Any) -> Any:
        assert self._streams is not None and self._ledger is not None
        with self._streams.active("transfer"):
            moved = call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)
        if (entry := self._ledger.next_transferred()) is not None:
            entry.after["transfer"] = self._streams.states("transfer")
        return moved

    def _read_before(self, batch: Any) -> Fetched:
        """What Lightning's fetcher read ahead of an iterator in the epoch before."""
        return self._prepared(batch), False, {"loaders": []}

    def _user_error(self, error: TaskError) -> BaseException:
        """What to raise for a failed task: users' own exceptions keep their type, as in Lightning's loop.

        What the main thread runs are users' hooks and datasets, and users expect to catch what those raise; so does an
        error of this project's own say enough wherever it comes from. The task, its iteration, stage and rank are added
        as a note. Anything else that a worker thread raised stays what it is.
        """
        cause = error.__cause__
        assert self._program is not None
        where = self._program.pipeline.plan.schedule.get(error.task)  # none for the data iterator: the main thread's
        on_worker = where is not None and where.thread_group != MAIN
        if cause is None or (on_worker and not isinstance(cause, PipelineError)):
            return error
        cause.add_note(error.where)
        return cause


def _as_last(fetch: Callable[[], Fetched]) -> Fetched:
    batch, _, after = fetch()
    return batch, True, after


def _snapshots(data_fetcher: _DataFetcher) -> list[Callable[[], State] | None]:
    """Where each loader is, None for one without a state."""
    loaders = data_fetcher.combined_loader.flattened
    return [snapshot(one) if hasattr(one, "state_dict") else None for one in loaders]


def _remaining(data_fetcher: _DataFetcher) -> int | None:
    """How many batches its loaders have not been asked for, if they know."""
    return None if data_fetcher.length is None else max(0, data_fetcher.length - data_fetcher.fetched)


def _goes_on(data_fetcher: _DataFetcher) -> bool:
    """Whether the next epoch goes on with the same iterators, so that what is not trained in this one must be kept."""
    return all(isinstance(one, Iterator) for one in data_fetcher.combined_loader.flattened)
