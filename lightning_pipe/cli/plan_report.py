"""Text output of ``lightning-pipe plan simulate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from lightning_pipe.engine.common.fitted_table import FittedTable
from lightning_pipe.engine.planning.costs import RESOURCES
from lightning_pipe.engine.planning.costs_yaml import CostsFile
from lightning_pipe.engine.planning.network import Message
from lightning_pipe.engine.planning.prediction import PlanPrediction, ScalingBreak


def simulation_report(
    predictions: Sequence[PlanPrediction],
    breaks: Sequence[ScalingBreak],
    exposed: Mapping[str, Mapping[str, float]],
    costs: CostsFile,
    *notes: str,
) -> Group:
    """Predictions as text, for a Rich console."""
    resources = [one for one in RESOURCES if any(one in prediction.busy for prediction in predictions)]
    exposures = [f"exposed:\n{one}" for one in resources]
    table = FittedTable.of_figures("plan", "ranks", "ms", *exposures, "over\nserial", "busiest", edge=False)
    before = None
    for one in predictions:
        if before not in (None, one.plan):
            table.add_section()
        cells = [_ms(one.exposed[resource]) if resource in one.exposed else "" for resource in resources]
        busiest = "-" if one.busiest is None else f"{one.busiest} {100 * one.busy[one.busiest]:.0f} %"
        name = "" if before == one.plan else one.plan
        ranks = "-" if one.ranks is None else f"{one.ranks:,}"
        table.add_row(name, ranks, _ms(one.seconds), *cells, f"{one.over_serial:.2f}", busiest)
        before = one.plan
    lines = [
        *(Text(_break_in_words(one, predictions, costs)) for one in breaks),
        *(Text(_most_in_words(plan, tasks)) for plan, tasks in exposed.items()),
        Text("ms: iteration time. exposed: time saved if all work on this resource took no time.", style="dim"),
    ]
    return Group(
        Text("predicted by simulation", style="bold"), "", table, "", *lines, *(Text(note) for note in notes if note)
    )


def assumed_cores(cores: float) -> str:
    """Description of the cores that a prediction assumes for each rank."""
    return (
        f"assumed: {cores:g} dedicated {'core' if cores == 1 else 'cores'} for the tasks of each rank, and no cores for"
        " its messages. Ranks on one machine move their messages with the cores that they compute with. If these cores"
        " are busy, as with two ranks on two cores, no plan reaches the predicted gain."
    )


def _break_in_words(one: ScalingBreak, predictions: Sequence[PlanPrediction], costs: CostsFile) -> str:
    ranks = [prediction.ranks or 0 for prediction in predictions if prediction.plan == one.plan]
    if one.ranks is None:
        return f"{one.plan}: no task breaks scaling up to {max(ranks):,} ranks, {_ms(one.seconds)} ms"
    message = costs.tasks[one.task].background
    what = f" ({message.kind} of {_size(message.bytes)}" if isinstance(message, Message) else ""
    why = f", {100 * one.latency:.0f} % of it latency)" if what else ""
    return (
        f"{one.plan}: scaling breaks at {one.ranks:,} ranks, because of {one.task}{what}{why}, which costs"
        f" {_ms(one.grown)} ms more than with {min(ranks):,} ranks"
    )


def _most_in_words(plan: str, exposed: Mapping[str, float]) -> str:
    most = sorted(exposed, key=lambda task: -exposed[task])[:3]
    return f"{plan}: most exposed tasks: {', '.join(f'{task} {_ms(exposed[task])} ms' for task in most)}"


def _ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 2) + 0.0:.2f}"  # adding 0.0 avoids "-0.00"


def _size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"
