"""The predictions of ``lightning-pipe plan simulate`` as text.

Tested in ``tests/cli/test_plan.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from lightning_pipe.engine.common.fitted_table import FittedTable
from lightning_pipe.engine.planning.costs import RESOURCES
from lightning_pipe.engine.planning.costs_yaml import CostsFile
from lightning_pipe.engine.planning.network import Message
from lightning_pipe.engine.planning.prediction import PlanPrediction, ScalingBreak

__all__ = ["assumed_cores", "simulation_report"]


def simulation_report(
    predictions: Sequence[PlanPrediction],
    breaks: Sequence[ScalingBreak],
    exposed: Mapping[str, Mapping[str, float]],
    costs: CostsFile,
    *notes: str,
) -> Group:
    """Predictions as text, for a Rich console.

    Args:
        predictions: a row each.
        breaks: of each plan, where numbers of ranks were asked about.
        exposed: elsewhere, by plan and task, the seconds by which an iteration is shorter without the task.
        costs: what was simulated.
        notes: what is to be said of them; empty ones are left out.
    """
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
        Text("ms: of an iteration. exposed: by how many it is shorter if all that work takes no time.", style="dim"),
    ]
    return Group(
        Text("predicted by simulation", style="bold"), "", table, "", *lines, *(Text(note) for note in notes if note)
    )


def assumed_cores(cores: float) -> str:
    """Describe the cores that a prediction assumes for each rank."""
    return (
        f"assumed: {cores:g} {'core' if cores == 1 else 'cores'} of its own for each rank's tasks, and none for its"
        " messages. Ranks that compute on one machine's cores move their messages with them: where these are busy, as"
        " two ranks' on two cores are, no plan gains what is predicted."
    )


def _break_in_words(one: ScalingBreak, predictions: Sequence[PlanPrediction], costs: CostsFile) -> str:
    ranks = [prediction.ranks or 0 for prediction in predictions if prediction.plan == one.plan]
    if one.ranks is None:
        return f"{one.plan}: nothing breaks up to {max(ranks):,} ranks, {_ms(one.seconds)} ms"
    message = costs.tasks[one.task].background
    what = f" ({message.kind} of {_size(message.bytes)}" if isinstance(message, Message) else ""
    why = f", {100 * one.latency:.0f} % of it latency)" if what else ""
    return (
        f"{one.plan}: at {one.ranks:,} ranks what breaks first is {one.task}{what}{why}: it costs {_ms(one.grown)} ms"
        f" more than with {min(ranks):,}"
    )


def _most_in_words(plan: str, exposed: Mapping[str, float]) -> str:
    most = sorted(exposed, key=lambda task: -exposed[task])[:3]
    return f"{plan}: what costs most is {', '.join(f'{task} {_ms(exposed[task])} ms' for task in most)}"


def _ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 2) + 0.0:.2f}"  # and never "-0.00"


def _size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"
