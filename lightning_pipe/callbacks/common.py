"""Functions shared by several callbacks: access to the loop and its pipeline, process groups, logging, file paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipe.engine import SetupError, SWPipeline
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.loops import PipelineTrainingEpochLoop


def check_strategy_has_pipeline(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Check that the trainer's strategy runs tasks."""
    if not isinstance(trainer.fit_loop.epoch_loop, PipelineTrainingEpochLoop):
        name = type(callback).__name__
        raise SetupError(
            f"{name} expected a strategy with a pipeline, got {type(trainer.strategy).__name__}. Use"
            f" strategy='pipeline', 'in_process_pipeline', a recsys_* or an llm_* strategy, or remove {name}."
        )


def get_training_epoch_loop(trainer: pl.Trainer) -> PipelineTrainingEpochLoop:
    """Loop that runs tasks, after :func:`check_strategy_has_pipeline`."""
    loop = trainer.fit_loop.epoch_loop
    assert isinstance(loop, PipelineTrainingEpochLoop)
    return loop


def pipeline_of(trainer: pl.Trainer, callback: pl.Callback) -> SWPipeline:
    """Pipeline that is currently running."""
    program = get_training_epoch_loop(trainer).program
    if program is None:
        name = type(callback).__name__
        raise SetupError(
            f"{name} needs a pipeline, but training_step takes dataloader_iter and fetches its batches itself. Define"
            f" training_step(batch, batch_idx), or remove {name}."
        )
    return program.pipeline


class CallbackWithProcessGroup(pl.Callback):
    """Callback that has a CPU process group of all ranks during a fit, independent of collectives in other groups."""

    _group: dist.ProcessGroup | None = None  # None with one rank
    _warned = False

    def _make_group(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = new_group(backend="gloo") if several else None

    def _destroy_group(self) -> None:
        """Destroy the group, unless ``torch.distributed`` is no longer initialized."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._destroy_group()

    def _write_or_warn(self, write: Callable[[], None]) -> None:
        """Call *write*. If a file cannot be written, or the device has failed, warn once a fit."""
        try:
            write()
        except (OSError, RuntimeError, ValueError) as error:
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"{type(self).__name__} could not write a file ({error}). Training continues; check the paths of"
                    " its files."
                )


def log_values(trainer: pl.Trainer, values: dict[str, float]) -> None:
    """Write values of this step to the trainer's ``callback_metrics`` and to its loggers."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
    # Not through the module's `log`, which would send the values to the loggers again in the following steps.
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def join_path_with_suffix(folder: Path, path: Path, suffix: str) -> Path:
    """Path of *path* in *folder*, with *suffix* appended to its stem."""
    return folder / path.with_name(f"{path.stem}{suffix}{path.suffix}")
