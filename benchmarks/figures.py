"""What a benchmark leaves behind: figures, each with its spread and its aim, as JSON for ``make bench`` and for people.

A benchmark takes ``--json FILE`` (``add_options``) and hands its figures to ``save``; ``benchmarks/table.py`` runs all
of them and puts what they left into one table.
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
        name: what was measured, against what; on which device, where it is not the CPU: "... (cuda)".
        value: a median, or what else the benchmark says.
        unit: "ratio", "us", "ms"...
        spread: lower and upper end of what the benchmark says it is: quartiles, or a 95 % interval.
        target: what it must reach, in words that begin with "<=" or ">=", None where it has only to be seen.
        met: whether it does; None without a target.
    """

    name: str
    value: float
    unit: str
    spread: tuple[float, float]
    target: str | None = None
    met: bool | None = None


def at_most(name: str, value: float, limit: float, spread: tuple[float, float], unit: str = "ratio") -> Figure:
    """A figure whose *value* must not be above *limit*."""
    return Figure(name, value, unit, spread, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, limit: float, spread: tuple[float, float], unit: str = "ratio") -> Figure:
    """A figure whose *value* must not be below *limit*."""
    return Figure(name, value, unit, spread, f">= {limit:g}", value >= limit)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def interval(statistic: Callable[[Sequence[int]], float], rounds: int) -> tuple[float, float]:
    """The 95 % interval of *statistic*, a function of the rounds that are taken: bootstrap (Efron, 1979).

    Args:
        statistic: of indices of rounds, some of them several times.
        rounds: how many there are.
    """
    draw = random.Random(1)
    values = sorted(statistic(draw.choices(range(rounds), k=rounds)) for _ in range(2000))
    return values[49], values[1949]


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median over rounds of *ones* / *others* of the same round, and its 95 % interval."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    return statistics.median(ratios), interval(lambda of: statistics.median(ratios[each] for each in of), len(ratios))


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--json``, which :func:`save` takes."""
    parser.add_argument("--json", type=Path, help="write the figures there, too")


def save(figures: Sequence[Figure], path: Path | None) -> None:
    """Write *figures* as a list of objects, where a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n", encoding="utf-8")
