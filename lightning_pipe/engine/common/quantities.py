"""Sizes, times and bandwidths as a person writes them."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.safe_text import shown

__all__ = ["parse_bandwidth", "parse_duration", "parse_size"]

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}  # both signs for micro
_LONGEST = 100  # characters: Python makes no number of more than 4,300 digits
_NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?"


def parse_size(text: str) -> int:
    """Bytes of "80GB" (of 1000s) or "80GiB" (of 1024s), with k, m, g or t, in any case.

    Raises:
        SetupError: it is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower()) if len(text) <= _LONGEST else None
    size = int(Fraction(found[1]) * _SIZES[found[2] or ""]) if found else 0
    if not 1 <= size < 2**63:
        raise SetupError(f"the size is {shown(text)}; needed is a number of bytes above 0, such as 80GB or 512MiB")
    return size


def parse_duration(text: str) -> float:
    """Seconds of "5us", "0.2ms" or "1s".

    Raises:
        SetupError: it is no time, or has no unit.
    """
    found = re.fullmatch(rf"\s*({_NUMBER})\s*([a-zµμ]+)\s*", text.lower()) if len(text) <= _LONGEST else None
    seconds = float(found[1]) * _TIMES.get(found[2], math.inf) if found else math.inf
    if not math.isfinite(seconds):
        raise SetupError(
            f"the time is {shown(text)}; needed is a number from 0 with its unit, such as 5us, 0.2ms or 1s"
        )
    return seconds


def parse_bandwidth(text: str) -> float:
    """Bytes per second of "25GB/s", or of "200mbit" and "200Mbit/s": of 1000s, 8 bits a byte.

    Raises:
        SetupError: it is no bandwidth.
    """
    size, bits = text.lower().strip().removesuffix("/s"), 1
    if size.endswith("bit"):
        size, bits = size.removesuffix("bit"), 8
    try:
        return parse_size(size) / bits
    except SetupError as error:
        raise SetupError(
            f"the bandwidth is {shown(text)}; needed are bytes or bits per second, such as 25GB/s or 200mbit"
        ) from error
