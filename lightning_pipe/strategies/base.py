"""What both strategies are to a Trainer: distributed, and on one process like Lightning's strategy for one device."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.seed import isolate_rng


class DistributedStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy``, which leaves one process its random streams and its loaders' order."""

    # Lightning shards data for strategies it knows, and for those that say so.
    is_distributed = True

    def setup_distributed(self) -> None:
        """Set up the process group.

        Lightning starts the random streams anew from the seed here, for ranks to agree. One process goes on with its
        own, as it does without a strategy.
        """
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            with isolate_rng():
                super().setup_distributed()

    def _leave_loaders_of_one_process(self, trainer: pl.Trainer) -> None:
        """Let one process read its data in its loaders' order.

        Lightning takes every strategy that is distributed for one of several processes, and gives it a sampler that
        shuffles training data even where the user's loader does not.
        """
        if trainer.world_size == 1:
            trainer._accelerator_connector.use_distributed_sampler = False
