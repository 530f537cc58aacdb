"""Lightning's loops of validation, test and prediction, driven by the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_pipe._compat.fast_hooks import evaluate_batch, predict_batch
from lightning_pipe._compat.lightning import (
    DataLoaderIterDataFetcher,
    EvaluationLoop,
    PredictionLoop,
    copy_as_subclass,
    get_combined_loader,
)
from lightning_pipe._compat.torch import has_idle_dataloader_workers
from lightning_pipe._compat.uneven_loaders import allow_uneven_loaders
from lightning_pipe.engine import InputError
from lightning_pipe.loops.data.random_streams import RNGStates, get_rng_states
from lightning_pipe.loops.data.termination import SynchronizedTermination
from lightning_pipe.loops.evaluation_data import EvaluationData
from lightning_pipe.loops.programs.user_errors import add_lost_rank_note
from lightning_pipe.loops.uneven_evaluation import align_metric_states_across_ranks

_KEY = "lightning_pipe"


class _PipelineLoopMixin:
    """Part that the pipelined loops of evaluation and of prediction share, in front of Lightning's class."""

    trainer: pl.Trainer
    max_batches: Any
    _data_fetcher: Any
    _ahead: EvaluationData
    _init_pipeline_state: Callable[[], None]
    _step_name: str
    # Profiles use the same name for a fetch as with Lightning's loop.
    _fetch_action_name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_pipeline_state()

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        if not isinstance(self._data_fetcher, DataLoaderIterDataFetcher):
            self._ahead.begin(self._data_fetcher, self.max_batches, self._step_name)
            self._data_fetcher = self._ahead
        elif self._ahead.uneven:
            raise InputError(
                f"{self._step_name} takes a dataloader_iter, but ranks have, or may have, different numbers of batches,"
                " and other ranks cannot know how many batches such a step fetches. Let it take a batch, or give all"
                " ranks loaders of the same length"
            )

    @property
    def skip(self) -> bool:
        return self._ahead.is_empty_on_all_ranks(super().skip)  # type: ignore[misc]

    def teardown(self) -> None:
        """Close the programs and release the dataloaders' iterators."""
        self._ahead.close_programs()
        super().teardown()  # type: ignore[misc]

    def _on_before_fetch(self) -> None:
        self.trainer.profiler.start(self._fetch_action_name)  # type: ignore[attr-defined]

    def _on_after_fetch(self) -> None:
        self.trainer.profiler.stop(self._fetch_action_name)  # type: ignore[attr-defined]


class PipelineEvaluationLoop(_PipelineLoopMixin, EvaluationLoop):
    """Drop-in replacement of Lightning's validation or test loop that takes its batches from a pipeline.

    Every hook, callback and logger sees the same state as in Lightning's loop, for the batch being evaluated. Only the
    batch-transfer hooks run earlier, for the batch being copied.

    Takes the same arguments as Lightning's loop.
    """

    def _init_pipeline_state(self) -> None:
        phase = "test" if self._stage.value == "test" else "validation"
        self._ahead = EvaluationData(self.trainer, phase, self._store_outputs_of_dataloader)
        # States of the generators at the start of a running validation of a fit.
        self.rng_states_at_start: RNGStates | None = None
        # One flag per loader, True if its workers were waiting: at that time, and when the checkpoint was written.
        self._waited: list[bool] = []
        self._waited_at_save: dict[str, Any] | None = None

    def setup_data(self) -> None:
        """Create the dataloaders, and let ranks agree on their numbers of batches.

        Raises:
            InputError: a rank could not create its dataloaders. Raised on every rank.
        """
        before = self._max_batches
        with allow_uneven_loaders(self.trainer) as failed:
            super().setup_data()
        if self._max_batches is not before:
            loader = get_combined_loader(self)
            assert loader is not None
            self._skip_worker_seed_draws(loader)
            self._ahead.compare_batch_counts(loader, self._max_batches, failed, predicting=False)
            if not any(self._max_batches) and not self.skip:
                # Callbacks detect a validation by these numbers, and must detect it on all ranks. The loaders still
                # end without a batch.
                self._max_batches = [1] * len(self._max_batches)

    def _skip_worker_seed_draws(self, loader: CombinedLoader) -> None:
        """Let loaders that had started their workers before the checkpoint start them without drawing a seed."""
        saved, self._waited_at_save = self._waited_at_save, None
        if saved is None or len(saved["waiting"]) != len(loader.flattened):
            return
        every: int = self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if every and self.trainer.current_epoch - saved["loaded_in"] >= every:
            return  # the earlier run would have reloaded the loaders here, too
        self._last_val_dl_reload_epoch = saved["loaded_in"]
        loader.flattened = [
            _copy_loader_with_new_generator(dataloader) if waited else dataloader
            for dataloader, waited in zip(loader.flattened, saved["waiting"], strict=True)
        ]

    def _get_idle_worker_flags(self) -> list[bool]:
        loader = get_combined_loader(self)
        return [] if loader is None else [has_idle_dataloader_workers(dataloader) for dataloader in loader.flattened]

    def on_save_checkpoint(self) -> dict[str, Any]:
        state: dict[str, Any] = super().on_save_checkpoint()
        waiting = self._get_idle_worker_flags() if self.rng_states_at_start is None else self._waited
        if any(waiting):
            state[_KEY] = {"waiting": waiting, "loaded_in": self._last_val_dl_reload_epoch}
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._waited_at_save = state_dict.get(_KEY)

    def run(self) -> Any:
        """Evaluate all dataloaders, and return what Lightning's loop returns."""
        fitting = self._trainer_fn == TrainerFn.FITTING and not self.trainer.sanity_checking
        self.rng_states_at_start = get_rng_states(self.trainer.strategy.root_device) if fitting else None
        self._waited = self._get_idle_worker_flags()
        with self._ahead.run_context():
            return super().run()

    def _store_dataloader_outputs(self) -> None:
        # Lightning's loop calls this when this rank starts another dataloader; uneven ranks start it at other times.
        if not self._ahead.uneven:
            super()._store_dataloader_outputs()

    def _store_outputs_of_dataloader(self, loader: int) -> None:
        """Store the results of a dataloader that all ranks have finished, with or without batches on this rank."""
        results = self.trainer._results
        assert results is not None
        # Callbacks check it, also on a rank without batches.
        self._has_run |= not self.trainer.sanity_checking
        results.dataloader_idx = loader if self._is_sequential and self.num_dataloaders > 1 else None
        align_metric_states_across_ranks(self.trainer.lightning_module)
        super()._store_dataloader_outputs()

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        self.rng_states_at_start = None
        super()._on_evaluation_end(*args, **kwargs)

    @property
    def _step_name(self) -> str:  # type: ignore[override]
        return "test_step" if self.trainer.testing else "validation_step"

    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        if dataloader_iter is not None:
            # The user's step fetches batches itself, so no batch can be moved ahead.
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        trainer = self.trainer
        with _add_batch_note_to_errors(trainer, "test" if trainer.testing else "validation", batch_idx, dataloader_idx):
            evaluate_batch(self, batch, batch_idx, dataloader_idx, self._ahead.run_step)
        if not self.batch_progress.is_last_batch and trainer.received_sigterm:
            raise SIGTERMException

    @property
    def _fetch_action_name(self) -> str:  # type: ignore[override]
        return f"[{EvaluationLoop.__name__}].{self._stage.dataloader_prefix}_next"


class PipelinePredictionLoop(_PipelineLoopMixin, PredictionLoop):
    """Drop-in replacement of Lightning's prediction loop that takes its batches from a pipeline.

    Every hook and callback sees the same state as in Lightning's loop, for the batch being predicted. Only the
    batch-transfer hooks run earlier, for the batch being copied.

    Takes the same arguments as Lightning's loop.
    """

    _step_name = "predict_step"
    _fetch_action_name = f"[{PredictionLoop.__name__}].predict_next"

    def _init_pipeline_state(self) -> None:
        self._ahead = EvaluationData(self.trainer, "prediction")

    def setup_data(self) -> None:
        """Create the dataloaders as :meth:`PipelineEvaluationLoop.setup_data` does."""
        before = self.max_batches
        with allow_uneven_loaders(self.trainer) as failed:
            super().setup_data()
        if self.max_batches is not before:
            loader = get_combined_loader(self)
            assert loader is not None
            self._ahead.compare_batch_counts(loader, self.max_batches, failed, predicting=True)

    def run(self) -> Any:
        """Predict all dataloaders, and return what Lightning's loop returns."""
        with self._ahead.run_context():
            return super().run()

    def _predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        if dataloader_iter is not None:
            super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        with _add_batch_note_to_errors(self.trainer, "prediction", batch_idx, dataloader_idx):
            predict_batch(self, batch, batch_idx, dataloader_idx, self._ahead.run_step)
        if self.trainer.received_sigterm:
            raise SIGTERMException


def install_evaluation_loops(trainer: pl.Trainer) -> None:
    """Replace the trainer's loops of validation (also within fit), test and prediction by pipelined loops.

    The new loops keep the state of the replaced ones.
    """
    SynchronizedTermination.install_in_trainer(trainer)
    trainer.fit_loop.epoch_loop.val_loop = _convert_to_pipelined_loop(
        trainer.fit_loop.epoch_loop.val_loop, PipelineEvaluationLoop
    )
    trainer.validate_loop = _convert_to_pipelined_loop(trainer.validate_loop, PipelineEvaluationLoop)
    trainer.test_loop = _convert_to_pipelined_loop(trainer.test_loop, PipelineEvaluationLoop)
    trainer.predict_loop = _convert_to_pipelined_loop(trainer.predict_loop, PipelinePredictionLoop)


def _convert_to_pipelined_loop(present: Any, kind: Any) -> Any:
    loop = copy_as_subclass(present, kind)
    if loop is not present:
        loop._init_pipeline_state()
    return loop


def _copy_loader_with_new_generator(loader: Any) -> Any:
    """Return a loader that starts its persistent workers without drawing their seed from a generator in use.

    A resumed run starts the workers again. If it drew the seed from the generators of the model, dropout would then
    differ from that of an uninterrupted run.
    """
    if not isinstance(loader, DataLoader) or has_idle_dataloader_workers(loader):
        return loader
    # The user's loader is unchanged. A loader draws only this seed from the generator; its sampler has a separate one.
    same = copy.copy(loader)
    same.generator = torch.Generator()
    return same


@contextmanager
def _add_batch_note_to_errors(trainer: pl.Trainer, phase: str, batch_idx: int, dataloader_idx: int) -> Iterator[None]:
    """Context that adds the batch and the rank as a note to exceptions of hooks and steps."""
    try:
        yield
    except StopIteration:
        raise
    except Exception as error:
        error.add_note(
            f"batch {batch_idx} of dataloader {dataloader_idx} failed in {phase} on rank {trainer.global_rank}"
        )
        add_lost_rank_note(error, trainer.world_size)
        raise
