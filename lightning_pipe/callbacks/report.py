"""HTML page of a profile, in one file without scripts: pictures of the timeline and of the costs, and a table."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from lightning_pipe.callbacks.timeline_picture import draw_timeline, without_mathtext
from lightning_pipe.engine import PipelinePlan, ProfileResult
from lightning_pipe.engine.common.atomic_file import atomic_write
from lightning_pipe.engine.observe.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 4  # iterations in the picture of the timeline
_COLUMNS = ("task", "batches ahead", "thread", "stream", "own, ms", "exposed, ms", "95 %, ms", "share", "hidden", "")


def write_profile_report(
    path: Path, profile: ProfileResult, plan: PipelinePlan, timeline: Timeline | None, facts: Mapping[str, str]
) -> None:
    """Write the page of a profile, with the last iterations of the timeline and with facts about the run."""
    page = Template(files("lightning_pipe.callbacks").joinpath("report_template.html").read_text(encoding="utf-8"))
    text = page.substitute(
        title=escape(f"Plan {profile.plan}: {1e3 * profile.seconds:.2f} ms per iteration"),
        summary=escape(" ".join(profile.summarize())),
        pictures=_render_pictures_html(profile, timeline),
        tasks=_format_html_row(_COLUMNS, "th")
        + "".join(_format_html_row(_format_task_cells(profile, plan, name)) for name in plan.schedule),
        facts="".join(_format_html_row(fact) for fact in facts.items()),
    )
    with atomic_write(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _render_pictures_html(profile: ProfileResult, timeline: Timeline | None) -> str:
    pictures = []
    try:
        if timeline is not None and timeline.bars:
            end = max(bar.end for bar in timeline.bars)
            begin = max(end - _SHOWN * profile.seconds, min(bar.start for bar in timeline.bars))
            title = f"Last {_SHOWN} iterations before the profile"
            pictures.append(
                _render_picture_html(title, lambda path: draw_timeline(timeline, path, title, (begin, end)))
            )
        pictures.append(_render_picture_html("Costs of the tasks", lambda path: cost_figure(profile).savefig(path)))
    except ImportError:
        return "<p>Pictures need Matplotlib: pip install 'lightning-pipe[pictures]'.</p>"
    return "\n".join(pictures)


def _render_picture_html(title: str, draw: Callable[[Path], None]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw(path)
        data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{title}" src="data:image/png;base64,{data}">'


def cost_figure(profile: ProfileResult) -> Figure:
    """Bar chart of each task's own and exposed time in ms, with confidence intervals for the exposed time."""
    from matplotlib.figure import Figure

    tasks = profile.tasks
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(tasks)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for row, task in enumerate(tasks.values()):
        axes.barh(row - 0.2, 1e3 * task.seconds, 0.38, color="#B9CFE0", label=None if row else "own")
        if task.exposed is not None and task.low is not None and task.high is not None:
            around = [[1e3 * max(0.0, task.exposed - task.low)], [1e3 * max(0.0, task.high - task.exposed)]]
            axes.barh(row + 0.2, 1e3 * task.exposed, 0.38, color="#0072B2", xerr=around, capsize=2.5)
    axes.barh(0, 0, color="#0072B2", label="exposed, with 95 % interval")
    axes.set_yticks(range(len(tasks)), [without_mathtext(name) for name in tasks])
    axes.invert_yaxis()
    axes.set_xlabel("ms per iteration")
    title = f"plan {profile.plan}: {1e3 * profile.seconds:.2f} ms per iteration"
    axes.set_title(without_mathtext(title), loc="left")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.axvline(0, color="#888888", linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _format_task_cells(profile: ProfileResult, plan: PipelinePlan, name: str) -> list[str]:
    where, task = plan.schedule[name], profile.tasks.get(name)
    cells = [name, str(where.stage), where.thread_group, where.stream or "current"]
    if task is None:
        return [*cells, "", "", "", "", "", "not profiled"]
    cells.append(f"{1e3 * task.seconds:.3f}")
    if task.exposed is None or task.low is None or task.high is None:
        return [*cells, "", "", "", "", task.unmeasured_reason]
    interval = f"{1e3 * task.low:.3f} to {1e3 * task.high:.3f}"
    note = f"with {', '.join(task.included_tasks)}" if task.included_tasks else ""
    return [*cells, f"{1e3 * task.exposed:.3f}", interval, *profile.format_share_cells(task), note]


def _format_html_row(cells: Iterable[str], kind: str = "td") -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"
