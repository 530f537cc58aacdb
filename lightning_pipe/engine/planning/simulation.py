"""Simulated iteration time of a plan, computed from the costs of its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.engine.planning.costs import NO_COST, Machine, Resource, TaskCost, checked_costs, used
from lightning_pipe.engine.planning.simulated_threads import SimulatedThreads
from lightning_pipe.engine.plans.plan import PipelinePlan


@dataclass(frozen=True)
class SimulatedRun:
    """Result of :func:`simulate`.

    Attributes:
        plan: simulated plan.
        costs: cost of each task, with messages replaced by their durations.
        machine: simulated machine.
        seconds_per_iteration: seconds per iteration in the steady state.
        is_steady: True if the run repeats exactly. Otherwise the seconds are a mean over the later half of the
            iterations.
        retired: time at which each iteration was retired, in seconds since the start of the first period.
        work: a bar for each piece of work, in the order of their ends. The lane of background work is its resource.
    """

    plan: PipelinePlan
    costs: Mapping[str, TaskCost]
    machine: Machine
    seconds_per_iteration: float
    is_steady: bool
    retired: tuple[float, ...]
    work: tuple[Bar, ...] = field(repr=False)

    @property
    def busy(self) -> dict[Resource, float]:
        """Utilisation of each resource in the steady state, averaged over its lanes, from 0 to 1."""
        in_use = used(self.costs, self.machine)
        return {resource: seconds / self.seconds_per_iteration for resource, seconds in in_use.items()}

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Exposed seconds per iteration of each task: the time that an iteration saves if the task is replayed.

        A replayed task takes no time, has no background work, and does not wait for background work of other tasks.
        """
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
    at_least: int = 2,
    at_most: int = 200,
) -> SimulatedRun:
    """Run *plan* on a simulated *machine* with unlimited data until the run repeats.

    Args:
        plan: plan to run.
        costs: cost of every task, by name.
        machine: resources that the tasks share (default ``Machine()``: two cores, and one lane of each other resource).
        at_least: minimum number of iterations, even if the run repeats earlier (default 2). Raise it to draw more
            iterations.
        at_most: maximum number of iterations (default 200). A run on a device with streams may never repeat.

    Raises:
        PlanError: the costs do not fit the tasks (see
            :func:`~lightning_pipe.engine.planning.costs.checked_costs`), *at_least* is less than 2, or *at_most* is
            less than *at_least*.
    """
    if not 2 <= at_least <= at_most:
        raise PlanError(
            f"the number of simulated iterations must be at least 2, and at_most not less than at_least, got at_least"
            f" {at_least} and at_most {at_most}. Correct these two arguments."
        )
    machine = machine or Machine()
    costs = checked_costs(list(plan.tasks.values()), costs, machine)
    threads = SimulatedThreads(plan, costs, machine)
    threads.run(at_least, at_most)
    retired = threads.retired
    # Average over a full cycle if the run repeats. Otherwise skip the first half, in which the pipeline settles.
    count = threads.repeats_after or len(retired) // 2
    seconds = (retired[-1] - retired[-1 - count]) / count
    # In the long run, an iteration cannot take less time than the work that no task waits for.
    seconds = max(seconds, *used(costs, machine).values(), 0.0)
    return SimulatedRun(plan, costs, machine, seconds, bool(threads.repeats_after), tuple(retired), tuple(threads.work))
