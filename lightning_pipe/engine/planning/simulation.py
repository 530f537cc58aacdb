"""What a plan takes, told from what its tasks cost, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.engine.planning.costs import NO_COST, Machine, Resource, TaskCost, checked_costs, loads
from lightning_pipe.engine.planning.simulated_threads import SimulatedThreads
from lightning_pipe.engine.plans.plan import PipelinePlan


@dataclass(frozen=True)
class SimulatedRun:
    """What came out of :func:`simulate`.

    Attributes:
        plan: the plan.
        costs: what was taken for each task.
        machine: what was taken for the machine.
        seconds_per_iteration: in the steady state.
        is_steady: whether everything repeats exactly; else the seconds are a mean over the later iterations.
        retired: when each iteration was retired, in seconds since the first period began.
        work: a bar for each piece of work, in the order of their ends; background work has its resource as its lane.
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
        """The share of each resource that is in use in the steady state, of all its lanes, 0 to 1."""
        used = _used(self.costs, self.machine)
        return {resource: seconds / self.seconds_per_iteration for resource, seconds in used.items()}

    @cached_property
    def exposed(self) -> dict[str, float]:
        """By task, the seconds per iteration that are gone if it is replayed.

        Then it costs nothing, its background work included, and does not wait for background work of others.
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
    """Run *plan* on a simulated *machine*, on data that does not end, until everything repeats.

    Args:
        plan: what to run.
        costs: of every task, by name.
        machine: what the tasks share; by default two cores and one lane of everything else.
        at_least: iterations to run although everything repeats: more for a picture.
        at_most: iterations to run although not everything repeats, which on a device with streams it may never do.

    Raises:
        PlanError: costs that do not fit the tasks (:func:`~lightning_pipe.engine.planning.costs.checked_costs`), or
            limits that leave no two iterations.
    """
    if not 2 <= at_least <= at_most:
        raise PlanError(
            f"a simulation of at least {at_least} and at most {at_most} iterations: two are needed for a time per"
            " iteration, and at_most may not be less than at_least"
        )
    machine = machine or Machine()
    costs = checked_costs(list(plan.tasks.values()), costs, machine)
    threads = SimulatedThreads(plan, costs, machine)
    threads.run(at_least, at_most)
    retired = threads.retired
    # Over a whole cycle if there is one; else without the first half, in which the pipeline settles.
    count = threads.repeats_after or len(retired) // 2
    seconds = (retired[-1] - retired[-1 - count]) / count
    # What nobody waits for has to be done all the same: without end it cannot fall behind.
    seconds = max(seconds, *_used(costs, machine).values(), 0.0)
    return SimulatedRun(plan, costs, machine, seconds, bool(threads.repeats_after), tuple(retired), tuple(threads.work))


def _used(costs: Mapping[str, TaskCost], machine: Machine) -> dict[Resource, float]:
    """Seconds an iteration for which each resource is in use, all of its lanes at once."""
    used: dict[Resource, float] = {}
    for cost in costs.values():
        for load in loads(cost, machine):
            used[load.resource] = used.get(load.resource, 0.0) + load.seconds / machine.lanes_of(load.resource)
    return used
