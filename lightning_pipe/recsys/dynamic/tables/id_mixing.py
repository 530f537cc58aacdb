"""Ids spread evenly over ranks: a bijection of int64, and back.

Ids of real data are anything but random: counters, timestamps, hashes with a tag in their low bits. A rank owns the
mixed ids that are its number modulo the number of ranks. The mix is the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), which has an inverse, so no id is lost or doubled.
"""

from __future__ import annotations

import torch

__all__ = ["mix", "unmix"]


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_INVERSES = tuple(_signed(pow(factor, -1, 1 << 64)) for factor in _FACTORS)


def mix(ids: torch.Tensor) -> torch.Tensor:
    """Mixed *ids*, int64, any shape; a copy."""
    mixed = ids ^ _shifted(ids, _SHIFTS[0])
    mixed *= _signed(_FACTORS[0])
    mixed ^= _shifted(mixed, _SHIFTS[1])
    mixed *= _signed(_FACTORS[1])
    mixed ^= _shifted(mixed, _SHIFTS[2])
    return mixed


def unmix(mixed: torch.Tensor) -> torch.Tensor:
    """The ids that :func:`mix` made *mixed* of; a copy."""
    ids = _unshift(mixed, _SHIFTS[2])
    ids *= _INVERSES[1]
    ids = _unshift(ids, _SHIFTS[1])
    ids *= _INVERSES[0]
    return _unshift(ids, _SHIFTS[0])


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right, which PyTorch has for no signed type."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _unshift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """The inverse of ``x ^ (x >>> by)``, for *by* of at least 22."""
    found = bits ^ _shifted(bits, by)
    return found ^ _shifted(bits, 2 * by)
