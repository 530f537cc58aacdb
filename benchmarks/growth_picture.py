"""Plot of the results of :mod:`growth`: one column for each growing size, with time above memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

if TYPE_CHECKING:
    from benchmarks.growth import Series

matplotlib.use("Agg")

COLORS = ("#0072b2", "#d55e00")  # palette of Okabe and Ito, safe for color-blind readers
FEW = 32  # each size up to this has a tick
COLUMNS = ("recsys, batch size", "recsys, tables", "recsys, ranks", "LLM, stages", "LLM, micro-batches")


def draw(curves: list[Series], path: Path) -> None:
    """Write a PNG to *path*."""
    figure, charts = plt.subplots(2, len(COLUMNS), figsize=(20, 7.5), layout="constrained")
    figure.suptitle("Growth of the cost of a step: medians with quartiles, and the fitted or theoretical curve")
    for column, title in enumerate(COLUMNS):
        column_curves = [curve for curve in curves if curve.series.startswith(title)]
        for row, memory in enumerate((False, True)):
            chart: Axes = charts[row, column]
            shown = [curve for curve in column_curves if (curve.unit == "MiB") is memory]
            for series, color in zip(shown, COLORS, strict=False):
                _add(chart, series, color, series.series.removeprefix(title).strip(", "))
            first = shown[0]
            chart.set_title(f"{title}: {first.quantity}", fontsize=11)
            chart.set_xlabel(first.across)
            chart.set_ylabel(first.unit)
            # Linear axes, so that a line looks like a line.
            if max(first.sizes) <= FEW:
                chart.set_xticks(first.sizes)
            chart.set_xlim(left=0)
            chart.set_ylim(0, 1.4 * chart.get_ylim()[1])  # space for the legend
            chart.grid(alpha=0.3)
            chart.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _add(chart: Axes, series: Series, color: str, label: str) -> None:
    medians = series.medians()
    ends = [_quartiles(series.points[size]) for size in series.sizes]
    errors = [
        [max(0.0, middle - low) for middle, (low, _) in zip(medians, ends, strict=True)],
        [max(0.0, high - middle) for middle, (_, high) in zip(medians, ends, strict=True)],
    ]
    marks: dict[str, Any] = {"fmt": "o", "markersize": 5, "capsize": 3, "alpha": 0.8}
    chart.errorbar(series.sizes, medians, errors, color=color, label=f"{label} measured".strip(), **marks)
    off = f"{series.worst():.2f}" if series.share else f"{series.worst():.1%}"
    curve = series.expected(series.sizes, medians)
    # Two series of a chart may have the same reference curve.
    style = "--" if color == COLORS[0] else ":"
    chart.plot(series.sizes, curve, style, color=color, linewidth=2, label=f"{series.curve}: deviation at most {off}")


def _quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
