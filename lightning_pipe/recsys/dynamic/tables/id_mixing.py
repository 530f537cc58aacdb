"""Bijection of int64 that spreads ids evenly over ranks, and its inverse.

Ids of real data are not random: they are counters, timestamps, or hashes with a tag in their low bits. A rank owns the
mixed ids that are equal to its number modulo the number of ranks. The mix is the finalizer of SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). It has an inverse, so distinct ids stay
distinct.
"""

from __future__ import annotations

import torch


def _convert_uint64_to_int64(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_INVERSES = tuple(_convert_uint64_to_int64(pow(factor, -1, 1 << 64)) for factor in _FACTORS)


def mix_ids(ids: torch.Tensor) -> torch.Tensor:
    """Mix *ids*, int64 of any shape, into a new tensor."""
    mixed = ids ^ _logical_shift_right(ids, _SHIFTS[0])
    mixed *= _convert_uint64_to_int64(_FACTORS[0])
    mixed ^= _logical_shift_right(mixed, _SHIFTS[1])
    mixed *= _convert_uint64_to_int64(_FACTORS[1])
    mixed ^= _logical_shift_right(mixed, _SHIFTS[2])
    return mixed


def unmix_ids(mixed: torch.Tensor) -> torch.Tensor:
    """Invert :func:`mix_ids`, into a new tensor."""
    ids = _invert_xor_shift(mixed, _SHIFTS[2])
    ids *= _INVERSES[1]
    ids = _invert_xor_shift(ids, _SHIFTS[1])
    ids *= _INVERSES[0]
    return _invert_xor_shift(ids, _SHIFTS[0])


def get_owned_id_mask(mixed: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Mask of the ids whose unsigned remainder modulo *ranks* is *rank*, the rank to which FBGEMM sends an id."""
    # int64 has no unsigned remainder, so it is computed from the upper 63 bits and the lowest bit.
    upper = (mixed >> 1) & 0x7FFFFFFFFFFFFFFF
    return (upper.remainder(ranks) * 2 + (mixed & 1)).remainder(ranks) == rank


def _logical_shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right, which PyTorch does not have for signed types."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _invert_xor_shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Inverse of ``x ^ (x >>> by)``, for *by* >= 22."""
    unshifted = bits ^ _logical_shift_right(bits, by)
    return unshifted ^ _logical_shift_right(bits, 2 * by)
