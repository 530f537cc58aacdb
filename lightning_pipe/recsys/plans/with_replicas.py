"""Places the average of table replicas in plans that do not name it."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.engine import PlanSpec, TaskSchedule

AVERAGING = "SyncReplicas"


def with_replicas(plan: PlanSpec) -> PlanSpec:
    """Add the average to a plan that does not name it, directly after the tables' backward: before any later lookup.

    A lookup that does not wait for the tables' backward does not wait for the average either. A dependence of the
    lookup on the average implies one on the backward, so the average's edge is dropped first and precedes the
    backward's in ``stale``.
    """
    if AVERAGING in plan.schedule or "EmbBackward" not in plan.schedule:
        return plan
    where = TaskSchedule(globally_ordered=plan.schedule["EmbBackward"].globally_ordered)
    stale = [(AVERAGING, *edge[1:]) for edge in plan.stale if edge[:2] == ("EmbBackward", "EmbForward")]
    return replace(plan.insert(AVERAGING, where, after="EmbBackward"), stale=(*stale, *plan.stale))
