"""Predicted iteration time of a plan, and the number of ranks from which on it is slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_pipe.engine.planning.costs import RESOURCES, Machine, Resource, TaskCost, without
from lightning_pipe.engine.planning.network import Message
from lightning_pipe.engine.planning.simulation import SimulatedRun, simulate
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import TaskSchedule

_WORSE = 1.1  # ratio to the time with the fewest ranks above which a plan breaks


@dataclass(frozen=True)
class PlanPrediction:
    """Predicted iteration time of one plan.

    Args:
        plan: name of the plan.
        ranks: number of ranks; None if the prediction does not depend on it.
        seconds: seconds per iteration.
        exposed: by resource, the seconds per iteration that are saved if all work on it takes no time.
        busy: by resource, the share of an iteration for which it is in use.
        over_serial: the serial plan's seconds divided by this plan's.
    """

    plan: str
    ranks: int | None
    seconds: float
    exposed: Mapping[Resource, float]
    busy: Mapping[Resource, float]
    over_serial: float

    @property
    def busiest(self) -> Resource | None:
        """Resource that is in use for the largest share of the time; None if no task takes any time."""
        return max(self.busy, key=lambda resource: self.busy[resource], default=None)


@dataclass(frozen=True)
class ScalingBreak:
    """Number of ranks from which on a plan is slower, and the reason.

    Args:
        plan: name of the plan.
        ranks: first tried number of ranks for which an iteration takes more than 1.1 times as long as with the fewest;
            None if there is no such number. Powers of two and the highest number of ranks are tried.
        seconds: seconds per iteration with that number of ranks, or with the most ranks if *ranks* is None.
        task: name of the task whose exposed seconds grow most; "" if *ranks* is None.
        grown: growth of the exposed seconds of this task.
        latency: share of latency in the duration of this task's message, from 0 to 1; 0 if it has no message.
    """

    plan: str
    ranks: int | None
    seconds: float
    task: str
    grown: float
    latency: float


def predict(plan: PipelinePlan, costs: Mapping[str, TaskCost], machine: Machine) -> PlanPrediction:
    """Simulate *plan*, the serial plan for comparison, and *plan* without the work on each resource.

    Raises:
        PlanError: the costs do not fit the tasks.
    """
    run = simulate(plan, costs, machine)

    def saved(resource: Resource) -> float:
        rest = {name: without(cost, resource) for name, cost in run.costs.items()}
        return run.seconds_per_iteration - simulate(plan, rest, machine).seconds_per_iteration

    serial = PipelinePlan([(task, TaskSchedule()) for task in plan.tasks.values()], name="serial")
    serial_seconds = simulate(serial, costs, machine).seconds_per_iteration
    seconds = run.seconds_per_iteration
    return PlanPrediction(
        plan.name,
        machine.network.ranks if machine.network else None,
        seconds,
        {resource: saved(resource) for resource in RESOURCES if resource in run.busy},
        run.busy,
        serial_seconds / seconds if seconds else 1.0,
    )


def first_break(
    plan: PipelinePlan, costs: Mapping[str, TaskCost], machine: Machine, fewest: int, most: int
) -> ScalingBreak:
    """Find the number of ranks, between *fewest* and *most*, from which on *plan* is slower."""
    network = machine.network
    assert network is not None

    def run(ranks: int) -> SimulatedRun:
        return simulate(plan, costs, replace(machine, network=replace(network, ranks=ranks)))

    first = run(fewest)
    powers = [2**power for power in range(most.bit_length()) if fewest < 2**power <= most]
    for ranks in (*powers, most):
        later = run(ranks)
        if later.seconds_per_iteration > _WORSE * first.seconds_per_iteration:
            grown = {name: seconds - first.exposed[name] for name, seconds in later.exposed.items()}
            task = max(grown, key=lambda name: grown[name])
            message = costs[task].background
            latency = 0.0
            if isinstance(message, Message):
                there = replace(network, ranks=ranks)
                latency = there.seconds(replace(message, bytes=0.0)) / there.seconds(message)
            return ScalingBreak(plan.name, ranks, later.seconds_per_iteration, task, grown[task], latency)
    return ScalingBreak(plan.name, None, run(most).seconds_per_iteration, "", 0.0, 0.0)
