"""Places the tasks of a balancer in plans that do not name them."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.engine import PlanSpec

BALANCING = ("BalanceStart", "BalanceFinish")


def with_balancing(plan: PlanSpec) -> PlanSpec:
    """Add the tasks of a balancer to a plan that names neither: in the copy's stage, otherwise as the input dist.

    The gather directly follows the copy, and the exchange follows the dense forward: ranks send their workloads and
    compute the partition while another batch runs forward. If the order leaves no room for that, the exchange precedes
    the input dist. If the input dist of a batch comes in a later period than its copy, the exchange is the last task.
    """
    copy, input_dist = (plan.schedule.get(name) for name in ("H2DAndShuffle", "EmbInputDistStart"))
    if copy is None or input_dist is None or any(name in plan.schedule for name in BALANCING):
        return plan
    where = replace(input_dist, stage=copy.stage)
    gather, exchange = BALANCING
    plan = plan.insert(gather, where, after="H2DAndShuffle")
    if not plan.order:
        return plan.insert(exchange, where)
    before = "EmbInputDistStart" if copy.stage == input_dist.stage else None
    end = len(plan.order) if before is None else plan.position(before)
    if plan.position(gather) < plan.position("LossPostprocess") < end:
        before = "LossPostprocess"
    return plan.insert(exchange, where, before=before)
