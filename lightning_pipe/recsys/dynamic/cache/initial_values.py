"""What a row holds when its id is first seen: a function of the seed, the table and the id, and of nothing else.

So a row starts the same whichever rank holds it, whatever else its batch had, and however often it has been forgotten.
The random bits are those of SplitMix64, started anew for every id. What is made of them uses only operations that
IEEE 754 rounds in one way (no library's logarithm or cosine, which differ between processors and with the place in an
array), so the values are the same to the bit on every machine, with the compiled library and without.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.recsys.dynamic.cache.normal_quantile import normal_quantile
from lightning_pipe.recsys.dynamic.store.row_store import Keys
from lightning_pipe.recsys.kernels import native

__all__ = ["Constant", "Distribution", "InitialValues", "Normal", "Uniform"]

Values = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint64]

# So many values at a time that what is computed with them stays in the processor's cache.
_BLOCK = 8192
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Distribution(ABC):
    """Values of random bits."""

    @abstractmethod
    def values(self, bits: Bits) -> Values:
        """One for each 64 bits."""


@dataclass(frozen=True)
class Uniform(Distribution):
    """Between *low* and *high*, in 2^24 steps."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise SetupError(
                f"uniform initial values from {self.low} to {self.high}: needed are two numbers, the lower one first"
            )

    def values(self, bits: Bits) -> Values:
        values = _signed(bits >> np.uint64(40)).astype(np.float32)
        values *= np.float32((self.high - self.low) * 2.0**-24)
        values += np.float32(self.low)
        return values


@dataclass(frozen=True)
class Normal(Distribution):
    """With that mean and standard deviation."""

    mean: float
    std: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 <= self.std < math.inf):
            raise SetupError(
                f"normal initial values with mean {self.mean} and standard deviation {self.std}: needed are numbers,"
                " the second not below 0"
            )

    def values(self, bits: Bits) -> Values:
        # The middles of 2^52 intervals: neither 0 nor 1.
        probabilities = (_signed(bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return (normal_quantile(probabilities) * self.std + self.mean).astype(np.float32)


@dataclass(frozen=True)
class Constant(Distribution):
    """The same everywhere."""

    value: float = 0.0

    def values(self, bits: Bits) -> Values:
        return np.full(bits.shape, self.value, np.float32)


class InitialValues:
    """The first values of a table's rows.

    Args:
        table: its name; tables of other names get other values.
        width: numbers in a row.
        values: a distribution; or a function of ids (int64, on the CPU) that returns rows (ids x width), each made of
            its id alone, since it is called again where a row starts anew, from any thread.
        seed: any int.
    """

    def __init__(
        self, table: str, width: int, values: Distribution | Callable[[Tensor], Tensor], *, seed: int = 0
    ) -> None:
        self._table, self._width, self._values = table, width, values
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Values of another seed from now on."""
        digest = hashlib.blake2b(f"{seed}/{self._table}".encode(), digest_size=8).digest()
        self._seed = int.from_bytes(digest, "little")

    def __call__(self, keys: Keys) -> Tensor:
        """Rows of *keys*: float32 on the CPU, keys x width; of a function, what it returned.

        Raises:
            InputError: a function returned something else than a row for each id.
        """
        values = self._values
        if not isinstance(values, Distribution):
            return self._of_function(values, keys)
        rows = np.empty((len(keys), self._width), np.float32)
        if isinstance(values, Constant):
            rows.fill(values.value)
            return torch.from_numpy(rows)
        step = max(1, _BLOCK // max(1, self._width))
        for first in range(0, len(keys), step):
            rows[first : first + step] = values.values(
                _random_bits(self._seed, keys[first : first + step], self._width)
            )
        return torch.from_numpy(rows)

    def _of_function(self, function: Callable[[Tensor], Tensor], keys: Keys) -> Tensor:
        shape = (len(keys), self._width)
        rows = function(torch.from_numpy(np.array(keys)))
        if not isinstance(rows, Tensor) or tuple(rows.shape) != shape:
            found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise InputError(
                f"the function of initial values of table {self._table!r} returned {found} for {len(keys)} ids, needed"
                f" is a tensor of shape {shape}: return a row for each id"
            )
        return rows.detach().cpu()


def _random_bits(seed: int, keys: Keys, width: int) -> Bits:
    """64 bits for each column of each key: keys x width. As lp_random_bits() in csrc/random_bits.cpp."""
    library = native.library()
    unsigned = np.ascontiguousarray(keys).view(np.uint64)
    if library is None:
        start = _mixed(_mixed(unsigned + _STEP) ^ np.uint64(seed))
        columns = np.arange(1, width + 1, dtype=np.uint64) * _STEP
        return _mixed(start[:, None] + columns)
    bits = np.empty((len(keys), width), np.uint64)
    library.lp_random_bits(
        ctypes.c_uint64(seed),
        ctypes.c_void_p(unsigned.ctypes.data),
        ctypes.c_int64(len(keys)),
        ctypes.c_int64(width),
        ctypes.c_void_p(bits.ctypes.data),
    )
    return bits


def _signed(bits: Bits) -> npt.NDArray[np.int64]:
    # Of signed numbers processors have a conversion, of unsigned ones not all do.
    return bits.view(np.int64)


def _mixed(x: Bits) -> Bits:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(Bits, x ^ (x >> np.uint64(31)))
