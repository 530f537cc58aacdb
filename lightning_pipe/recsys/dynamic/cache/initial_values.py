"""Initial values of new rows, which depend only on the seed, the table and the id.

A row therefore starts with the same values on every rank, in every batch, and after every expiry. The random bits come
from SplitMix64, seeded for each id. Uniform values are bitwise identical on every machine. Normal values are PyTorch's
quantiles, whose last bits may depend on the machine's C library, but not on the position in an array.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.recsys.dynamic.store.row_store import Keys

Values = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint64]

# Values per block, so that intermediate results stay in the processor's cache.
_BLOCK = 8192
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution between *low* and *high*, in 2^24 steps."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise SetupError(
                f"uniform initial values are from {self.low} to {self.high}; expected two finite numbers, the lower one"
                " first"
            )

    def values(self, bits: Bits) -> Values:
        values = _view_as_int64(bits >> np.uint64(40)).astype(np.float32)
        values *= np.float32((self.high - self.low) * 2.0**-24)
        values += np.float32(self.low)
        return values


@dataclass(frozen=True)
class Normal:
    """Normal distribution with the given mean and standard deviation."""

    mean: float
    std: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 <= self.std < math.inf):
            raise SetupError(
                f"normal initial values have mean {self.mean} and standard deviation {self.std}; expected finite"
                " numbers, the second >= 0"
            )

    def values(self, bits: Bits) -> Values:
        # Midpoints of 2^52 intervals, so that no probability is 0 or 1.
        probabilities = (_view_as_int64(bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        quantiles = torch.special.ndtri(torch.from_numpy(probabilities)).numpy()
        return (quantiles * self.std + self.mean).astype(np.float32)


@dataclass(frozen=True)
class Constant:
    """The same value for every element."""

    value: float = 0.0


Distribution = Uniform | Normal | Constant


class InitialValues:
    """Initial values of a table's rows."""

    def __init__(
        self, table: str, width: int, values: Distribution | Callable[[Tensor], Tensor], *, seed: int = 0
    ) -> None:
        self._table, self._width, self._values = table, width, values
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Use another seed from now on."""
        digest = hashlib.blake2b(f"{seed}/{self._table}".encode(), digest_size=8).digest()
        self._seed = int.from_bytes(digest, "little")

    def __call__(self, keys: Keys) -> Tensor:
        """Initial rows of *keys*: float32 on the CPU, [keys, width]; or the result of the user's function."""
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
                _hash_keys_to_random_bits(self._seed, keys[first : first + step], self._width)
            )
        return torch.from_numpy(rows)

    def _of_function(self, function: Callable[[Tensor], Tensor], keys: Keys) -> Tensor:
        shape = (len(keys), self._width)
        rows = function(torch.from_numpy(np.array(keys)))
        if not isinstance(rows, Tensor) or tuple(rows.shape) != shape:
            returned = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise InputError(
                f"the function of initial values of table {self._table!r} returned {returned} for {len(keys)} ids;"
                f" expected a tensor of shape {shape}. Return a row for each id"
            )
        return rows.detach().cpu()


def _hash_keys_to_random_bits(seed: int, keys: Keys, width: int) -> Bits:
    """64 random bits for each column of each key, [keys, width]."""
    unsigned = np.ascontiguousarray(keys).view(np.uint64)
    start = _apply_splitmix64_mixing(_apply_splitmix64_mixing(unsigned + _STEP) ^ np.uint64(seed))
    columns = np.arange(1, width + 1, dtype=np.uint64) * _STEP
    return _apply_splitmix64_mixing(start[:, None] + columns)


def _view_as_int64(bits: Bits) -> npt.NDArray[np.int64]:
    # Not all processors have an instruction that converts unsigned integers to floating point.
    return bits.view(np.int64)


def _apply_splitmix64_mixing(x: Bits) -> Bits:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(Bits, x ^ (x >> np.uint64(31)))
