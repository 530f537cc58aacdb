"""Input of the planner for the recsys tasks: hand-written plans, costs of the tasks, and the moves that are allowed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.network import Collective
from lightning_pipe.engine.planning.planner import propose_plan_variants
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.task import PipelineTask
from lightning_pipe.recsys.plans.recsys_plans import (
    PLANS,
    divides_lookups,
    looks_up_embeddings_ahead,
    lookup_state_besides_tables,
    plan_supports_cached_tables,
    recsys_plan,
)
from lightning_pipe.recsys.tasks.declarations import TASKS

_WAITED_BY = {task.name: task.waited_by for task in TASKS if task.waited_by is not None}
_DEVICE = {task.name: task.device for task in TASKS}
# A wait for a message counts only above this share of the time of the tasks during its transfer; below it, the message
# is taken to have arrived already.
_NOT_THERE = 0.05
# The planner moves no tasks that submit collectives to other threads, since it gives no turns.
_ON_WORKERS = frozenset({"EmbPrefetch"})


def hand_written_plans(
    tasks: Sequence[PipelineTask], *, on_disk: bool = False, can_divide: bool = True, max_in_flight: int | None = None
) -> list[PipelinePlan]:
    """Return the serial plan and the plans that run ahead without stale tables.

    Plans that look up ahead are included only if lookups read nothing but tables, and plans that look up in two parts
    only with the tasks for that, and if a module's lookups can be divided (*can_divide*).
    """
    only_tables = not lookup_state_besides_tables(tasks)
    can_divide = can_divide and any(task.name == "EmbForwardAhead" for task in tasks)
    names = [
        name
        for name, plan in PLANS.items()
        if not plan.stale
        and (only_tables or not looks_up_embeddings_ahead(plan))
        and (can_divide or not divides_lookups(plan))
        and (on_disk or name != "early_prefetch")
    ]
    plans = [recsys_plan(name, tasks) for name in names]
    return [plan for plan in plans if max_in_flight is None or plan.pipeline_depth <= max_in_flight]


def recsys_costs(
    task_times: Mapping[str, float],
    *,
    peers: bool,
    device: torch.device,
    waits: Mapping[str, float] | None = None,
    sent: Mapping[str, Collective] | None = None,
) -> dict[str, TaskCost]:
    """Costs of the tasks from their times in serial order. The serial plan thus takes the sum of these times."""
    if not peers:
        waits, sent = {}, {}
    elif waits is None:
        waits = {
            waiter: task_times[waiter] for task, waiter in _WAITED_BY.items() if waiter != task and waiter in task_times
        }
    background: dict[str, float | Collective] = dict(sent or {})
    waited = dict(waits)
    if sent is None:
        background, waited = _estimate_message_times(task_times, waits)
    costs = {}
    for name, seconds in task_times.items():
        submitted = background.get(name, 0.0)
        costs[name] = TaskCost(
            max(0.0, seconds - waited.get(name, 0.0)),
            _DEVICE.get(name, "compute") if device.type == "cuda" else "compute",
            background=submitted,
            # Any other task, such as one that checks the loss on all ranks, waits for its own message.
            waited_by=_WAITED_BY.get(name, name) if submitted else None,
        )
    return costs


def _estimate_message_times(
    task_times: Mapping[str, float], waits: Mapping[str, float]
) -> tuple[dict[str, float | Collective], dict[str, float]]:
    """Time of each message on an otherwise idle network, by the task that submits it, and the time that each task
    waited for messages."""
    order = list(task_times)
    background: dict[str, float | Collective] = {}
    waited: dict[str, float] = {}
    shared: set[str] = set()
    for name, waiter in _WAITED_BY.items():
        wait = waits.get(waiter, 0.0)
        if name not in task_times or waiter not in task_times or not wait:
            continue
        between = order[order.index(name) + 1 : order.index(waiter)]
        # The message was on its way while these tasks ran. If they also sent messages, each had half of the network.
        meanwhile = sum(task_times[task] - waits.get(task, 0.0) / 2 for task in between)
        if wait <= _NOT_THERE * meanwhile:
            continue
        background[name] = wait + meanwhile
        waited[waiter] = wait
        shared.update(task for task in between if _WAITED_BY.get(task) == task)
    for task in shared & set(background):
        background[task] = waits[task] / 2
    return background, waited


def recsys_machine(device: torch.device, seconds_between_periods: float = 0.0) -> Machine:
    """Resources that the tasks of this process share with other ranks on the same machine."""
    if device.type == "cuda":
        return Machine(cores=1.0, device_streams=True, between_periods=seconds_between_periods)
    ranks = os.environ.get("LOCAL_WORLD_SIZE")  # set by torchrun; without it, all ranks are taken to be on this machine
    local_ranks = int(ranks) if ranks else dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return Machine(cores=max(1.0, (os.cpu_count() or 1) / local_ranks), between_periods=seconds_between_periods)


def recsys_variants(
    hand_written: Sequence[PipelinePlan],
    costs: Mapping[str, TaskCost],
    machine: Machine,
    *,
    max_in_flight: int,
    max_plans: int,
) -> list[PipelinePlan]:
    """Variants of *hand_written* with the shortest predicted iterations under a Trainer, best first."""
    trains = [task.name for task in TASKS if task.trains and task.name in costs]
    return propose_plan_variants(
        hand_written,
        costs,
        machine,
        movable=[name for name in costs if name not in trains],
        on_workers=_ON_WORKERS,
        # In a period, the hooks around the trained batch follow the transfer of a later batch and precede its training.
        submitted_before=[("H2DAndShuffle", name) for name in trains],
        max_in_flight=max_in_flight,
        max_variants=max_plans,
    )


def propose_plans(
    hand_written: Sequence[PipelinePlan],
    task_times: Mapping[str, float],
    seconds_between_periods: float,
    *,
    max_in_flight: int,
    peers: bool,
    device: torch.device,
    max_plans: int,
    cached: bool = False,
) -> list[PipelinePlan]:
    """Variants of *hand_written* for tasks that took *task_times* seconds serially.

    Between two periods are *seconds_between_periods*.
    If tables have a cache on the GPU (*cached*), only plans that suit it are returned.
    """
    costs = recsys_costs(task_times, peers=peers, device=device)
    machine = recsys_machine(device, seconds_between_periods)
    known = [plan for plan in hand_written if set(plan.tasks) <= set(costs)]  # not of lookups in two parts
    variants = recsys_variants(known, costs, machine, max_in_flight=max_in_flight, max_plans=max_plans)
    return [plan for plan in variants if not cached or plan_supports_cached_tables(plan)]
