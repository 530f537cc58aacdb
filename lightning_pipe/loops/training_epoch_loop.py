"""Lightning's training epoch loop, driven by the engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.loops.training_epoch_loop import RestartStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipe._compat.lightning import DataFetcher, DataLoaderIterDataFetcher, TrainingEpochLoop
from lightning_pipe._compat.quick_lightning import (
    call_callback_hooks,
    call_module_hook,
    call_strategy_hook,
    end_batch,
    make_quick,
)
from lightning_pipe.engine import IterContext, TaskError
from lightning_pipe.loops.data.ledger import InFlightLedger
from lightning_pipe.loops.data.random_streams import get_states, set_states
from lightning_pipe.loops.data.resume import ResumePoint
from lightning_pipe.loops.data.termination import AgreedTermination
from lightning_pipe.loops.epoch_data import EpochData
from lightning_pipe.loops.fit_loop import PipelineFitLoop
from lightning_pipe.loops.programs.default_program import default_program
from lightning_pipe.loops.programs.program import TrainingProgram
from lightning_pipe.loops.programs.user_errors import note_lost_rank, user_error

Transfer = Callable[[Any], Any]

# Profiles name a fetch as they do without this loop.
_FETCH = f"[{TrainingEpochLoop.__name__}].train_dataloader_next"


@runtime_checkable
class BringsProgram(Protocol):
    """A strategy that brings a plan of its own."""

    def training_program(self, trainer: pl.Trainer, transfer: Transfer) -> TrainingProgram:
        """Build the program; *transfer* moves a batch to the device through the user's hooks, on the main thread."""
        ...


class PipelineTrainingEpochLoop(TrainingEpochLoop):
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
        make_quick(self)
        self._program: TrainingProgram | None = None
        self._data = EpochData(self.trainer)
        self._step: Callable[..., Any] | None = None
        self._arguments: tuple[str, ...] = ()
        self._completes = False
        # Whether a checkpoint was written while a validation was not over, until that has begun anew.
        self.validation_due = False

    @classmethod
    def install(cls, trainer: pl.Trainer) -> PipelineTrainingEpochLoop:
        """Put a pipelined loop in the place of the trainer's training epoch loop, with all that the latter holds.

        The fit loop around it becomes a :class:`~lightning_pipe.loops.PipelineFitLoop`.
        """
        PipelineFitLoop.install(trainer)
        AgreedTermination.install(trainer)
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
        return self._data.ledger

    @property
    def fetch_seconds(self) -> float:
        """That fetching has taken so far in this rank, the hooks before the transfer included."""
        return self._data.fetch_seconds

    @property
    def resume_point(self) -> ResumePoint | None:
        """Where a checkpoint that was loaded goes on, until the epoch begins that does."""
        return self._data.resume_point

    @resume_point.setter
    def resume_point(self, point: ResumePoint) -> None:
        self._data.resume_point = point

    def note_beginning(self, combined: CombinedLoader) -> None:
        """Note where the first epoch begins, before iterators of its loaders are made."""
        self._data.note_beginning(combined)

    def point_of_last_trained(self) -> ResumePoint | None:
        """Where a run goes on that is taken up from a checkpoint written now; None before any data was read."""
        epochs: Any = self.trainer.fit_loop.epoch_progress.current
        batches: Any = self.batch_progress.current
        in_batch = batches.ready != batches.processed
        is_last = self.batch_progress.is_last_batch and not in_batch
        at_end = is_last or epochs.processed == epochs.started
        return self._data.point(at_end=at_end, in_batch=in_batch)

    @property
    def restarted_at_last_batch(self) -> bool:
        """Whether the checkpoint was written where the last batch of an epoch ended, and what follows it is due."""
        return self.restarted_on_train_batch_end and self.batch_progress.is_last_batch

    def update_restart_stage(self) -> None:
        super().update_restart_stage()
        # Lightning compares totals, which differ for good once a batch was skipped, or was None.
        batches: Any = self.batch_progress.current
        epochs: Any = self.trainer.fit_loop.epoch_progress.current
        if self.restarting and epochs.started > epochs.processed and batches.ready == batches.processed:
            behind = batches.processed - batches.completed
            stages = {0: RestartStage.RESTARTED_ON_LAST, 1: RestartStage.RESTARTED_ON_TRAIN_BATCH_END}
            self._restart_stage = stages.get(behind, RestartStage.NONE)

    def reset(self) -> None:
        # Lightning goes on with the next batch, or epoch, without the validation and the ending that this one has yet.
        self._completes = isinstance(self.trainer.fit_loop, PipelineFitLoop) and self.restarted_on_train_batch_end
        stepped = self._batches_that_stepped
        batches: Any = self.batch_progress.current
        in_batch = self.restarting and batches.ready != batches.processed
        if in_batch:
            self.batch_progress.is_last_batch = False  # of a batch that is still to be trained
            # Lightning counts it twice over all epochs, validates where that says, and finds no moment by such counts.
            total: Any = self.batch_progress.total
            total.ready = total.started = total.processed = total.completed
        if getattr(self.trainer.fit_loop, "restarted_on_epoch_start", False):
            # None of the epoch's batches is trained; what is counted is the epoch before.
            self.restarting = False
            self.reset_restart_stage()
        if self._completes and self.batch_progress.is_last_batch:
            self.batch_progress.increment_completed()
            self.batch_progress.reset_on_restart()
            self.scheduler_progress.reset_on_restart()
            self.automatic_optimization.optim_progress.reset_on_restart()
        else:
            super().reset()
        if self._completes or in_batch:
            self._batches_that_stepped = stepped  # it is counted where the batch is completed

    def on_run_start(self, data_fetcher: DataFetcher) -> None:
        self._data.put_generators(data_fetcher)
        super().on_run_start(data_fetcher)
        self._data.begin(data_fetcher)
        if self._program is None and self._data.ledger is not None:
            strategy = self.trainer.strategy
            build = strategy.training_program if isinstance(strategy, BringsProgram) else default_program
            self._program = build(self.trainer, self._data.transfer)

    def run(self, data_fetcher: DataFetcher) -> None:
        try:
            super().run(data_fetcher)
            self._data.end()
        finally:
            # An epoch can end with batches in flight: max_steps, an early stop, an exception.
            if self._program is not None:
                self._program.abandon()
            self._data.give_up()

    def advance(self, data_fetcher: DataFetcher) -> None:
        """Train one batch: Lightning's sequence of hooks, around one period of the pipeline.

        Raises:
            StopIteration: the epoch is over, or a hook skips the rest of it.
        """
        if self._completes:
            self._completes = False
            self.val_loop.restarting = False
        elif isinstance(data_fetcher, DataLoaderIterDataFetcher):
            # The user's step fetches for itself: there is nothing to run ahead.
            super().advance(data_fetcher)
        elif not self._validation_goes_first(data_fetcher):
            try:
                self._advance()
            except TaskError as error:
                assert self._program is not None
                raised = user_error(error, self._program.pipeline.plan)
                note_lost_rank(raised, self.trainer.world_size)
                raise raised from raised.__cause__
            except StopIteration:
                raise
            except Exception as error:  # of a hook between tasks, or of the work that Lightning does in one
                epoch, rank = self.trainer.current_epoch, self.trainer.global_rank
                error.add_note(f"batch {self.batch_idx} of epoch {epoch} failed on rank {rank}")
                note_lost_rank(error, self.trainer.world_size)
                raise

    def _advance(self) -> None:
        if self._data.to_end:
            self.trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

        self._data.make_iterators(self.batch_progress.current.ready)
        self._data.period_begins()
        trainer, program, ledger = self.trainer, self._program, self._data.ledger
        assert program is not None and ledger is not None
        batch_idx = self.batch_idx + 1
        ctx = program.begin(ledger)
        self._data.batch_begins()
        batch = ctx.batch
        self.batch_progress.is_last_batch = ledger.oldest.is_last
        self.batch_progress.increment_ready()
        logs = trainer._logger_connector
        logs.on_batch_start(batch)

        output: Any = None
        skip_rest = False
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
            response = call_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
            call_strategy_hook(trainer, "on_train_batch_start", batch, batch_idx)
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
        call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
        call_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)
        end_batch(self)
        self.batch_progress.increment_completed()
        logs.update_train_step_metrics()

    def _on_before_fetch(self) -> None:
        self.trainer.profiler.start(_FETCH)  # type: ignore[attr-defined]

    def _on_after_fetch(self) -> None:
        self.trainer.profiler.stop(_FETCH)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None
        self._data.close(self.point_of_last_trained())
        super().teardown()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if self.trainer.strategy.lr_scheduler_configs:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _train(self, ctx: IterContext, batch: Any, batch_idx: int) -> Any:
        trainer, program = self.trainer, self._program
        assert program is not None
        step = trainer.lightning_module.training_step
        if step != self._step:
            # Lightning reads the signature for each batch.
            self._step, self._arguments = step, tuple(self._build_kwargs(OrderedDict(), batch, batch_idx))
        kwargs: OrderedDict[str, Any] = OrderedDict(zip(self._arguments, (batch, batch_idx), strict=False))
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

    def _validation_goes_first(self, data_fetcher: DataFetcher) -> bool:
        """Lightning's rule for a run resumed where a validation was due: whether to go there without training."""
        due, self.validation_due = self.validation_due, False
        if due:
            self.val_loop.restarting = False
            return True
        # Before the first batch of an epoch no validation of it is over.
        if self.restarting and self.batch_progress.current.ready and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            # It makes iterators, which draw: the validation that is over has done so before the checkpoint.
            device = self.trainer.strategy.root_device
            states = get_states(device)
            self.val_loop.increment_progress_to_evaluation_end()
            set_states(states, device)
        self.val_loop.restarting = False
        return False
