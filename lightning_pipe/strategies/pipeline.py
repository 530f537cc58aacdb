"""Plain data parallelism with the batch copied ahead."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipe.engine import SetupError
from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.batch_source import Uneven
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.strategies.base import DistributedStrategy


class PipelineStrategy(DistributedStrategy):
    """Lightning's distributed data parallelism; the next batch is moved to the device while this one trains.

    For any LightningModule, on one process too (which then trains without the wrapper that averages gradients). On
    several, parameters with an optimiser that runs inside backward are refused.

    Args:
        arguments: those of Lightning's ``DDPStrategy``.
        uneven_batches: where some ranks have fewer batches, end the epoch with the ``shortest``, or raise an ``error``.
        options: more of Lightning's.
    """

    def __init__(self, *arguments: Any, uneven_batches: Uneven = "shortest", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._take_uneven_batches(uneven_batches)

    def setup(self, trainer: pl.Trainer) -> None:
        self._leave_loaders_of_one_process(trainer)
        install_evaluation_loops(trainer)
        install_interrupted_saves(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            PipelineTrainingEpochLoop.install(trainer)
        super().setup(trainer)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, which may hold tensors and plain types, unless the user allows more."""
        try:
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only is not False)
        except pickle.UnpicklingError as error:
            raise SetupError(
                f"the checkpoint {str(checkpoint_path)!r} holds more than tensors and plain types, or is damaged"
                f" ({str(error).strip().splitlines()[-1]}), and could run any code when it is read. If you trust"
                " whoever wrote it, give Trainer.fit(..., weights_only=False); or allow the class:"
                " torch.serialization.add_safe_globals([...])"
            ) from error

    def configure_ddp(self) -> None:
        if self.world_size > 1:
            assert self.lightning_module is not None
            _refuse_optimizers_in_backward(self.lightning_module)
            super().configure_ddp()


def _refuse_optimizers_in_backward(module: pl.LightningModule) -> None:
    """Refuse parameters that an optimiser trains inside backward, where several ranks average gradients after it.

    Raises:
        SetupError: names them.
    """
    names = [name for name, one in module.named_parameters() if getattr(one, "_in_backward_optimizers", None)]
    if names:
        raise SetupError(
            f"the optimisers of {', '.join(names)} run inside backward (apply_optimizer_in_backward), before gradients"
            " are averaged over ranks, and DistributedDataParallel does not run them on a CPU. Shard such tables with"
            " strategy='recsys_prefetch_pipeline', or train them by an optimiser of configure_optimizers"
        )
