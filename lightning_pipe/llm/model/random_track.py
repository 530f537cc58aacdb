"""The states of a random generator, numbered while a model is built and computed when it is filled with values.

Tested in ``tests/llm/model/test_deferred.py``.
"""

from __future__ import annotations

import hashlib
import itertools

import torch

from lightning_pipe._compat.torch import dispatch_modes_disabled

__all__ = ["RandomTrack"]

# Seeds of the states that stand for positions in the record. Of a seed the generator uses 32 bits, which a user may
# choose as well, so that a word of each state is changed to what follows from no seed.
_POSITIONS = itertools.count()
# In a CPU generator's state: its seed, and the second of the 624 words of the Mersenne Twister.
_SEED, _WORD = slice(0, 8), slice(32, 36)
_OF_NO_SEED = torch.tensor([0x51, 0xF1, 0x5E, 0xED], dtype=torch.uint8)


class RandomTrack:
    """The states that one CPU generator would have had, by number; 0 is the one at its first use in the record.

    Nothing is drawn while the record is made, so the generator is set to a state of its own after each random
    operation: one that occurs nowhere else and stands for the number. Seeding, and restoring a state that was read
    earlier (as `torch.random.fork_rng` does), then show as another state than the last one seen.

    Attributes:
        generator: the one.
        states: those of the numbered states that are known so far.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        first, self._last = _state_of(generator)
        self.states = {0: first}
        self._count = 1
        self._current = 0
        self._numbers = {self._last: 0}

    def current(self) -> int:
        """Return the number of the state that the generator would have now."""
        state, key = _state_of(self.generator)
        if key != self._last:
            if key not in self._numbers:
                self.states[self._new_number(key)] = state
            self._current, self._last = self._numbers[key], key
        return self._current

    def drawn(self) -> int:
        """Return a number for the state after a random operation, and leave the one that stands for it."""
        with dispatch_modes_disabled():
            state = torch.Generator("cpu").manual_seed(next(_POSITIONS)).get_state()
            state[_WORD] = _OF_NO_SEED
            state[_SEED] = self.generator.get_state()[_SEED]  # initial_seed() stays true
            self.generator.set_state(state)
        _, self._last = _state_of(self.generator)
        self._current = self._new_number(self._last)
        return self._current

    def rewind(self) -> None:
        """Give the generator its first state."""
        self.generator.set_state(self.states[0])

    def _new_number(self, key: bytes) -> int:
        number, self._count = self._count, self._count + 1
        self._numbers[key] = number
        return number


def _state_of(generator: torch.Generator) -> tuple[torch.Tensor, bytes]:
    with dispatch_modes_disabled():
        state = generator.get_state()
        return state, hashlib.sha256(state.numpy().tobytes()).digest()
