"""What the planner has to know of the recsys tasks: what they take, and what a plan may do with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from lightning_pipe.engine.costs import Machine, Resource, TaskCost
from lightning_pipe.engine.plan import PipelinePlan
from lightning_pipe.engine.plan_limits import PlanLimits
from lightning_pipe.engine.planner import find_plans
from lightning_pipe.engine.task import PipelineTask
from lightning_pipe.recsys.plans import ON_WORKERS, recsys_plan

__all__ = ["hand_written_plans", "propose_plans", "recsys_costs", "recsys_limits"]

# What one task submits and another waits for: its time is the other's, where they run one after the other.
_WAITED_BY = {
    "EmbInputDistStart": "EmbInputDistWait",
    "EmbInputDistWait": "EmbPrefetch",
    "DenseBackward": "FinalizeGrads",
}
# What a caller with hooks between its tasks runs in its own time, and what reads what the batch before has written.
_TRAINS = frozenset(
    {"EmbForward", "DenseForward", "LossPostprocess", "DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep"}
)
# Streams that the hand-written plans have for them.
_STREAMS: dict[Resource, str] = {"copy": "memcpy", "network": "data_dist"}


def hand_written_plans(tasks: Sequence[PipelineTask]) -> list[PipelinePlan]:
    """The serial plan, and those that run ahead."""
    return [recsys_plan(name, tasks) for name in ("serial", "base", "prefetch")]


def recsys_costs(own: Mapping[str, float], *, peers: bool, device: torch.device) -> dict[str, TaskCost]:
    """Costs of the tasks, of what they took when they ran one after the other.

    Args:
        own: seconds in its thread, by task.
        peers: whether there are other ranks: what waits for them waits for the network.
        device: where batches are moved.
    """
    waiters = {waiter: submitter for submitter, waiter in _WAITED_BY.items()} if peers else {}
    costs = {}
    for name, seconds in own.items():
        copies = name == "H2DAndShuffle" and device.type == "cuda"
        waiter = _WAITED_BY.get(name) if peers else None
        costs[name] = TaskCost(
            0.0 if name in waiters else seconds,
            "copy" if copies else "compute",
            background=0.0 if waiter is None else own[waiter],
            waited_by=waiter,
        )
    return costs


def recsys_limits(max_in_flight: int, device: torch.device) -> PlanLimits:
    """What a plan may do under a Trainer.

    Args:
        max_in_flight: the most batches in flight.
        device: whether it has streams.
    """
    return PlanLimits(
        max_in_flight=max_in_flight,
        on_workers=ON_WORKERS,
        by_caller=_TRAINS,
        # The hooks around a batch come behind the transfer of a later one, and before anything of its own.
        submitted_before=(("H2DAndShuffle", "EmbForward"),),
        streams=_STREAMS if device.type == "cuda" else {},
    )


def propose_plans(
    tasks: Sequence[PipelineTask],
    own: Mapping[str, float],
    beside: float,
    *,
    max_in_flight: int,
    peers: bool,
    device: torch.device,
    keep: int,
) -> list[PipelinePlan]:
    """Plans that are predicted to be the fastest, best first.

    Args:
        tasks: of :func:`~lightning_pipe.recsys.tasks.recsys_tasks`.
        own: seconds that each takes in its thread, when they run one after the other.
        beside: seconds of an iteration outside of them.
        max_in_flight: the most batches in flight.
        peers: whether there are other ranks.
        device: where batches are moved.
        keep: how many.
    """
    streams = device.type == "cuda"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = 1.0 if streams else max(1.0, (os.cpu_count() or 1) / ranks_here)
    machine = Machine(cores=cores, device_streams=streams, between_periods=beside)
    costs = recsys_costs(own, peers=peers, device=device)
    limits = recsys_limits(max_in_flight, device)
    hand_written = hand_written_plans(tasks)
    return [one.plan for one in find_plans(tasks, costs, limits, machine, hand_written=hand_written, keep=keep)]
