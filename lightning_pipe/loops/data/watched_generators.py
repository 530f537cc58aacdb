"""Where Python's and NumPy's generators are, without copying them when nobody has drawn.

Both hold 624 numbers, and give them out as a tuple or an array one by one, NumPy in some 25 microseconds. Each batch
asks several times, and hardly anything draws between. So what a generator was when it was last asked is kept, beside
the bytes of memory that hold it: where those are the same, so is the state. The bytes are only read; where the first
ones are not what the state says, the generator is asked every time.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["NUMPY", "PYTHON", "WatchedGenerator"]

_NUMBERS = 624
# The numbers, and which of them is the next, in this or the other order.
_SIZE = 4 * (_NUMBERS + 1)


class WatchedGenerator(ABC):
    """A generator of this process that may be asked for its state often."""

    def __init__(self) -> None:
        self._state: Any = None
        self._bytes: bytes | None = None
        self._readable: bool | None = None

    def get(self) -> Any:
        """Its state; the same object as long as it is the same."""
        if self._state is None or not self._is_at_state():
            self._note(self._ask())
        return self._state

    def set(self, state: Any) -> None:
        """Put it there."""
        if state is not self._state or not self._is_at_state():
            self._put(state)
            self._note(state)

    def swap(self, state: Any) -> Any:
        """Put it there; returns where it was."""
        before = self.get()
        if state is not before:
            self._put(state)
            self._note(state)
        return before

    def _note(self, state: Any) -> None:
        self._state = state
        self._bytes = None if self._readable is False else self._peek()
        if self._readable is None:
            self._readable = self._bytes is not None and self._says(state) == self._bytes
            self._bytes = self._bytes if self._readable else None

    def _is_at_state(self) -> bool:
        return self._bytes is not None and self._peek() == self._bytes and self._rest_is(self._state)

    @abstractmethod
    def _ask(self) -> Any:
        """The state, from the generator."""

    @abstractmethod
    def _put(self, state: Any) -> None:
        """The state, to the generator."""

    @abstractmethod
    def _peek(self) -> bytes | None:
        """The memory that holds the numbers and the place among them; None where that is not known."""

    @abstractmethod
    def _says(self, state: Any) -> bytes:
        """What that memory has in a state."""

    @abstractmethod
    def _rest_is(self, state: Any) -> bool:
        """Whether what is not in that memory is certainly as in a state: the second of two normal numbers."""


class _Python(WatchedGenerator):
    """``random``'s, which is an object of a C type: the place, then the numbers, behind the object's head."""

    def _ask(self) -> Any:
        return random.getstate()

    def _put(self, state: Any) -> None:
        random.setstate(state)

    def _peek(self) -> bytes | None:
        if sys.implementation.name != "cpython":
            return None
        return ctypes.string_at(id(random._inst) + object.__basicsize__, _SIZE)

    def _says(self, state: Any) -> bytes:
        *numbers, place = state[1]
        return struct.pack(f"={_NUMBERS + 1}I", place, *numbers)

    def _rest_is(self, state: Any) -> bool:
        normal: Any = random._inst.gauss_next  # type: ignore[attr-defined]
        return normal is state[2] or normal == state[2]


class _Numpy(WatchedGenerator):
    """``numpy.random``'s, whose memory NumPy gives out for other languages: the numbers, then the place."""

    def _ask(self) -> Any:
        return sys.modules["numpy"].random.get_state()

    def _put(self, state: Any) -> None:
        sys.modules["numpy"].random.set_state(state)

    def _peek(self) -> bytes | None:
        generator = getattr(sys.modules["numpy"].random.mtrand._rand, "_bit_generator", None)
        if type(generator).__name__ != "MT19937":
            return None
        assert generator is not None
        return ctypes.string_at(generator.ctypes.state_address, _SIZE)

    def _says(self, state: Any) -> bytes:
        if isinstance(state, dict):
            return b""
        return bytes(state[1].astype("=u4").tobytes() + struct.pack("=i", state[2]))

    def _rest_is(self, state: Any) -> bool:
        # A normal number that is kept leaves without a trace; one comes only with new numbers.
        return not state[3]


PYTHON: WatchedGenerator = _Python()
# For whoever has imported NumPy.
NUMPY: WatchedGenerator = _Numpy()
