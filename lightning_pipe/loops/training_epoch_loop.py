"""Lightning's training epoch loop, driven by the engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.training_epoch_loop import RestartStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_pipe._compat import logged_values
from lightning_pipe._compat.fast_hooks import (
    call_callback_hooks,
    call_module_hook,
    call_strategy_hook,
    install_fast_hook_calls,
    log_batch,
    notify_logger_of_batch_end,
    notify_logger_of_batch_start,
)
from lightning_pipe._compat.lightning import (
    DataFetcher,
    DataLoaderIterDataFetcher,
    TrainingEpochLoop,
    copy_as_subclass,
    is_accumulating,
)
from lightning_pipe.engine import TaskError
from lightning_pipe.engine.ranks.batch_status import BatchStatusExchange
from lightning_pipe.loops.data.ledger import InFlightLedger
from lightning_pipe.loops.data.random_streams import get_rng_states, set_rng_states
from lightning_pipe.loops.data.resume import ResumePoint
from lightning_pipe.loops.data.termination import SynchronizedTermination
from lightning_pipe.loops.epoch_data import EpochData
from lightning_pipe.loops.fit_loop import PipelineFitLoop
from lightning_pipe.loops.programs.default_program import default_program
from lightning_pipe.loops.programs.program import TrainingProgram
from lightning_pipe.loops.programs.user_errors import add_lost_rank_note, unwrap_task_error

# Profiles use the same name for a fetch as with Lightning's loop.
_FETCH = f"[{TrainingEpochLoop.__name__}].train_dataloader_next"
_BATCH = "run_training_batch"


class PipelineTrainingEpochLoop(TrainingEpochLoop):
    """Drop-in replacement of Lightning's training epoch loop that takes its batches from a pipeline.

    Every hook, callback, logger and counter sees the same state as in Lightning's loop, for the batch being trained.
    Only the batch-transfer hooks run earlier, for the batch being copied. If the strategy has no plan, the next batch
    is moved to the device while the current one trains.

    Args:
        trainer: trainer; install the loop with ``trainer.fit_loop.epoch_loop = ...``, or use :meth:`install`.
        min_steps: minimum number of optimizer steps (default None: no minimum).
        max_steps: maximum number of optimizer steps (default -1: no limit).
    """

    def __init__(self, trainer: pl.Trainer, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._init_pipeline_state()

    def _init_pipeline_state(self) -> None:
        install_fast_hook_calls(self)
        self._program: TrainingProgram | None = None
        self._data = EpochData(self.trainer)
        self._step: Callable[..., Any] | None = None
        self._arguments: tuple[str, ...] = ()
        self._completes = False
        # True if the loaded checkpoint was written during a validation that has not been restarted yet.
        self.validation_due = False
        # True if the run that wrote the loaded checkpoint was to stop after the work that is due.
        self.stop_due = False
        # Total number of batches at the last end of a batch, after which schedulers that monitor a value are updated.
        self.ended_batches: int | None = None
        # Logged values before the current batch, which a run that resumes within the batch trains again.
        self.values_before_batch: logged_values.Accumulated = []

    @classmethod
    def install(cls, trainer: pl.Trainer) -> PipelineTrainingEpochLoop:
        """Replace the trainer's training epoch loop by a pipelined loop with the same state, and return it.

        The fit loop around it is replaced by a pipelined one, too.
        """
        PipelineFitLoop.install(trainer)
        SynchronizedTermination.install_in_trainer(trainer)
        present = trainer.fit_loop.epoch_loop
        loop = copy_as_subclass(present, cls)
        if loop is not present:
            loop._init_pipeline_state()
            trainer.fit_loop.epoch_loop = loop
        return loop

    @property
    def program(self) -> TrainingProgram | None:
        """Program of the current training; None before training has begun."""
        return self._program

    @property
    def ledger(self) -> InFlightLedger | None:
        """Ledger of the current epoch; None if the user's step fetches batches itself."""
        return self._data.ledger

    @property
    def status_exchange(self) -> BatchStatusExchange:
        """Exchange of the status of each rank's next batch, for messages in which a status can travel."""
        return self._data.statuses

    @property
    def fetch_seconds(self) -> float:
        """Total seconds of fetching on this rank, including the hooks before the transfer."""
        return self._data.fetch_seconds

    @property
    def resume_point(self) -> ResumePoint | None:
        """Resume point of a loaded checkpoint, until the epoch that continues from it begins; then None."""
        return self._data.resume_point

    @resume_point.setter
    def resume_point(self, point: ResumePoint) -> None:
        self._data.resume_point = point

    def record_epoch_start(self, combined: CombinedLoader | None) -> None:
        """Record the positions before the iterators of the first epoch are made; None forgets them."""
        self._data.record_epoch_start(combined)

    def make_resume_point(self) -> ResumePoint | None:
        """Return the resume point of a checkpoint that is written now; None before any data was read."""
        epochs: Any = self.trainer.fit_loop.epoch_progress.current
        batches: Any = self.batch_progress.current
        in_batch = batches.ready != batches.processed
        is_last = self.batch_progress.is_last_batch and not in_batch
        at_end = is_last or epochs.processed == epochs.started
        return self._data.make_resume_point(at_end=at_end, in_batch=in_batch)

    @property
    def restarted_at_last_batch(self) -> bool:
        """True if the checkpoint was written after the last batch of an epoch, before the validation and epoch end."""
        return self.restarted_on_train_batch_end and self.batch_progress.is_last_batch

    def update_restart_stage(self) -> None:
        """Find out where in an epoch the checkpoint was written, also if batches were skipped."""
        super().update_restart_stage()
        # Lightning compares totals, which differ permanently after a batch was skipped or was None.
        batches: Any = self.batch_progress.current
        epochs: Any = self.trainer.fit_loop.epoch_progress.current
        if self.restarting and epochs.started > epochs.processed and batches.ready == batches.processed:
            behind = batches.processed - batches.completed
            stages = {0: RestartStage.RESTARTED_ON_LAST, 1: RestartStage.RESTARTED_ON_TRAIN_BATCH_END}
            self._restart_stage = stages.get(behind, RestartStage.NONE)

    def reset(self) -> None:
        # Lightning would continue with the next batch or epoch, and skip the pending validation and end of this one.
        self._completes = isinstance(self.trainer.fit_loop, PipelineFitLoop) and self.restarted_on_train_batch_end
        stepped = self._batches_that_stepped
        batches: Any = self.batch_progress.current
        in_batch = self.restarting and batches.ready != batches.processed
        if in_batch:
            self.batch_progress.is_last_batch = False  # the batch is not trained yet
            # Lightning would count the batch twice in the totals, by which it schedules validations.
            total: Any = self.batch_progress.total
            total.ready = total.started = total.processed = total.completed
        if getattr(self.trainer.fit_loop, "restarted_on_epoch_start", False):
            # No batch of the epoch is trained yet: the counts belong to the previous epoch.
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
            self._batches_that_stepped = stepped  # incremented when the batch is completed
        if self.batch_progress.current.ready:
            logged_values.skip_logged_values_reset(self)

    def on_run_start(self, data_fetcher: DataFetcher) -> None:
        """Begin an epoch. The first epoch builds the program.

        Raises:
            PlanError: the plan does not fit the model.
            SetupError: the strategy or the model cannot be used as configured.
        """
        self._termination = SynchronizedTermination.install_in_trainer(self.trainer)
        self._data.restore_generators(data_fetcher)
        super().on_run_start(data_fetcher)
        self._data.begin(data_fetcher)
        if self._program is None and self._data.ledger is not None:
            build = getattr(self.trainer.strategy, "training_program", default_program)
            self._program = build(self.trainer, self._data.move_batch_to_device)

    def run(self, data_fetcher: DataFetcher) -> None:
        """Train an epoch. Batches still in flight at its end are abandoned, and not counted as trained."""
        try:
            super().run(data_fetcher)
            self._data.end()
        finally:
            # Batches are still in flight after max_steps, an early stop or an exception.
            if self._program is not None:
                self._program.abandon_batches()
            self._data.abandon()

    def advance(self, data_fetcher: DataFetcher) -> None:
        """Train one batch: Lightning's sequence of hooks, around one period of the pipeline."""
        trainer = self.trainer
        self.values_before_batch = logged_values.snapshot_results(self._results)
        trainer.should_stop |= self.stop_due
        self.stop_due = False
        if self._completes:
            self._completes = False
            self.val_loop.restarting = False
            notify_logger_of_batch_end(self)
            return
        at_last_step = self.restarting and self.global_step == self.max_steps
        if isinstance(data_fetcher, DataLoaderIterDataFetcher) and not at_last_step:
            # The user's step fetches batches itself, so no batch can be moved ahead.
            super().advance(data_fetcher)
            return
        if self._must_validate_before_batch(data_fetcher):
            return
        if at_last_step:
            raise StopIteration  # nothing is due but the end of the epoch
        try:
            batch, is_trained = self._begin_batch()
            output: Any = None
            if is_trained:
                module, batch_idx = trainer.lightning_module, self.batch_idx
                arguments = self._step_arguments(module, batch, batch_idx)
                trainer.profiler.start(_BATCH)  # type: ignore[attr-defined]
                try:
                    if module.automatic_optimization:
                        # Automatic optimization supports one optimizer only.
                        output = self.automatic_optimization.run(trainer.optimizers[0], batch_idx, arguments)
                    else:
                        output = self.manual_optimization.run(arguments)
                finally:
                    trainer.profiler.stop(_BATCH)  # type: ignore[attr-defined]
            self._end_batch(batch, output, is_trained)
        except TaskError as error:
            assert self._program is not None
            raised = unwrap_task_error(error)
            add_lost_rank_note(raised, trainer.world_size)
            raise raised from raised.__cause__
        except StopIteration:
            raise
        except Exception as error:  # from a hook between tasks, or from Lightning's work in a task
            error.add_note(
                f"batch {self.batch_idx} of epoch {trainer.current_epoch} failed on rank {trainer.global_rank}"
            )
            add_lost_rank_note(error, trainer.world_size)
            raise

    def _begin_batch(self) -> tuple[Any, bool]:
        """Open the period of the next batch and call the hooks before its training.

        Return the batch, and False if a hook skips it and the rest of the epoch, or if it is None.
        """
        if self._data.termination_due or (self.trainer.world_size == 1 and self._termination.local_requeue_received):
            self._termination.act_on_signals(complete=not is_accumulating(self))

        self._data.make_iterators(self.batch_progress.current.ready)
        self._data.discard_fetch_rng_states()
        trainer, program, ledger = self.trainer, self._program, self._data.ledger
        assert program is not None and ledger is not None
        batch_idx = self.batch_idx + 1
        batch = program.begin_next_batch(ledger).batch
        self._data.record_generator_states()
        self.batch_progress.is_last_batch = ledger.oldest.is_last
        self.batch_progress.increment_ready()
        notify_logger_of_batch_start(self, batch)
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
            return None, False
        call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
        response = call_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
        call_strategy_hook(trainer, "on_train_batch_start", batch, batch_idx)
        if response == -1:
            self.batch_progress.increment_by(0, is_last_batch=True)
            return batch, False
        self.batch_progress.increment_started()
        if program.trains_in_one_task:
            program.begin_step_task()
        return batch, True

    def _end_batch(self, batch: Any, output: Any, is_trained: bool) -> None:
        """Close the period of a batch and call the hooks after its training."""
        trainer, program, ledger = self.trainer, self._program, self._data.ledger
        assert program is not None and ledger is not None
        ends_epoch = batch is not None and not is_trained
        if is_trained and program.trains_in_one_task:
            program.end_step_task()
        if ends_epoch:
            ledger.skip()
        else:
            program.finish_batch()
            ledger.retire()

        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends_epoch:
            raise StopIteration
        batch_idx = self.batch_idx
        call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
        call_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)
        notify_logger_of_batch_end(self)
        self.batch_progress.increment_completed()
        log_batch(self)

    def _on_before_fetch(self) -> None:
        self.trainer.profiler.start(_FETCH)  # type: ignore[attr-defined]

    def _on_after_fetch(self) -> None:
        self.trainer.profiler.stop(_FETCH)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        """Close the program."""
        self.end_training()
        super().teardown()

    def end_training(self) -> None:
        """Close the program, and keep the position for later checkpoints. Further calls have no effect."""
        if self._program is not None:
            self._program.close()
            self._program = None
        self._data.close(self.make_resume_point())

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Update learning rates as Lightning does. Without schedulers, nothing is done."""
        at_batch_end = interval == "step" and update_plateau_schedulers
        if self.trainer.strategy.lr_scheduler_configs and not (at_batch_end and self._has_batch_ended):
            super().update_lr_schedulers(interval, update_plateau_schedulers)
        if at_batch_end:
            self.ended_batches = self.batch_progress.total.ready

    @property
    def _has_batch_ended(self) -> bool:
        """True after the last batch, its validation, and the update of schedulers that monitor a value."""
        return self.ended_batches == self.batch_progress.total.ready

    def _step_arguments(self, module: pl.LightningModule, batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
        step = module.training_step
        if step != self._step:
            # Cached: Lightning would read the signature for each batch.
            self._step, self._arguments = step, tuple(self._build_kwargs(OrderedDict(), batch, batch_idx))
        return OrderedDict(zip(self._arguments, (batch, batch_idx), strict=False))

    def _must_validate_before_batch(self, data_fetcher: DataFetcher) -> bool:
        """Return True if a resumed run must validate before it trains a batch, by Lightning's rules."""
        due, self.validation_due = self.validation_due, False
        if due:
            self.val_loop.restarting = False
            return True
        # Before its first batch, an epoch has had no validation.
        if self.restarting and self.batch_progress.current.ready and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last and not self._has_batch_ended:
                self._skip_next_val = True
                return True
            # The call makes iterators, which draw. The finished validation already drew before the checkpoint, so the
            # states are restored.
            device = self.trainer.strategy.root_device
            states = get_rng_states(device)
            self.val_loop.increment_progress_to_evaluation_end()
            set_rng_states(states, device)
        self.val_loop.restarting = False
        return False
