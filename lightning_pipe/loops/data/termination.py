"""Handling of SIGTERM: all ranks end after the same batch, even if only some ranks receive the signal.

Tested in ``tests/scenarios/faults/test_signals.py``.
"""

from __future__ import annotations

import signal
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipe._compat.lightning import SignalConnector


class AgreedTermination(SignalConnector):
    """Signal connector of Lightning whose handler only records the signal while ranks agree on each batch.

    Lightning's handler broadcasts rank 0's flag immediately, wherever the main thread is. The broadcast can run in the
    middle of other collectives of the same group, and ranks without the signal do not take part in it, so that all
    ranks hang.

    Attributes:
        agreed: True if ranks exchange with every batch if they were told to end.
        told: True if this rank was told to end.
    """

    agreed = False
    told = False

    @classmethod
    def install(cls, trainer: pl.Trainer) -> AgreedTermination:
        """Replace the trainer's signal connector, and return the new one."""
        present = trainer._signal_connector
        if isinstance(present, cls):
            return present
        made = cls.__new__(cls)
        made.__dict__.update(present.__dict__)
        trainer._signal_connector = made
        return made

    def register_signal_handlers(self) -> None:
        self.told = False
        super().register_signal_handlers()

    def _sigterm_notifier_fn(self, signum: int | signal.Signals, frame: FrameType) -> None:
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and not self.agreed:
            super()._sigterm_notifier_fn(signum, frame)
            return
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self.told:
            launcher.kill(signal.Signals(signum))
        self.told = True
        if not fitting:
            # No checkpoint is saved outside of fit, so each rank ends independently after its batch.
            self.received_sigterm = True
