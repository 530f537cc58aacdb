"""What both strategies are to a Trainer: distributed, and on one process like Lightning's strategy for one device."""

from __future__ import annotations

from typing import get_args

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_pipe.engine import SetupError
from lightning_pipe.loops.batch_source import Uneven


class DistributedStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy``, which leaves one process its random streams and its loaders' order."""

    # Lightning shards data for strategies it knows, and for those that say so.
    is_distributed = True
    # Where some ranks have fewer batches, an epoch ends with the shortest, or an error.
    uneven_batches: Uneven = "shortest"

    def _take_uneven_batches(self, uneven_batches: Uneven) -> None:
        if uneven_batches not in get_args(Uneven):
            raise SetupError(f"uneven_batches is {uneven_batches!r}; needed is one of 'shortest', 'error'")
        self.uneven_batches = uneven_batches

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
