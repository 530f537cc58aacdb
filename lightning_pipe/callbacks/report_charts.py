"""Plotly charts of the HTML report: task costs, timeline, simulated alternatives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from lightning_pipe.callbacks.timeline_picture import _COLOURS, _ink
from lightning_pipe.callbacks.what_if import IN_ORDER, WhatIf
from lightning_pipe.engine import ProfileResult
from lightning_pipe.engine.observe.timeline import WAITS, Bar, Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_STRONG, _LIGHT, _BETTER, _WORSE, _SAME = "#0072B2", "#B9CFE0", "#009E73", "#D55E00", "#9AA5B1"
_FONT = {
    "family": "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif",
    "size": 13,
    "color": "#1c2733",
}
_GRID, _GROUND = "#e8ecf0", "#DADFE4"
_HIGH = 0.72  # height of a bar, as a share of its row
_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    # Keeps the report local: by default Plotly shows a button that uploads charts to a server.
    "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d"],
    "plotlyServerURL": "",
}
_SHOWN = 4  # iterations shown when the timeline opens
_ALIKE = 0.01  # relative difference below which two predictions are shown as the same


def cost_chart(profile: ProfileResult) -> str:
    """HTML of a bar chart of own and exposed times in ms."""
    from plotly.graph_objects import Bar as Bars
    from plotly.graph_objects import Figure

    names = [escape(name) for name in profile.tasks]
    found = list(profile.tasks.values())
    hover = [_explained(name, profile) for name in profile.tasks]
    exposed = [None if one.exposed is None else 1e3 * one.exposed for one in found]
    below = [
        1e3 * (one.exposed - one.low) if one.exposed is not None and one.low is not None else None for one in found
    ]
    above = [
        1e3 * (one.high - one.exposed) if one.exposed is not None and one.high is not None else None for one in found
    ]
    common: dict[str, Any] = {"y": names, "orientation": "h", "hovertext": hover, "hoverinfo": "text"}
    interval = {"type": "data", "array": above, "arrayminus": below, "color": "#1c2733", "thickness": 1.2, "width": 4}
    figure = Figure(
        [
            Bars(x=[1e3 * one.own for one in found], name="own", marker_color=_LIGHT, **common),
            Bars(x=exposed, name="exposed", marker_color=_STRONG, error_x=interval, **common),
        ]
    )
    _dress(figure, 90 + 42 * len(names))
    figure.update_layout(barmode="group", bargap=0.28, bargroupgap=0.0, legend={"traceorder": "normal"})
    figure.update_xaxes(title_text="ms per iteration", rangemode="tozero")
    return _html(figure, "cost-chart")


def timeline_chart(timeline: Timeline, seconds: float) -> str:
    """HTML of a timeline with a row for each lane and a bar for each run, which opens with the last few iterations.

    Args:
        timeline: recorded work; every bar is drawn.
        seconds: iteration time in seconds.
    """
    from plotly.graph_objects import Bar as Bars
    from plotly.graph_objects import Figure

    begin = min(bar.start for bar in timeline.bars)
    end = 1e3 * (max(bar.end for bar in timeline.bars) - begin)
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    # Only runs that contain micro-batches: a run of zero length may lie within any other run.
    outer = timeline.outer if any(bar.microbatch is not None for bar in timeline.bars) else frozenset()
    for position, bar in enumerate(timeline.bars):
        groups[_group(bar, position in outer)].append(position)
    several = len({rank for rank, _ in timeline.lanes}) > 1
    figure = Figure()

    critical = {*(timeline.bars[position] for position in timeline.critical), *timeline.critical_waits}

    def add(bars: Sequence[Bar], name: str, colour: str, text: list[str] | None = None, **look: Any) -> None:
        figure.add_trace(
            Bars(
                y=[_lane(bar.rank, bar.lane, several) for bar in bars],
                base=[1e3 * (bar.start - begin) for bar in bars],
                x=[1e3 * (bar.end - bar.start) for bar in bars],
                name=name,
                orientation="h",
                marker={"color": colour, "line": {"color": "#ffffff", "width": 0.5}},
                text=text,
                textposition="inside" if text else "none",
                insidetextanchor="middle",
                textfont={"color": _ink(colour), "size": 11},
                hovertext=[_told(bar, begin, bar in critical) for bar in bars],
                hoverinfo="text",
                **look,
            )
        )

    for (order, name), positions in sorted(groups.items()):
        colour = _COLOURS[order % len(_COLOURS)] if order >= 0 else _GROUND
        bars = [timeline.bars[position] for position in positions]
        add(bars, name, colour, [_label(bar) for bar in bars], width=_HIGH, offset=-_HIGH / 2)
    # A strip along the lower edge stays visible on narrow bars, unlike an outline.
    strip: dict[str, Any] = {"width": 0.09, "offset": _HIGH / 2 - 0.04}
    if timeline.critical_waits:
        add(timeline.critical_waits, "waits on the critical path", "#777777", **strip)
    add([timeline.bars[position] for position in sorted(timeline.critical)], "critical path", "#111111", **strip)
    lanes = [_lane(rank, lane, several) for rank, lane in timeline.lanes]
    _dress(figure, 214 + 72 * len(lanes))
    figure.update_layout(
        barmode="overlay",
        legend={"traceorder": "normal"},
        uniformtext={"mode": "hide", "minsize": 8},  # hide labels that would be too small to read
        margin={"t": 64},  # the buttons are above the legend, which may be as wide as the chart
    )
    figure.update_yaxes(categoryorder="array", categoryarray=lanes, fixedrange=True)
    first = max(0.0, end - 1e3 * _SHOWN * seconds) if seconds else 0.0
    figure.update_xaxes(title_text="time, ms", range=[first, end], rangeslider={"visible": True, "thickness": 0.07})
    return _html(figure, "timeline-chart")


def what_if_chart(what_if: WhatIf) -> str:
    """HTML of a bar chart of predicted times, with a menu to select the question."""
    from plotly.graph_objects import Bar as Bars
    from plotly.graph_objects import Figure

    figure = Figure()
    now = 1e3 * what_if.seconds
    for number, (question, answers) in enumerate(what_if.otherwise.items()):
        names = list(answers) if question in IN_ORDER else sorted(answers, key=lambda name: answers[name])
        times = [1e3 * answers[name] for name in names]
        changes = [time / now - 1 if now else 0.0 for time in times]
        figure.add_trace(
            Bars(
                y=[escape(name) for name in names],
                x=times,
                orientation="h",
                marker_color=[_SAME if abs(one) < _ALIKE else _BETTER if one < 0 else _WORSE for one in changes],
                text=[f"{time:.2f} ms ({_change(one)})" for time, one in zip(times, changes, strict=True)],
                textposition="auto",
                cliponaxis=False,
                hovertext=[
                    f"<b>{escape(name)}</b><br>{time:.3f} ms per iteration, {now:.3f} ms now<br>{_change(one)}"
                    for name, time, one in zip(names, times, changes, strict=True)
                ],
                hoverinfo="text",
                visible=number == 0,
                showlegend=False,
            )
        )
    most = max(len(answers) for answers in what_if.otherwise.values())
    _dress(figure, 130 + 34 * most)
    figure.add_vline(x=now, line={"color": "#1c2733", "width": 1.5, "dash": "dot"})
    figure.add_annotation(x=now, y=1, yref="paper", yanchor="bottom", text="current", showarrow=False)
    buttons = [
        {
            "label": escape(question),
            "method": "update",
            "args": [{"visible": [other == number for other in range(len(what_if.otherwise))]}],
        }
        for number, question in enumerate(what_if.otherwise)
    ]
    menu = {
        "buttons": buttons,
        "x": 0,
        "xanchor": "left",
        "y": 1.0,
        "yanchor": "bottom",
        "pad": {"b": 22},
        "bgcolor": "#ffffff",
        "bordercolor": "#b8c2cc",
        "showactive": True,
    }
    figure.update_layout(updatemenus=[menu], margin={"t": 84}, bargap=0.3)
    figure.update_xaxes(title_text="ms per iteration, by simulation", rangemode="tozero")
    return _html(figure, "what-if-chart")


def _dress(figure: Figure, height: int) -> None:
    figure.update_layout(
        template="none",
        height=height,
        font=_FONT,
        margin={"l": 8, "r": 16, "t": 40, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "x": 0, "y": 1.0, "xanchor": "left", "yanchor": "bottom"},
        hoverlabel={"align": "left", "bgcolor": "#ffffff", "bordercolor": "#1c2733", "font": {**_FONT}},
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#9aa5b1", "activecolor": "#1c2733"},
    )
    figure.update_xaxes(automargin=True, gridcolor=_GRID, zeroline=True, zerolinecolor="#b8c2cc", ticks="outside")
    # The first task or lane is at the top.
    figure.update_yaxes(automargin=True, autorange="reversed", showgrid=False, ticksuffix=" ")


def _html(figure: Figure, name: str) -> str:
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, include_mathjax=False, div_id=name, config=_CONFIG
    )
    return text


def _explained(name: str, profile: ProfileResult) -> str:
    one = profile.tasks[name]
    lines = [f"<b>{escape(name)}</b>", f"own {1e3 * one.own:.3f} ms"]
    if one.exposed is None or one.low is None or one.high is None:
        lines.append(escape(one.not_measured))
    else:
        share = f", {100 * max(0.0, one.exposed) / profile.seconds:.1f} % of an iteration" if profile.seconds else ""
        lines.append(f"exposed {1e3 * one.exposed:.3f} ms{share}")
        lines.append(f"95 %: {1e3 * one.low:.3f} to {1e3 * one.high:.3f} ms")
    if one.with_it:
        lines.append(f"with {escape(', '.join(one.with_it))}")
    return "<br>".join(lines)


def _group(bar: Bar, outer: bool) -> tuple[int, str]:
    """Colour index of a bar and its name in the legend."""
    if outer or bar.kind in WAITS:
        return -1, "waits and enclosing tasks"
    if bar.microbatch is not None:
        return bar.microbatch, f"micro-batch {bar.microbatch}"
    return (-1, "between batches") if bar.iteration is None else (bar.iteration, f"batch {bar.iteration}")


def _lane(rank: int, lane: str, several: bool) -> str:
    return escape(f"rank {rank} · {lane}" if several else lane)


def _label(bar: Bar) -> str:
    return escape(bar.name) if bar.microbatch is None else f"{bar.kind[0].upper()}{bar.microbatch}"


def _told(bar: Bar, begin: float, critical: bool) -> str:
    start, end = 1e3 * (bar.start - begin), 1e3 * (bar.end - begin)
    lines = [f"<b>{escape(bar.name)}</b>"]
    known = {"batch": bar.iteration, "micro-batch": bar.microbatch, "stage": bar.stage}
    lines.append(", ".join(f"{name} {value}" for name, value in known.items() if value is not None))
    lines.append(f"{end - start:.3f} ms, from {start:.3f} to {end:.3f}")
    lines.append(f"rank {bar.rank}, {escape(bar.lane)}")
    if critical:
        lines.append("on the critical path")
    return "<br>".join(line for line in lines if line)


def _change(part: float) -> str:
    return "the same" if abs(part) < _ALIKE else f"{100 * part:+.0f} %".replace("-", "\N{MINUS SIGN}")
