"""Training in the workers of Ray Train: checks of the trainer, and checkpoints that Ray manages.

Ray's own ``prepare_trainer`` refuses strategies of other projects (ray issue 51387), and its report callback expects
each worker to write its own folder. The ranks of this project's strategies write one folder together, so it is
written to its final place in Ray's storage, without a copy. Only this module imports Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.object_collectives import run_on_all_ranks
from lightning_pipe.strategies.base import DistributedStrategy
from lightning_pipe.strategies.in_process import InProcessPipelineStrategy

try:
    import ray.train
    from ray.train import CheckpointUploadMode
    from ray.train.lightning import RayLightningEnvironment
    from ray.train.lightning import prepare_trainer as prepare_for_rays_strategies
except ImportError as error:
    raise SetupError(
        f"lightning_pipe.ray needs Ray Train V2, which cannot be imported ({error}). Run: pip install"
        " 'lightning-pipe[ray]', and do not set RAY_TRAIN_V2_ENABLED to 0"
    ) from error

__all__ = ["RayLightningEnvironment", "ReportToRay", "get_resume_checkpoint_path", "prepare_trainer"]

# Name of Lightning's checkpoint in the folder that Ray knows, the same as in Ray's own callback.
_NAME = "checkpoint.ckpt"


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Check that a trainer fits the workers that Ray has started, and return it. Each worker calls this before ``fit``.

    Args:
        trainer: trainer with a strategy of this package or of Ray, and with
            ``plugins=[lightning_pipe.ray.RayLightningEnvironment()]``. ``devices`` is the number of workers per node,
            and ``num_nodes`` the number of nodes.

    Raises:
        SetupError: on every worker, if the plugin is missing, ``devices`` or ``num_nodes`` does not fit the workers of
            a node, or the function is not called in a worker of ``ray.train.torch.TorchTrainer``.
    """
    if not isinstance(trainer.strategy, DistributedStrategy | InProcessPipelineStrategy):
        return prepare_for_rays_strategies(trainer)
    _check_on_all_workers(lambda: _check_trainer_fits_ray(trainer), "the trainer cannot train in workers of Ray")
    return trainer


def get_resume_checkpoint_path() -> str | None:
    """Path for ``Trainer.fit(..., ckpt_path=...)``: the checkpoint to resume from, or None at the start of a run."""
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else str(Path(checkpoint.path, _NAME))


class ReportToRay(Checkpoint):
    """Callback that saves checkpoints and reports them to Ray, with the logged metrics, ``epoch`` and ``step``.

    All workers write one checkpoint together, to ``checkpoint_epoch=N/checkpoint.ckpt`` or
    ``checkpoint_step=N/checkpoint.ckpt`` in the folder of the run. Ray removes old checkpoints as
    ``ray.train.CheckpointConfig(num_to_keep=...)`` states. After a worker was lost, training restarts from
    :func:`get_resume_checkpoint_path` and continues exactly.

    Args:
        every_n_train_steps: number of optimizer steps between two checkpoints, in addition to the checkpoint at the end
            of each training epoch (default None: only at the end of epochs).

    Raises:
        SetupError: *every_n_train_steps* is less than 1. In ``fit``, on every worker: ``RunConfig(storage_path=...)``
            is not a folder that all workers share, or the strategy has ``async_checkpoints``.
    """

    def __init__(self, every_n_train_steps: int | None = None) -> None:
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise SetupError(f"every_n_train_steps is {every_n_train_steps}; expected None or at least 1")
        self._every = every_n_train_steps
        self._last_step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _check_on_all_workers(lambda: _check_ray_storage(trainer), "checkpoints cannot be reported to Ray")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # The step is unchanged in an accumulation, and increases by the number of optimizers under manual optimization.
        if self._every and trainer.global_step // self._every > self._last_step // self._every:
            self._report(trainer, f"checkpoint_step={trainer.global_step}")
        self._last_step = trainer.global_step

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report(trainer, f"checkpoint_epoch={trainer.current_epoch}")

    def _report(self, trainer: pl.Trainer, name: str) -> None:
        storage = ray.train.get_context().get_storage()
        folder = Path(storage.experiment_fs_path, name)
        # A restarted run replaces a checkpoint that was complete, but not reported by all workers before one was lost.
        trainer.save_checkpoint(folder / _NAME)
        metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
        ray.train.report(
            {**metrics, "epoch": trainer.current_epoch, "step": trainer.global_step},
            checkpoint=ray.train.Checkpoint(str(folder), storage.storage_filesystem),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )


def _check_on_all_workers(check: Callable[[], None], failed: str) -> None:
    run_on_all_ranks(check, failed, dist.group.WORLD if dist.is_initialized() else None)


def _check_trainer_fits_ray(trainer: pl.Trainer) -> None:
    context, strategy = ray.train.get_context(), trainer.strategy
    ranks, local_ranks = context.get_world_size(), context.get_local_world_size()
    if isinstance(strategy, InProcessPipelineStrategy):
        if ranks > 1:
            raise SetupError(
                f"Ray has started {ranks} workers, but {type(strategy).__name__} trains in one process. Use"
                " ScalingConfig(num_workers=1), with all devices in resources_per_worker"
            )
        return
    environment = getattr(strategy, "cluster_environment", None)
    if not isinstance(environment, RayLightningEnvironment):
        raise SetupError(
            f"the trainer finds its ranks with {type(environment).__name__}, expected RayLightningEnvironment. Give the"
            " trainer plugins=[lightning_pipe.ray.RayLightningEnvironment()]"
        )
    if (trainer.num_devices, trainer.num_nodes) != (local_ranks, ranks / local_ranks):
        raise SetupError(
            f"the trainer has devices={trainer.num_devices} and num_nodes={trainer.num_nodes}, but Ray has started"
            f" {ranks} workers, {local_ranks} of them on this node. Use devices={local_ranks},"
            f" num_nodes={ranks // local_ranks}; each node needs the same number of workers"
        )


def _check_ray_storage(trainer: pl.Trainer) -> None:
    storage = ray.train.get_context().get_storage()
    kind, folder = storage.storage_filesystem.type_name, storage.experiment_fs_path
    if kind != "local" or not Path(folder).is_dir():
        raise SetupError(
            f"the run is stored at {folder!r} in a file system of type {kind!r}, which is no folder on this node. All"
            " workers write a checkpoint together, so set RunConfig(storage_path=...) to a folder that all nodes share"
        )
    if getattr(trainer.strategy, "_async_checkpoints", False):
        raise SetupError(
            "async_checkpoints is True, but a checkpoint is reported to Ray as soon as it is saved, so it must be"
            " complete by then. Remove async_checkpoints"
        )
