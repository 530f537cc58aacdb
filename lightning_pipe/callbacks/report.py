"""Self-contained HTML report of a profile, which needs neither a server nor a network. Plotly draws the charts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from lightning_pipe.callbacks.report_charts import cost_chart, timeline_chart, what_if_chart
from lightning_pipe.callbacks.what_if import WhatIf
from lightning_pipe.engine import PipelinePlan, ProfileResult, SetupError
from lightning_pipe.engine.common.whole_file import whole_file
from lightning_pipe.engine.observe.timeline import Timeline

_HIDDEN = 0.5  # smallest part of a task's own time that must overlap for the task to be called hidden
# Needed because the simulation assumes that exchanges take no time on the rank's cores.
_SHARED = (
    " The ranks share this machine and move their messages with the same cores that they compute with. Another plan"
    " therefore gains less than predicted, and nothing if all cores are busy."
)
_MISS = 0.1  # largest relative error of the simulation that the report accepts without a warning


def require_plotly() -> None:
    """Check that Plotly, which draws the report, is installed.

    Raises:
        SetupError: If Plotly is not installed.
    """
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise SetupError(
            "The HTML report needs Plotly, which is not installed. Run: pip install 'lightning-pipe[report]', or pass"
            " report=None to write no report."
        ) from error


def write_report(
    path: Path,
    *,
    profile: ProfileResult,
    plan: PipelinePlan,
    timeline: Timeline | None = None,
    what_if: WhatIf | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write a report atomically. The file has about 5 MB, most of which is Plotly.

    Args:
        path: path of the file. Its folder is created if it does not exist.
        profile: measured costs.
        plan: plan that was profiled.
        timeline: recorded work (default None: no timeline chart).
        what_if: simulated alternatives (default None: no what-if chart).
        facts: names and values to show unchanged, such as strategy, ranks, versions and date (default none).

    Raises:
        SetupError: If Plotly is not installed.
        OSError: If the file cannot be written.
    """
    require_plotly()
    text = _page(profile, plan, timeline, what_if, facts or {})
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _page(
    profile: ProfileResult,
    plan: PipelinePlan,
    timeline: Timeline | None,
    what_if: WhatIf | None,
    facts: Mapping[str, str],
) -> str:
    from plotly.offline import get_plotlyjs

    sections = [
        _section(
            "costs",
            "Cost of each task",
            "Own: the task's time in its thread, including all waits inside it. Exposed: the time by which an iteration"
            " is shorter without the task, with its 95 % confidence interval. Time that is not exposed overlaps with"
            " other work.",
            cost_chart(profile),
        )
    ]
    if timeline is not None and timeline.bars:
        sections.append(
            _section(
                "timeline",
                "Timeline",
                "Each row is a thread or a stream of a rank, and each colour is a batch. A black strip marks the"
                " critical path, which determines the end time. Drag to zoom, double-click to reset the zoom, and click"
                " a batch in the legend to hide it.",
                timeline_chart(timeline, profile.seconds),
            )
        )
    sections.append(_section("plan", f"The plan {plan.name}", _plan_in_words(plan), _plan_table(profile, plan)))
    if what_if is not None and what_if.otherwise:
        sections.append(
            _section(
                "what-if",
                "What if",
                f"Simulated from the tasks' own times: {_ms(what_if.seconds)} per iteration for the current setup,"
                f" compared with {_ms(profile.seconds)} measured.{_miss(what_if.seconds, profile.seconds)} Compare"
                " predictions only with each other. In a plan that runs tasks ahead, the measured waits are already"
                " shortened by the overlap, so the effect of changes to exchanges is underestimated."
                f"{_SHARED if what_if.one_host else ''}",
                what_if_chart(what_if),
            )
        )
    page = Template(files("lightning_pipe.callbacks").joinpath("report_template.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(f"Pipeline report: plan {profile.plan}"),
        facts_line=" · ".join(escape(value) for value in list(facts.values())[:3]),
        facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()),
        summary=escape(_summary(profile)),
        figures="".join(_figures(profile, plan)),
        sections="\n".join(sections),
        plotly=get_plotlyjs(),
    )


def _section(name: str, title: str, explained: str, body: str) -> str:
    return (
        f'<section id="{name}"><h2>{escape(title)}</h2><p class="soft">{escape(explained)}</p>'
        f'<div class="{"wide" if body.startswith("<table") else "chart"}">{body}</div></section>'
    )


def _figures(profile: ProfileResult, plan: PipelinePlan) -> list[str]:
    known = [one for one in profile.tasks.values() if one.hidden is not None]
    own = sum(one.own for one in known)
    hidden = sum(one.own * (one.hidden or 0.0) for one in known)
    others = len(plan.thread_groups) - 1
    shown = {
        "per iteration": _ms(profile.seconds),
        "iterations per second": f"{1 / profile.seconds:.1f}" if profile.seconds else "-",
        f"of own time is hidden, over the {len(known)} task(s) with a measured overlap": (
            f"{100 * hidden / own:.0f} %" if own else "-"
        ),
        "batches in flight at most": str(plan.pipeline_depth),
        f"{'thread' if others == 1 else 'threads'} in addition to the main thread": str(others),
    }
    return [f'<div class="figure"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in shown.items()]


def _summary(profile: ProfileResult) -> str:
    """Findings that hold over the whole confidence intervals."""
    if not profile.exposed:
        return "No task was replayed, so only own times are known."
    said: list[str] = []
    names: list[str] = []
    for name in profile.ranked[:3]:
        one = profile.tasks[name]
        least, most = (100 * (seconds or 0.0) / profile.seconds for seconds in (one.low, one.high))
        beside = [other for other in one.with_it if other not in said]
        said += [name, *beside]
        names.append(f"{' with '.join((name, *beside))} ({least:.0f} to {most:.0f} %)")
    hidden = [
        name
        for name, one in profile.tasks.items()
        if one.own > 0.01 * profile.seconds and one.hidden is not None and (one.high or 0.0) < (1 - _HIDDEN) * one.own
    ]
    sentences = [f"Largest shares of an iteration: {_listed(names)}."] if names else []
    if hidden:
        sentences.append(f"The plan hides {_listed(hidden)}.")
    if profile.in_noise:
        sentences.append(profile.in_noise[:1].upper() + profile.in_noise[1:] + ".")
    elif not names:
        sentences.append("No confidence interval lies above 0: no measured task makes an iteration longer.")
    return " ".join(sentences)


def _plan_in_words(plan: PipelinePlan) -> str:
    exact = "relaxes " + "; ".join(map(str, plan.stale)) if plan.stale else "is exact"
    return (
        "The column 'batches ahead' is the distance between the batch that a task works on and the batch in training."
        f" The plan {exact}. Tasks are listed in the order of a serial iteration."
    )


def _plan_table(profile: ProfileResult, plan: PipelinePlan) -> str:
    columns = ("task", "batches ahead", "thread", "stream", "own, ms", "exposed, ms", "95 %, ms", "share", "hidden", "")
    numbers = (False, True, False, False, True, True, True, True, True, False)
    head = "".join(
        f'<th class="number">{name}</th>' if right else f"<th>{name}</th>"
        for name, right in zip(columns, numbers, strict=True)
    )
    rows = []
    for name, where in plan.schedule.items():
        cells = [name, str(where.stage), where.thread_group, where.stream or "current", *_measured(profile, name)]
        kinds = ["number" if right else "" for right in numbers]
        kinds[0], kinds[-1] = "task", "note"
        row = "".join(f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(cells, kinds, strict=True))
        rows.append(f"<tr>{row}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _measured(profile: ProfileResult, name: str) -> list[str]:
    one = profile.tasks.get(name)
    if one is None:
        return ["", "", "", "", "", "not profiled"]
    own = f"{1e3 * one.own:.3f}"
    if one.exposed is None or one.low is None or one.high is None:
        return [own, "", "", "", "", one.not_measured]
    return [
        own,
        f"{1e3 * one.exposed:.3f}",
        f"{1e3 * one.low:.3f} to {1e3 * one.high:.3f}",
        *profile.cells(one),
        f"with {', '.join(one.with_it)}" if one.with_it else "",
    ]


def _miss(simulated: float, measured: float) -> str:
    off = abs(simulated / measured - 1) if measured else 0.0
    return f" ⚠ The simulation is off by {100 * off:.0f} %: do not rely on these predictions." if off > _MISS else ""


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
