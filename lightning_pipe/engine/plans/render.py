"""Text rendering of a plan: the table of its tasks and the timeline of its periods."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

from rich import box
from rich.console import Console

from lightning_pipe.engine.common.report_table import ReportTable
from lightning_pipe.engine.plans.dependencies import Dependency
from lightning_pipe.engine.plans.spec import PlanSpec

# Width if the output is not a terminal and COLUMNS is not set.
_COLUMNS = 120


def plan_table(plan: PlanSpec, dependencies: Sequence[Dependency], stale: Sequence[Dependency]) -> str:
    """Table with one row per task, in the order in which a period submits them, fitted to the terminal width."""
    notes = []
    table = _make_empty_table()
    for column in ("task", "stage", "stream", "thread group", "waits for"):
        table.add_column(column, justify="right" if column == "stage" else "left", overflow="fold")
    for name in plan.order:
        where = plan.schedule[name]
        waits = [d.upstream + (f"[i-{d.distance}]" if d.distance else "") for d in dependencies if d.downstream == name]
        group = where.thread_group + ("*" if where.globally_ordered else "")
        table.add_row(name, str(where.stage), where.stream or "current", group, ", ".join(dict.fromkeys(waits)))
    if any(where.globally_ordered for where in plan.schedule.values()):
        notes.append("* globally ordered: its collectives are submitted in the order of this table, on every rank.")
    if any(d.distance for d in dependencies):
        notes.append("[i-n]: the run of that task n iterations earlier.")
    if stale:
        notes.append("Stale dependencies: " + "; ".join(map(str, stale)) + ".")
    title = f"plan {plan.name}: {plan.pipeline_depth} batches in flight at most"
    return _render_to_text(shutil.get_terminal_size((_COLUMNS, 24)).columns, title, table, *notes)


def plan_timeline(plan: PlanSpec, iterations: int) -> str:
    """Table of the iteration that each task runs for in each period, for a run of *iterations* batches.

    Time runs downwards inside a period (submission order) and to the right across periods. Iteration 0 is trained in
    period 0. A line separates thread groups and streams: only tasks in different blocks can overlap. The table is never
    wrapped.
    """
    table = _make_empty_table()
    table.add_column("thread group")
    table.add_column("stream")
    table.add_column("task")
    periods = range(-plan.max_stage, iterations)
    for period in periods:
        table.add_column(str(period), justify="right")
    last_block = None
    for group in plan.thread_group_names:
        for name in plan.order:
            where = plan.schedule[name]
            if where.thread_group != group:
                continue
            block = (group, where.stream or "current")
            batches = [period + where.stage for period in periods]
            cells = [str(batch) if 0 <= batch < iterations else "·" for batch in batches]
            if block != last_block:
                table.add_section()
            table.add_row(*(block if block != last_block else ("", "")), name, *cells)
            last_block = block
    title = f"timeline of {plan.name}: the batch that each task works on, period by period"
    return _render_to_text(10_000, title, table)


def _make_empty_table() -> ReportTable:
    return ReportTable(box=box.SIMPLE, padding=(0, 1))


def _render_to_text(width: int, *parts: str | ReportTable) -> str:
    # Names may contain square brackets, so markup is disabled.
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(part)
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().rstrip().splitlines())
