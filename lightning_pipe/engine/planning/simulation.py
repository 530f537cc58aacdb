"""Simulated iteration time of a plan, computed from the costs of its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.engine.planning.costs import (
    NO_COST,
    Machine,
    Resource,
    TaskCost,
    convert_costs_to_seconds,
    sum_seconds_by_resource,
)
from lightning_pipe.engine.planning.simulated_threads import SimulatedThreads
from lightning_pipe.engine.plans.plan import PipelinePlan


@dataclass(frozen=True)
class SimulatedRun:
    """Result of :func:`simulate`."""

    plan: PipelinePlan
    costs: Mapping[str, TaskCost]  # with messages replaced by their durations
    machine: Machine
    seconds_per_iteration: float  # in the steady state
    is_steady: bool  # True if the run repeats exactly; otherwise the seconds are a mean over the later half
    iteration_ends: tuple[float, ...]  # end of each iteration, in seconds since the start of the first period
    bars: tuple[Bar, ...] = field(repr=False)  # in the order of their ends; background work is in its resource's lane

    @property
    def utilization(self) -> dict[Resource, float]:
        """Utilization of each resource in the steady state, averaged over its lanes, from 0 to 1."""
        in_use = sum_seconds_by_resource(self.costs, self.machine)
        return {resource: seconds / self.seconds_per_iteration for resource, seconds in in_use.items()}

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Exposed seconds per iteration of each task: the time that an iteration saves if the task is replayed."""
        return {name: self.seconds_per_iteration - self._without(name) for name in self.costs}

    def _without(self, task: str) -> float:
        costs = {
            name: replace(cost, waited_by=None) if cost.waited_by == task else cost for name, cost in self.costs.items()
        }
        return simulate(self.plan, {**costs, task: NO_COST}, self.machine).seconds_per_iteration


def simulate(
    plan: PipelinePlan,
    costs: Mapping[str, TaskCost],
    machine: Machine | None = None,
    *,
    min_iterations: int = 2,
    max_iterations: int = 200,
) -> SimulatedRun:
    """Run *plan* on a simulated *machine* with unlimited data until the run repeats."""
    machine = machine or Machine()
    costs = convert_costs_to_seconds(list(plan.tasks.values()), costs, machine)
    threads = SimulatedThreads(plan, costs, machine)
    threads.run(min_iterations, max_iterations)
    retired = threads.retired
    # Average over a full cycle if the run repeats. Otherwise skip the first half, in which the pipeline settles.
    count = threads.repeats_after or len(retired) // 2
    seconds = (retired[-1] - retired[-1 - count]) / count
    # In the long run, an iteration cannot take less time than the work that no task waits for.
    seconds = max(seconds, *sum_seconds_by_resource(costs, machine).values(), 0.0)
    return SimulatedRun(plan, costs, machine, seconds, bool(threads.repeats_after), tuple(retired), tuple(threads.work))
