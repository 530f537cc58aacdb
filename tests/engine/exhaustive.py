"""The best of all plans for a handful of tasks, found by trying each: what a search is compared with."""

from __future__ import annotations

from lightning_pipe.engine import PlanError
from lightning_pipe.engine.planning.plan_bound import lower_bound
from lightning_pipe.engine.planning.plan_draft import PlanSpace
from lightning_pipe.engine.planning.plan_search import every_draft
from lightning_pipe.engine.planning.planner import PlanCandidate
from tests.engine.synthetic import Graph


def best_of_all(graph: Graph, at_most: int = 20_000) -> PlanCandidate:
    """The best of all exact plans, each of which is simulated, until one reaches the lower bound.

    Plans that differ only in how early a worker gets a task count as one, as early as dependencies allow.

    Raises:
        PlanError: there are more plans than *at_most*.
    """
    space = PlanSpace(graph.tasks, graph.costs, graph.limits, graph.machine)
    bound = lower_bound(graph.tasks, graph.costs, graph.limits.max_in_flight, graph.machine, on_main=space.on_main)
    best = None
    for number, draft in enumerate(every_draft(space), start=1):
        if number > at_most:
            raise PlanError(f"there are more than {at_most} plans for these {len(graph.tasks)} tasks")
        if best is None or space.seconds(draft) < space.seconds(best):
            best = draft
        if space.seconds(best) <= bound.seconds * (1 + 1e-9):
            break
    assert best is not None
    return PlanCandidate(space.plan(best), space.seconds(best), bound.reason)
