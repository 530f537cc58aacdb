"""States of a random generator, numbered while a model is built and computed when the record is replayed."""

from __future__ import annotations

import hashlib
import itertools

import torch

from lightning_pipe._compat.torch import dispatch_modes_disabled

# Seeds of the placeholder states, which stand for positions in the record. The generator uses 32 bits of a seed, and a
# user may choose the same bits. Therefore one word of each placeholder is set to a value that no seed produces.
_POSITIONS = itertools.count()
# Positions in the state of a CPU generator: the seed, and the second of the 624 words of the Mersenne Twister.
_SEED, _WORD = slice(0, 8), slice(32, 36)
_OF_NO_SEED = torch.tensor([0x51, 0xF1, 0x5E, 0xED], dtype=torch.uint8)


class RandomTrack:
    """States that one CPU generator would have during ordinary construction, by number. State 0 is the first one.

    No random numbers are drawn while the record is made. Instead, each random operation sets the generator to a unique
    placeholder state, which stands for the number of the next state. If the generator's state then differs from the
    last placeholder, it was seeded, or a state that was read earlier was restored (as by `torch.random.fork_rng`).

    Attributes:
        generator: generator whose states are numbered.
        states: known states, by number.
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
        """Return a number for the state after a random operation, and set the generator to its placeholder."""
        with dispatch_modes_disabled():
            state = torch.Generator("cpu").manual_seed(next(_POSITIONS)).get_state()
            state[_WORD] = _OF_NO_SEED
            state[_SEED] = self.generator.get_state()[_SEED]  # keeps initial_seed() correct
            self.generator.set_state(state)
        _, self._last = _state_of(self.generator)
        self._current = self._new_number(self._last)
        return self._current

    def rewind(self) -> None:
        """Set the generator to its first state."""
        self.generator.set_state(self.states[0])

    def _new_number(self, key: bytes) -> int:
        number, self._count = self._count, self._count + 1
        self._numbers[key] = number
        return number


def _state_of(generator: torch.Generator) -> tuple[torch.Tensor, bytes]:
    with dispatch_modes_disabled():
        state = generator.get_state()
        return state, hashlib.sha256(state.numpy().tobytes()).digest()
