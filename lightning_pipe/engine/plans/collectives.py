"""Order in which the tasks of several threads submit collectives.

Collectives of one process group must be submitted in the same order on every rank, which two threads do not guarantee.
Tasks with ``globally_ordered`` submit theirs in the plan's order. On a device with streams the order also holds across
process groups: the kernels of two NCCL communicators may wait for each other if ranks launch them in different orders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.schedule import TaskSchedule
from lightning_pipe.engine.plans.task import PipelineTask


def check_collective_order(
    plan: str, tasks: Collection[PipelineTask], schedule: Mapping[str, TaskSchedule], *, has_streams: bool
) -> None:
    """Refuse a plan whose collectives could be submitted in different orders on two ranks."""
    groups = dict.fromkeys(group for task in tasks for group in task.collectives)
    shared = [tuple(groups)] if has_streams else [(group,) for group in groups]
    for names in shared:
        users = [task.name for task in tasks if not set(names).isdisjoint(task.collectives)]
        threads = dict.fromkeys(schedule[user].thread_group for user in users)
        unordered = [user for user in users if not schedule[user].globally_ordered]
        if len(threads) > 1 and unordered:
            target = f"the process group {names[0]!r}" if len(names) == 1 else f"the process groups {', '.join(names)}"
            raise PlanError(
                f"plan {plan!r}: {', '.join(users)} submit collectives to {target} from the thread groups"
                f" {', '.join(threads)}, whose order may differ between ranks. Set globally_ordered of"
                f" {', '.join(unordered)} to true, or run these tasks in one thread group."
            )


def assign_sequencers(
    tasks: Collection[PipelineTask], schedule: Mapping[str, TaskSchedule], *, has_streams: bool
) -> dict[str, int]:
    """Number of the sequence in which each task takes turns; tasks that need no turn are left out."""
    ordered = [task for task in tasks if schedule[task.name].globally_ordered]
    sequences: list[list[PipelineTask]] = []
    for task in ordered:
        joined = [task]
        for sequence in [sequence for sequence in sequences if has_streams or _shares_process_group(task, sequence)]:
            sequences.remove(sequence)
            joined += sequence
        sequences.append(joined)
    several = [sequence for sequence in sequences if len({schedule[task.name].thread_group for task in sequence}) > 1]
    return {task.name: number for number, sequence in enumerate(several) for task in sequence}


def _shares_process_group(task: PipelineTask, members: Collection[PipelineTask]) -> bool:
    return any(
        not task.collectives or not member.collectives or set(task.collectives) & set(member.collectives)
        for member in members
    )
