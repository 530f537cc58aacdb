"""Plain data parallelism with the batch copied ahead."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipe.loops import PipelineTrainingEpochLoop


class PipelineStrategy(DDPStrategy):
    """Lightning's distributed data parallelism; the next batch is moved to the device while this one trains.

    Takes the arguments of Lightning's ``DDPStrategy``. For any LightningModule, on one process too (which then trains
    without the wrapper that averages gradients).
    """

    # Lightning shards data for strategies it knows, and for those that say so.
    is_distributed = True

    def setup(self, trainer: pl.Trainer) -> None:
        leave_loaders_of_one_process(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            PipelineTrainingEpochLoop.install(trainer)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        if self.world_size > 1:
            super().configure_ddp()


def leave_loaders_of_one_process(trainer: pl.Trainer) -> None:
    """Let one process read its data in its loaders' order, as it does under Lightning's strategy for one device.

    Lightning takes every strategy like these two for one of several processes, and gives it a sampler that shuffles
    training data even where the user's loader does not.
    """
    if trainer.world_size == 1:
        trainer._accelerator_connector.use_distributed_sampler = False
