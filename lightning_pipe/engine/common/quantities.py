"""Parsers for sizes, durations and bandwidths with units."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.safe_text import short_repr

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}  # both Unicode signs for micro
_NUMBER = r"\d{1,40}(?:\.\d*)?(?:e[+-]?\d+)?"


def parse_size(text: str) -> int:
    """Convert a size such as "80GB" (powers of 1000) or "80GiB" (powers of 1024) to bytes."""
    match = re.fullmatch(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([kmgt]i?)?b?\s*", text.lower())
    size = int(Fraction(match[1]) * _SIZES[match[2] or ""]) if match else 0
    if not 1 <= size < 2**63:
        raise SetupError(f"the size is {short_repr(text)}; expected a number of bytes above 0, such as 80GB or 512MiB")
    return size


def parse_duration(text: str) -> float:
    """Convert a duration such as "5us", "0.2ms" or "1s" to seconds."""
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-zµμ]+)\s*", text.lower())
    seconds = float(match[1]) * _TIMES.get(match[2], math.inf) if match else math.inf
    if not math.isfinite(seconds):
        raise SetupError(
            f"the time is {short_repr(text)}; expected a number of at least 0 with a unit, such as 5us, 0.2ms or 1s"
        )
    return seconds


def parse_bandwidth(text: str) -> float:
    """Convert a bandwidth such as "25GB/s", "200mbit" or "200Mbit/s" to bytes per second."""
    size, bits = text.lower().strip().removesuffix("/s"), 1
    if size.endswith("bit"):
        size, bits = size.removesuffix("bit"), 8
    try:
        return parse_size(size) / bits
    except SetupError as error:
        raise SetupError(
            f"the bandwidth is {short_repr(text)}; expected bytes or bits per second, such as 25GB/s or 200mbit"
        ) from error
