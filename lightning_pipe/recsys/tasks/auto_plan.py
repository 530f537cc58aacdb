"""What the planner has to know of the recsys tasks: what they take, and what a plan may do with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_pipe.engine.planning.costs import Machine, Resource, TaskCost
from lightning_pipe.engine.planning.network import Message
from lightning_pipe.engine.planning.plan_limits import PlanLimits
from lightning_pipe.engine.planning.planner import find_plans
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.task import PipelineTask
from lightning_pipe.recsys.plans.named import ON_WORKERS, PLANS, looks_ahead, read_beyond_tables, recsys_plan
from lightning_pipe.recsys.plans.with_replicas import AVERAGING
from lightning_pipe.recsys.tasks.declarations import TASKS

__all__ = ["hand_written_plans", "propose_plans", "recsys_costs", "recsys_limits", "recsys_machine"]

_WAITED_BY = {task.name: task.waited_by for task in TASKS if task.waited_by is not None}
_DEVICE = {task.name: task.device for task in TASKS}
# A message that is on its way during other tasks is waited for, if for this part of their time; else it had come.
_NOT_THERE = 0.05
# Streams that the hand-written plans have for them.
_STREAMS: dict[Resource, str] = {"copy": "memcpy", "network": "data_dist"}


def hand_written_plans(tasks: Sequence[PipelineTask], *, on_disk: bool = False) -> list[PipelinePlan]:
    """The serial plan, and those that run ahead and train the same: none that is stale.

    Only where nothing but tables is read in the lookup, those too that look up ahead.

    Args:
        tasks: of the model.
        on_disk: whether rows of tables come from a disk; if not, an early prefetch is a prefetch.
    """
    only_tables = not read_beyond_tables(tasks)
    names = [
        name
        for name, plan in PLANS.items()
        if not plan.stale and (only_tables or not looks_ahead(plan)) and (on_disk or name != "early_prefetch")
    ]
    return [recsys_plan(name, tasks) for name in names]


def recsys_costs(
    own: Mapping[str, float],
    *,
    peers: bool,
    device: torch.device,
    waits: Mapping[str, float] | None = None,
    sent: Mapping[str, Message] | None = None,
) -> dict[str, TaskCost]:
    """Costs of the tasks, of what they took when they ran one after the other: so the serial plan takes their sum.

    Args:
        own: seconds in its thread, by task, in serial order.
        peers: whether there are other ranks: what waits for them waits for the network.
        device: where batches are moved.
        waits: seconds of these that each waited for messages. Where that is not known, tasks that wait for another
            one's message are taken to do nothing else, and those that wait for their own to work all the time.
        sent: what each task submits. Then costs have messages, whose seconds a network model gives, in place of what
            was waited.
    """
    if not peers:
        waits, sent = {}, {}
    elif waits is None:
        waits = {waiter: own[waiter] for task, waiter in _WAITED_BY.items() if waiter != task and waiter in own}
    background: dict[str, float | Message] = dict(sent or {})
    waited = dict(waits)
    if sent is None:
        background, waited = _background(own, waits)
    costs = {}
    for name, seconds in own.items():
        submitted = background.get(name, 0.0)
        costs[name] = TaskCost(
            max(0.0, seconds - waited.get(name, 0.0)),
            _DEVICE.get(name, "compute") if device.type == "cuda" else "compute",
            background=submitted,
            # Any other task, such as one that checks the loss on all ranks, waits for its own.
            waited_by=_WAITED_BY.get(name, name) if submitted else None,
        )
    return costs


def _background(
    own: Mapping[str, float], waits: Mapping[str, float]
) -> tuple[dict[str, float | Message], dict[str, float]]:
    """How long messages take if nothing else is on the network, by the task that submits them; and what of each task's
    time was spent waiting for them."""
    order = list(own)
    background: dict[str, float | Message] = {}
    waited: dict[str, float] = {}
    shared: set[str] = set()
    for name, waiter in _WAITED_BY.items():
        wait = waits.get(waiter, 0.0)
        if name not in own or waiter not in own or not wait:
            continue
        between = order[order.index(name) + 1 : order.index(waiter)]
        # On its way while these ran; where they exchanged something too, each of the two had half of the network.
        meanwhile = sum(own[task] - waits.get(task, 0.0) / 2 for task in between)
        if wait <= _NOT_THERE * meanwhile:
            continue
        background[name] = wait + meanwhile
        waited[waiter] = wait
        shared.update(task for task in between if _WAITED_BY.get(task) == task)
    for task in shared & set(background):
        background[task] = waits[task] / 2
    return background, waited


def recsys_machine(device: torch.device, beside: float = 0.0) -> Machine:
    """What the tasks of this process share with those of other ranks on the same machine.

    Args:
        device: where batches are moved.
        beside: seconds of an iteration outside of the tasks.
    """
    if device.type == "cuda":
        return Machine(cores=1.0, device_streams=True, between_periods=beside)
    ranks = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's; where Lightning started the processes they are all here
    here = int(ranks) if ranks else dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return Machine(cores=max(1.0, (os.cpu_count() or 1) / here), between_periods=beside)


def recsys_limits(max_in_flight: int, device: torch.device, *, replicated: bool = False) -> PlanLimits:
    """What a plan may do under a Trainer.

    Args:
        max_in_flight: the most batches in flight.
        device: whether it has streams.
        replicated: whether tables have replicas, whose average is one of the tasks.
    """
    return PlanLimits(
        max_in_flight=max_in_flight,
        on_workers=ON_WORKERS,
        by_caller=frozenset(task.name for task in TASKS if task.trains and (replicated or task.needs != "replicas")),
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
        tasks: of :func:`~lightning_pipe.recsys.tasks.task_list.recsys_tasks`.
        own: seconds that each takes in its thread, when they run one after the other.
        beside: seconds of an iteration outside of them.
        max_in_flight: the most batches in flight.
        peers: whether there are other ranks.
        device: where batches are moved.
        keep: how many.
    """
    costs = recsys_costs(own, peers=peers, device=device)
    replicated = any(task.name == AVERAGING for task in tasks)
    limits = recsys_limits(max_in_flight, device, replicated=replicated)
    machine = recsys_machine(device, beside)
    hand_written = hand_written_plans(tasks)
    return [one.plan for one in find_plans(tasks, costs, limits, machine, hand_written=hand_written, keep=keep)]
