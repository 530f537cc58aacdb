"""Predicted iteration time of a plan, and the number of ranks from which on it is slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_pipe.engine.planning.costs import RESOURCES, Machine, Resource, TaskCost, remove_resource_from_cost
from lightning_pipe.engine.planning.network import Collective
from lightning_pipe.engine.planning.simulation import SimulatedRun, simulate
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import TaskSchedule

_WORSE = 1.1  # ratio to the time with the fewest ranks above which a plan breaks


@dataclass(frozen=True)
class PlanPrediction:
    """Predicted iteration time of one plan."""

    plan: str
    ranks: int | None  # None if the prediction does not depend on it
    seconds: float  # per iteration
    exposed: Mapping[Resource, float]  # seconds per iteration that are saved if all work on the resource takes no time
    utilization: Mapping[Resource, float]  # share of an iteration for which the resource is in use
    speedup_over_serial: float  # the serial plan's seconds divided by this plan's

    @property
    def busiest(self) -> Resource | None:
        """Resource that is in use for the largest share of the time; None if no task takes any time."""
        return max(self.utilization, key=lambda resource: self.utilization[resource], default=None)


@dataclass(frozen=True)
class ScalingBreak:
    """Number of ranks from which on a plan is slower, and the reason."""

    plan: str
    ranks: int | None  # first tried number for which an iteration takes 1.1 times as long as with the fewest
    seconds: float  # per iteration with that number of ranks, or with the most if there is no such number
    task: str  # task whose exposed seconds grow most
    grown: float  # by as many seconds
    latency: float  # share of latency in the duration of this task's message


def predict_plan_performance(plan: PipelinePlan, costs: Mapping[str, TaskCost], machine: Machine) -> PlanPrediction:
    """Simulate *plan*, the serial plan for comparison, and *plan* without the work on each resource."""
    run = simulate(plan, costs, machine)

    def compute_exposed_seconds(resource: Resource) -> float:
        reduced_costs = {name: remove_resource_from_cost(cost, resource) for name, cost in run.costs.items()}
        return run.seconds_per_iteration - simulate(plan, reduced_costs, machine).seconds_per_iteration

    serial = PipelinePlan([(task, TaskSchedule()) for task in plan.tasks.values()], name="serial")
    serial_seconds = simulate(serial, costs, machine).seconds_per_iteration
    seconds = run.seconds_per_iteration
    return PlanPrediction(
        plan.name,
        machine.network.ranks if machine.network else None,
        seconds,
        {resource: compute_exposed_seconds(resource) for resource in RESOURCES if resource in run.utilization},
        run.utilization,
        serial_seconds / seconds if seconds else 1.0,
    )


def find_scaling_break(
    plan: PipelinePlan, costs: Mapping[str, TaskCost], machine: Machine, fewest: int, most: int
) -> ScalingBreak:
    """Find the number of ranks, between *fewest* and *most*, from which on *plan* is slower."""
    network = machine.network
    assert network is not None

    def simulate_with_ranks(ranks: int) -> SimulatedRun:
        return simulate(plan, costs, replace(machine, network=replace(network, ranks=ranks)))

    first = simulate_with_ranks(fewest)
    powers = [2**power for power in range(most.bit_length()) if fewest < 2**power <= most]
    for ranks in (*powers, most):
        later = simulate_with_ranks(ranks)
        if later.seconds_per_iteration > _WORSE * first.seconds_per_iteration:
            grown = {name: seconds - first.exposed[name] for name, seconds in later.exposed.items()}
            task = max(grown, key=lambda name: grown[name])
            message = costs[task].background
            latency = 0.0
            if isinstance(message, Collective):
                larger_network = replace(network, ranks=ranks)
                latency = larger_network.seconds(replace(message, bytes=0.0)) / larger_network.seconds(message)
            return ScalingBreak(plan.name, ranks, later.seconds_per_iteration, task, grown[task], latency)
    return ScalingBreak(plan.name, None, simulate_with_ranks(most).seconds_per_iteration, "", 0.0, 0.0)
