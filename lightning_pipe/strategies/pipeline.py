"""Plain data parallelism with the batch copied ahead."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.strategies.base import DistributedStrategy
from lightning_pipe.strategies.refusals import refuse_optimizers_in_backward


class PipelineStrategy(DistributedStrategy):
    """Lightning's distributed data parallelism; the next batch is moved to the device while this one trains.

    Takes the arguments of Lightning's ``DDPStrategy``. For any LightningModule, on one process too (which then trains
    without the wrapper that averages gradients). On several, parameters with an optimiser that runs inside backward are
    refused.
    """

    def setup(self, trainer: pl.Trainer) -> None:
        self._leave_loaders_of_one_process(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            PipelineTrainingEpochLoop.install(trainer)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        if self.world_size > 1:
            assert self.lightning_module is not None
            refuse_optimizers_in_backward(self.lightning_module)
            super().configure_ddp()
