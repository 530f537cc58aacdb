"""Picture of a timeline that makes overlap visible.

Each row is a thread or a stream of a rank. The color of a bar is that of its batch. In the stages of a language model
it is that of the micro-batch, and shade and hatching distinguish the kinds of work, such as forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.atomic_file import atomic_write
from lightning_pipe.engine.observe.timeline import (
    BACKWARD,
    BETWEEN_TASKS,
    FORWARD,
    HAND_OFF,
    INPUT_BACKWARD,
    RECOMPUTE,
    TRANSFER,
    WAITS,
    WEIGHT_BACKWARD,
    Bar,
    Timeline,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

# The colors of Okabe and Ito without black, and one more, which color-blind readers can distinguish. Adjacent batches
# never share a color.
_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999933")
_ENDS = (0, (2, 3))  # dots
# Lines of waits on the critical path; others are inside a task.
_WAIT_LINES = {BETWEEN_TASKS: (0, ()), HAND_OFF: (0, (3, 1)), TRANSFER: (0, (1, 1))}
_IN_TASK = (0, (5, 1, 1, 1))
_WAIT, _OTHER, _GROUND, _TEXT = "#F4F4F4", "#C9C9C9", "#ECECEC", "#333333"
_WIDTH, _MOST_ROWS = 15.0, 16  # width in inches; largest number of rows that is still readable
_LEGEND = 11  # most legend entries in one line
_MUCH = 0.1  # share of the time; rows that are busy for less are drawn less high
_FONT = 7.0
_LETTER = 0.63 * _FONT / 72  # width of a letter in inches


@dataclass(frozen=True)
class _BarStyle:
    """Appearance of a kind of micro-batch work: letter, share of white (negative: share of black), hatching, label."""

    letter: str
    white: float
    hatch: str
    label: str


_LOOKS = {
    FORWARD: _BarStyle("F", 0.45, "", "forward"),
    RECOMPUTE: _BarStyle("R", 0.45, "\\\\\\\\", "forward again"),
    BACKWARD: _BarStyle("B", -0.1, "", "backward"),
    INPUT_BACKWARD: _BarStyle("I", -0.1, "////", "backward for inputs"),
    WEIGHT_BACKWARD: _BarStyle("W", 0.2, "....", "backward for weights"),
}


def require_matplotlib(path: Path) -> None:
    """Check that Matplotlib can write a picture to *path*."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise SetupError(
            f"The picture {str(path)!r} needs Matplotlib, which is not installed. Run: pip install"
            " 'lightning-pipe[pictures]', or pass picture=None to draw no picture."
        ) from error
    supported = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in supported:
        raise SetupError(
            f"The picture {str(path)!r} has an unsupported file type. Pass a name that ends with one of"
            f" {', '.join(f'.{suffix}' for suffix in sorted(supported))}."
        )


@dataclass(frozen=True)
class TimelinePanel:
    """A timeline in a picture.

    Args:
        title: text above the timeline.
        timeline: its bars.
        ends: ends of batches, in seconds on the clock of the bars. The first and the last one limit what is shown.
    """

    title: str
    timeline: Timeline
    ends: Sequence[float] = ()


def draw_timeline(timeline: Timeline, path: Path, title: str, ends: Sequence[float] = ()) -> None:
    """Draw *timeline* to a file. The suffix selects the format (``.png``, ``.svg``, ``.pdf``)."""
    draw_timelines([TimelinePanel(title, timeline, ends)], path)


def draw_timelines(panels: Sequence[TimelinePanel], path: Path) -> None:
    """Draw timelines below each other to a file, with the same scale of time."""
    from matplotlib.figure import Figure

    milliseconds = max((1e3 * (panel.ends[-1] - panel.ends[0]) for panel in panels if panel.ends), default=0.0)
    drawings = [_Drawing(panel.timeline, panel.title, panel.ends, milliseconds) for panel in panels]
    heights = [max(1.0, drawing.height) for drawing in drawings]
    figure = Figure(figsize=(_WIDTH, 0.7 + sum(heights) + 1.0 * len(heights)), dpi=110, layout="constrained")
    all_axes = figure.subplots(len(drawings), squeeze=False, height_ratios=heights)[:, 0]
    for drawing, axes in zip(drawings, all_axes, strict=True):
        drawing.draw(axes)
    drawings[0].draw_legend(figure)
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished)


def without_mathtext(text: str) -> str:
    """Escape dollar signs in *text*, so that Matplotlib does not parse the text between them as a formula."""
    return text.replace("$", r"\$")


class _Drawing:
    """One timeline of a picture, at least as wide as *milliseconds*."""

    def __init__(self, timeline: Timeline, title: str, ends: Sequence[float], milliseconds: float) -> None:
        self._timeline = timeline
        self._title = title
        self._ends = ends
        self._begin = ends[0] if ends else min((bar.start for bar in timeline.bars), default=0.0)
        self._end = ends[-1] if ends else max((bar.end for bar in timeline.bars), default=0.0)
        self._by_microbatch = any(bar.stage is not None for bar in timeline.bars)
        stage_bars = [bar for bar in timeline.bars if bar.stage is not None]
        self._several_stages = len({(bar.rank, bar.lane, bar.stage) for bar in stage_bars}) > len(
            {(bar.rank, bar.lane) for bar in stage_bars}
        )
        seen = [p for p, bar in enumerate(timeline.bars) if bar.end > self._begin and bar.start < self._end]
        self._rows = list(dict.fromkeys((timeline.bars[p].rank, timeline.bars[p].lane) for p in seen))
        self._left_out = max(0, len(self._rows) - _MOST_ROWS)
        self._rows = self._rows[:_MOST_ROWS]
        self._seen = [p for p in seen if (timeline.bars[p].rank, timeline.bars[p].lane) in self._rows]
        self._shares = [self._busy(row) for row in self._rows]
        # Heights in inches. Task names are written upwards in narrow bars, so a row must be as high as they are long.
        high = 0.75 if self._by_microbatch else max(0.5, min(1.55, 11 / max(1, len(self._rows))))
        self._heights = [high if share > _MUCH else 0.45 * high for share in self._shares]
        self._tops = [sum(self._heights[:row]) for row in range(len(self._rows) + 1)]
        self._waits = [
            wait
            for wait in timeline.critical_waits
            if wait.end > self._begin and wait.start < self._end and (wait.rank, wait.lane) in self._rows
        ]
        self._milliseconds = max(milliseconds, 1e3 * (self._end - self._begin), 1e-6)
        # Width of the rows within the picture.
        self._inches = _WIDTH - 2.6

    @property
    def height(self) -> float:
        """Height of the rows in inches."""
        return self._tops[-1]

    def draw(self, axes: Axes) -> None:
        """Draw everything but the legend."""
        for position in self._seen:
            if position in self._timeline.enclosing_bar_positions:
                self._draw_enclosing_task(axes, self._timeline.bars[position])
            else:
                self._draw_bar(axes, position)
        self._draw_critical_path_arrows(axes)
        self._draw_waits(axes)
        for moment in self._ends[1:-1]:
            axes.axvline(self._to_ms_since_begin(moment), color=_TEXT, linewidth=0.8, linestyle=_ENDS, zorder=0.5)
        self._draw_frame(axes)

    def _draw_bar(self, axes: Axes, position: int) -> None:
        from matplotlib.patches import Rectangle

        bar = self._timeline.bars[position]
        row = self._rows.index((bar.rank, bar.lane))
        start, end = (
            self._to_ms_since_begin(max(bar.start, self._begin)),
            self._to_ms_since_begin(min(bar.end, self._end)),
        )
        color, hatch = self._look(bar)
        waits = bar.kind in WAITS
        high = self._heights[row] * (0.4 if waits else 0.82)
        middle = self._get_row_middle(row)
        axes.barh(
            middle,
            end - start,
            left=start,
            height=high,
            color=color,
            hatch=hatch,
            edgecolor="#B5B5B5" if waits else "#FFFFFF",
            linewidth=0.4,
            zorder=1 if waits else 2,
        )
        if position in self._timeline.critical_path:
            # A strip along the lower edge stays visible on narrow bars, unlike an outline.
            strip = Rectangle(
                (start, middle + high / 2 - 0.02), end - start, 0.07, color="black", linewidth=0, zorder=3
            )
            axes.add_patch(strip)
        text, upwards = self._choose_bar_label(bar, (end - start) / self._milliseconds * self._inches, high)
        if text:
            axes.text(
                (start + end) / 2,
                middle,
                without_mathtext(text),
                ha="center",
                va="center",
                rotation=90 if upwards else 0,
                fontsize=_FONT,
                color=_TEXT if waits else _pick_legible_text_color(color),
                bbox={"facecolor": color, "edgecolor": "none", "pad": 0.8} if hatch else None,
                zorder=4,
                clip_on=True,
            )

    def _draw_enclosing_task(self, axes: Axes, bar: Bar) -> None:
        """Draw a task that contains other bars, as their background."""
        row = self._rows.index((bar.rank, bar.lane))
        start, end = (
            self._to_ms_since_begin(max(bar.start, self._begin)),
            self._to_ms_since_begin(min(bar.end, self._end)),
        )
        axes.barh(
            self._get_row_middle(row),
            end - start,
            left=start,
            height=self._heights[row] * 0.96,
            color=_GROUND,
            zorder=0.4,
        )

    def _look(self, bar: Bar) -> tuple[str, str]:
        if bar.kind in WAITS:
            return _WAIT, "xxxx"
        if bar.microbatch is not None:
            look = _LOOKS[bar.kind]
            return _mix_color_with_white(_COLORS[bar.microbatch % len(_COLORS)], look.white), look.hatch
        if self._by_microbatch or bar.iteration is None:
            return _OTHER, ""
        return _COLORS[bar.iteration % len(_COLORS)], ""

    def _choose_bar_label(self, bar: Bar, width: float, high: float) -> tuple[str, bool]:
        """Longest text that fits into a bar of this width and height (inches); True if it is written upwards."""
        if bar.kind in WAITS:
            return "", False
        if bar.microbatch is not None:
            short = f"{_LOOKS[bar.kind].letter}{bar.microbatch}"
            texts = [f"{short}\ns{bar.stage}", short] if self._several_stages else [short]
        elif self._by_microbatch or bar.iteration is None:
            texts = [bar.name]
        else:
            texts = [f"{bar.name} {bar.iteration}", f"{bar.iteration}"]
        for text in texts:
            lines = text.split("\n")
            long = max(map(len, lines)) * _LETTER
            across = len(lines) * 1.25 * _FONT / 72
            if long <= width and across <= high:
                return text, False
            if across <= width and long <= high and len(lines) == 1:
                return text, True
        return "", False

    def _draw_critical_path_arrows(self, axes: Axes) -> None:
        """Draw arrows where the critical path continues in another row."""
        seen = set(self._seen)
        for step in self._timeline.critical_path_arrows:
            source, target = (self._timeline.bars[position] for position in step)
            rows = [self._rows.index((bar.rank, bar.lane)) for bar in (source, target)] if seen.issuperset(step) else []
            if not rows or rows[0] == rows[1]:
                continue
            axes.annotate(
                "",
                xy=(self._to_ms_since_begin(max(target.start, self._begin)), self._get_row_middle(rows[1])),
                xytext=(self._to_ms_since_begin(min(source.end, self._end)), self._get_row_middle(rows[0])),
                arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0},
                zorder=5,
            )

    def _draw_waits(self, axes: Axes) -> None:
        """Draw a thin line where the critical path waits, in the row that waits."""
        for wait in self._waits:
            row = self._rows.index((wait.rank, wait.lane))
            axes.plot(
                [
                    self._to_ms_since_begin(max(wait.start, self._begin)),
                    self._to_ms_since_begin(min(wait.end, self._end)),
                ],
                [self._get_row_middle(row) + self._heights[row] * 0.41 + 0.015] * 2,
                color="black",
                linewidth=1.2,
                linestyle=_WAIT_LINES.get(wait.name, _IN_TASK),
                solid_capstyle="butt",
                zorder=3,
            )

    def _draw_frame(self, axes: Axes) -> None:
        middles = [self._get_row_middle(row) for row in range(len(self._rows))]
        axes.set_yticks(middles, [without_mathtext(f"rank {rank} · {lane}") for rank, lane in self._rows])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(max(self._tops[-1], 1.0), 0)
        axes.set_xlim(0, self._milliseconds)
        axes.set_xlabel("time, ms" + (f" (and {self._left_out} more rows)" if self._left_out else ""))
        axes.set_title(without_mathtext(self._title), loc="left", fontsize=11, fontweight="bold")
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        beside = axes.get_yaxis_transform()
        for row, (rank, _) in enumerate(self._rows):
            if row and self._rows[row - 1][0] != rank:
                axes.axhline(self._tops[row], color="#888888", linewidth=0.8)
            axes.text(
                1.006, middles[row], f"{100 * self._shares[row]:.0f} %", transform=beside, va="center", fontsize=9
            )
        axes.text(1.006, 1.01, "busy", transform=axes.transAxes, va="bottom", fontsize=9, color=_TEXT)

    def _get_row_middle(self, row: int) -> float:
        return self._tops[row] + self._heights[row] / 2

    def _busy(self, row: tuple[int, str]) -> float:
        """Share of the time in which a row works rather than waits."""
        row_bars = (self._timeline.bars[p] for p in self._seen if p not in self._timeline.enclosing_bar_positions)
        done, reached = 0.0, self._begin
        for bar in row_bars:  # sorted by start
            if (bar.rank, bar.lane) == row and bar.kind not in WAITS:
                end = min(bar.end, self._end)
                done += max(0.0, end - max(bar.start, reached))
                reached = max(reached, end)
        return done / max(self._end - self._begin, 1e-9)

    def draw_legend(self, figure: Figure) -> None:
        """Draw the legend below all timelines of the picture."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        shown = [self._timeline.bars[p] for p in self._seen if p not in self._timeline.enclosing_bar_positions]
        patches: list[Patch | Line2D] = []
        if self._by_microbatch:
            kinds = {bar.kind for bar in shown}
            for kind, look in _LOOKS.items():
                if kind in kinds:
                    color = _mix_color_with_white(_COLORS[0], look.white)
                    label = f"{look.letter}: {look.label}"
                    patches.append(Patch(facecolor=color, hatch=look.hatch, edgecolor="white", label=label))
            if self._several_stages:
                patches.append(Patch(alpha=0, label="s: stage"))
            if kinds & set(WAITS):
                patches.append(
                    Patch(facecolor=_WAIT, hatch="xxxx", edgecolor="#B5B5B5", label="waiting for a neighbor")
                )
            patches.append(Patch(facecolor=_OTHER, label="other tasks"))
            for name in sorted(
                {self._timeline.bars[p].name for p in self._timeline.enclosing_bar_positions.intersection(self._seen)}
            ):
                patches.append(Patch(facecolor=_GROUND, label=without_mathtext(f"in {name}")))
            patches.extend(
                _make_color_legend_entries("micro-batch", {b.microbatch for b in shown if b.microbatch is not None})
            )
        else:
            patches.extend(
                _make_color_legend_entries("batch", {bar.iteration for bar in shown if bar.iteration is not None})
            )
        patches.append(Patch(color="black", label="critical path"))
        for name in sorted({wait.name for wait in self._waits}):
            line = _WAIT_LINES.get(name, _IN_TASK)
            label = without_mathtext(f"wait: {name}")
            patches.append(Line2D([], [], color="black", linewidth=1.2, linestyle=line, label=label))
        if len(self._ends) > 2:
            patches.append(Line2D([], [], color=_TEXT, linewidth=0.8, linestyle=_ENDS, label="end of a batch"))
        figure.legend(
            handles=patches,
            loc="outside lower center",
            ncols=len(patches) if len(patches) <= _LEGEND else -(-len(patches) // 2),
            frameon=False,
            fontsize=8,
            handlelength=1.6,
            columnspacing=1.3,
        )

    def _to_ms_since_begin(self, moment: float) -> float:
        return (moment - self._begin) * 1e3


def _make_color_legend_entries(label: str, numbers: Iterable[int]) -> list[Patch]:
    from matplotlib.patches import Patch

    in_order = sorted(numbers)
    if len(in_order) > len(_COLORS):
        return []  # a color stands for several numbers; the bars show the numbers
    return [Patch(facecolor=_COLORS[number % len(_COLORS)], label=f"{label} {number}") for number in in_order]


def _mix_color_with_white(color: str, white: float) -> str:
    """*color* mixed with a share *white* of white, or of black if it is negative."""
    parts = [int(color[start : start + 2], 16) for start in (1, 3, 5)]
    mixed = [part + (255 - part) * white if white >= 0 else part * (1 + white) for part in parts]
    return "#" + "".join(f"{round(part):02X}" for part in mixed)


def _pick_legible_text_color(color: str) -> str:
    """Black or white, whichever is more legible on *color*."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#FFFFFF"
