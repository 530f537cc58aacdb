"""Text output of ``lightning-pipe plan simulate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from lightning_pipe.engine.common.report_table import ReportTable
from lightning_pipe.engine.planning.costs import RESOURCES
from lightning_pipe.engine.planning.costs_yaml import CostsSpec
from lightning_pipe.engine.planning.network import Collective
from lightning_pipe.engine.planning.prediction import PlanPrediction, ScalingBreak


def simulation_report(
    predictions: Sequence[PlanPrediction],
    breaks: Sequence[ScalingBreak],
    exposed: Mapping[str, Mapping[str, float]],
    costs: CostsSpec,
    *notes: str,
) -> Group:
    """Predictions as text, for a Rich console."""
    resources = [resource for resource in RESOURCES if any(resource in entry.utilization for entry in predictions)]
    exposures = [f"exposed:\n{resource}" for resource in resources]
    table = ReportTable.create_with_number_columns(
        "plan", "ranks", "ms", *exposures, "over\nserial", "busiest", edge=False
    )
    before = None
    for prediction in predictions:
        if before not in (None, prediction.plan):
            table.add_section()
        cells = [_ms(prediction.exposed[resource]) if resource in prediction.exposed else "" for resource in resources]
        busiest = (
            "-"
            if prediction.busiest is None
            else f"{prediction.busiest} {100 * prediction.utilization[prediction.busiest]:.0f} %"
        )
        name = "" if before == prediction.plan else prediction.plan
        ranks = "-" if prediction.ranks is None else f"{prediction.ranks:,}"
        table.add_row(name, ranks, _ms(prediction.seconds), *cells, f"{prediction.speedup_over_serial:.2f}", busiest)
        before = prediction.plan
    lines = [
        *(Text(_describe_where_scaling_breaks(scaling_break, predictions, costs)) for scaling_break in breaks),
        *(Text(_describe_most_exposed(plan, tasks)) for plan, tasks in exposed.items()),
        Text("ms: iteration time. exposed: time saved if all work on this resource took no time.", style="dim"),
    ]
    return Group(
        Text("predicted by simulation", style="bold"), "", table, "", *lines, *(Text(note) for note in notes if note)
    )


def describe_assumed_cores(cores: float) -> str:
    """Description of the cores that a prediction assumes for each rank."""
    return (
        f"assumed: {cores:g} dedicated {'core' if cores == 1 else 'cores'} for the tasks of each rank, and no cores for"
        " its messages. Ranks on one machine move their messages with the cores that they compute with. If these cores"
        " are busy, as with two ranks on two cores, no plan reaches the predicted gain."
    )


def _describe_where_scaling_breaks(
    scaling_break: ScalingBreak, predictions: Sequence[PlanPrediction], costs: CostsSpec
) -> str:
    ranks = [prediction.ranks or 0 for prediction in predictions if prediction.plan == scaling_break.plan]
    if scaling_break.ranks is None:
        return (
            f"{scaling_break.plan}: no task breaks scaling up to {max(ranks):,} ranks, {_ms(scaling_break.seconds)} ms"
        )
    message = costs.tasks[scaling_break.task].background
    message_text = f" ({message.kind} of {_format_bytes(message.bytes)}" if isinstance(message, Collective) else ""
    latency_text = f", {100 * scaling_break.latency:.0f} % of it latency)" if message_text else ""
    return (
        f"{scaling_break.plan}: scaling breaks at {scaling_break.ranks:,} ranks, because of"
        f" {scaling_break.task}{message_text}{latency_text}, which costs {_ms(scaling_break.grown)} ms more than with"
        f" {min(ranks):,} ranks"
    )


def _describe_most_exposed(plan: str, exposed: Mapping[str, float]) -> str:
    most = sorted(exposed, key=lambda task: -exposed[task])[:3]
    return f"{plan}: most exposed tasks: {', '.join(f'{task} {_ms(exposed[task])} ms' for task in most)}"


def _ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 2) + 0.0:.2f}"  # adding 0.0 avoids "-0.00"


def _format_bytes(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"
