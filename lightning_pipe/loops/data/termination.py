"""SIGTERM, which one rank may get and another not: all end behind the same batch.

Tested in ``tests/scenarios/faults/test_signals.py``.
"""

from __future__ import annotations

import signal
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipe._compat.lightning import SignalConnector


class AgreedTermination(SignalConnector):
    """Lightning's connector, whose handler only notes the signal while ranks agree on each batch.

    Lightning's own broadcasts rank 0's flag in the handler, from wherever the main thread is: in the middle of other
    collectives of the same group, and with one call more than on ranks that got no signal, so that all of them wait.

    Attributes:
        agreed: whether ranks tell each other, with every batch, what they were told.
        told: whether this rank was told to end.
    """

    agreed = False
    told = False

    @classmethod
    def install(cls, trainer: pl.Trainer) -> AgreedTermination:
        """Put one in the place of the trainer's."""
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
            # Nothing is to be saved: each rank ends by itself, behind its batch.
            self.received_sigterm = True
