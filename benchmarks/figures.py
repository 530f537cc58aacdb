"""Figures of a benchmark, each with its spread and its aim, as JSON.

A benchmark accepts ``--json FILE`` (``add_options``) and passes its figures to ``save``. ``benchmarks/table.py`` runs
all benchmarks and prints their figures in one table.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Figure", "add_options", "at_least", "at_most", "interval", "median_ratio", "quartiles", "save"]


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name: measured quantity and its reference, with the device if it is not the CPU: "... (cuda)".
        value: a median, or another statistic that the benchmark documents.
        unit: "ratio", "us", "ms"...
        spread: lower and upper end of the quartiles or of a 95 % interval, as the benchmark documents.
        target: text that begins with "<=" or ">=" (default None: no target).
        met: True if the value reaches the target; None without a target.
    """

    name: str
    value: float
    unit: str
    spread: tuple[float, float]
    target: str | None = None
    met: bool | None = None


def at_most(name: str, value: float, limit: float, spread: tuple[float, float], unit: str = "ratio") -> Figure:
    """Figure whose *value* must not exceed *limit*."""
    return Figure(name, value, unit, spread, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, limit: float, spread: tuple[float, float], unit: str = "ratio") -> Figure:
    """Figure whose *value* must not be below *limit*."""
    return Figure(name, value, unit, spread, f">= {limit:g}", value >= limit)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile."""
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def interval(statistic: Callable[[Sequence[int]], float], rounds: int) -> tuple[float, float]:
    """The 95 % bootstrap interval of *statistic* over rounds (Efron, 1979).

    Args:
        statistic: function of a list of round indices, in which an index may occur several times.
        rounds: number of rounds.
    """
    draw = random.Random(1)
    values = sorted(statistic(draw.choices(range(rounds), k=rounds)) for _ in range(2000))
    return values[49], values[1949]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median over rounds of the ratio *numerators* / *denominators* in the same round, and its 95 % interval."""
    ratios = [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]
    return statistics.median(ratios), interval(
        lambda indices: statistics.median(ratios[index] for index in indices), len(ratios)
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``, whose value :func:`save` takes."""
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def save(figures: Sequence[Figure], path: Path | None) -> None:
    """Write *figures* to *path* as a list of objects, unless it is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n", encoding="utf-8")
