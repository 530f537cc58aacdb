"""The tasks of a sharded recommender's training iteration, in the form that plans expect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

from lightning_pipe.engine import IterContext, PipelineTask, PlanError
from lightning_pipe.recsys.tasks.actions import RecsysActions
from lightning_pipe.recsys.tasks.context import RecsysContext
from lightning_pipe.recsys.tasks.declarations import TASKS, RecsysTask


def recsys_tasks(
    actions: RecsysActions | None = None,
    *,
    scaled_late: bool = False,
    balanced: bool = False,
    replicated: bool = False,
    divided: bool = False,
    extra: Mapping[str, RecsysTask] | None = None,
) -> list[PipelineTask]:
    """Return the eleven tasks in serial order.

    ``BalanceStart`` and ``BalanceFinish`` are added if the actions have a balancer, ``SyncReplicas`` if they have
    replicas of tables.

    Args:
        actions: actions of the tasks; None (default) for declarations, which suffice to build, check and show a plan.
        balanced: without actions, True to include the tasks of a balancer (default False).
        replicated: without actions, True to include the average of table replicas (default False).
        divided: True to include the tasks of plans that look up batches in two parts (default False).
        scaled_late: True if the gradients of the embeddings are scaled (clipping by a global norm) or skipped (loss
            scaling) in the optimizer step; ``EmbBackward`` then follows it (default False).
        extra: additional tasks (default none), each by the name of the task that it follows in serial order.

    Raises:
        PlanError: an extra task follows a task that does not exist, or has the name of another task.
    """
    if actions is not None:
        balanced, replicated = actions.balancer is not None, actions.replicas is not None
    features = {None: True, "balancer": balanced, "replicas": replicated, "division": divided}
    declared = [task for task in TASKS if features[task.needs]]
    if scaled_late:
        declared.sort(key=lambda task: task.late is not None and task.late.after_step)
    declared = _insert_extra_tasks(declared, extra or {})
    return [_build_pipeline_task(task, actions, scaled_late) for task in declared]


def _insert_extra_tasks(declared: Iterable[RecsysTask], extra: Mapping[str, RecsysTask]) -> list[RecsysTask]:
    declared, ordered = list(declared), []
    all_names = [task.name for task in (*declared, *extra.values())]
    if twice := sorted({name for name in all_names if all_names.count(name) > 1}):
        raise PlanError(f"extra tasks have the names of other tasks: {', '.join(twice)}. Give each task a unique name.")
    for task in declared:
        ordered.append(task)
        while (following := extra.get(ordered[-1].name)) is not None:
            ordered.append(following)
    names = [task.name for task in ordered]
    if unknown := sorted(set(extra) - set(names)):
        raise PlanError(
            f"extra tasks must follow one of {', '.join(names)}, got {', '.join(unknown)}. Correct the keys of extra."
        )
    return ordered


def _build_pipeline_task(declared: RecsysTask, actions: RecsysActions | None, scaled_late: bool) -> PipelineTask:
    reads, writes = declared.reads, declared.writes
    both: dict[str, Any] = {
        "collectives": declared.collectives,
        "context": RecsysContext,
        "not_replayable": declared.not_replayable,
    }
    if scaled_late and declared.late is not None:
        reads = (*reads, *declared.late.reads)
        writes = writes if declared.late.writes is None else declared.late.writes
    if actions is None:
        return PipelineTask(declared.name, _TaskWithoutModel(declared.name), reads=reads, writes=writes, **both)
    if declared.model_reads is not None:
        reads = (*reads, *declared.model_reads(actions))
    io = () if declared.replay is None else declared.replay(actions.replays)
    run = MethodType(declared.action, actions)
    return PipelineTask(declared.name, run, io, reads=reads, writes=writes, **both)


class _TaskWithoutModel:
    """Function of a task without a model. It can be pickled, as strategies are for spawned processes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, ctx: IterContext) -> None:
        raise LookupError(f"task {self._name!r} has no model to run on. Pass the actions of a model to recsys_tasks().")
