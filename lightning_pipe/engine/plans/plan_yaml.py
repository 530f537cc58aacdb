"""Plans as YAML, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from lightning_pipe.engine.plans.checked_yaml import check_keys, load_mapping
from lightning_pipe.engine.plans.dependencies import Dependency
from lightning_pipe.engine.plans.errors import PlanError
from lightning_pipe.engine.plans.shown import shown
from lightning_pipe.engine.plans.task import PipelineTask
from lightning_pipe.engine.plans.view import PlanView

_PLAN_KEYS = ("name", "pipeline_depth", "tasks", "order", "deps", "cross_iter_deps", "stale")
_TASK_KEYS = ("stage", "stream", "thread_group", "globally_ordered")


def dump_plan(plan: PlanView) -> str:
    """YAML text that ``PipelinePlan.from_yaml`` turns into an equal plan, given the same tasks."""
    return str(yaml.safe_dump(plan_content(plan), sort_keys=False, default_flow_style=None, width=110))


def plan_content(plan: PlanView) -> dict[str, Any]:
    """The plan in plain types, from which ``PipelinePlan.from_content`` makes an equal one."""
    tasks = {
        task: {key: getattr(where, key) for key in _TASK_KEYS if getattr(where, key) != getattr(type(where)(), key)}
        for task, where in plan.schedule.items()
    }
    content: dict[str, Any] = {
        "name": plan.name,
        "pipeline_depth": plan.pipeline_depth,
        "tasks": tasks,
        "order": list(plan.order),
    }
    for key, dependencies in (("deps", plan.deps), ("cross_iter_deps", plan.cross_iter_deps), ("stale", plan.stale)):
        if dependencies:
            content[key] = [_entry(dependency, key) for dependency in dependencies]
    return content


def _entry(dependency: Dependency, key: str) -> list[str | int]:
    pair: list[str | int] = [dependency.upstream, dependency.downstream]
    return pair if key == "deps" else [*pair, dependency.distance]


def read_content(text: str) -> dict[str, Any]:
    """What YAML *text* says of a plan, by key; ``tasks`` is a mapping, all else is unchecked.

    Raises:
        PlanError: not YAML, unknown or repeated keys, no mapping of tasks.
    """
    content = load_mapping(text, "plan", _PLAN_KEYS, compare="'lightning-pipe plan show NAME'")
    if not isinstance(content.get("tasks"), dict):
        raise PlanError(f"the plan's 'tasks' map each task to its schedule; found {shown(content.get('tasks'))}")
    return content


def arguments_of(
    content: Mapping[str, Any], tasks: Iterable[PipelineTask]
) -> tuple[list[tuple[PipelineTask, dict[str, Any]]], dict[str, Any]]:
    """What a plan is made from.

    Args:
        content: as :func:`read_content` returns it.
        tasks: in serial order.

    Returns:
        Each task with the arguments of its schedule, and the plan's other arguments.

    Raises:
        PlanError: tasks that are unknown or left out, or an unknown key of a task.
    """
    known = {task.name: task for task in tasks}
    schedules = content["tasks"]
    unknown = [task for task in schedules if task not in known]
    if unknown:
        raise PlanError(f"the plan schedules the unknown task {shown(unknown[0])}; the tasks are {', '.join(known)}")
    missing = [task for task in known if task not in schedules]
    if missing:
        raise PlanError(f"the plan leaves out {', '.join(missing)}; schedule every task, {{}} gives it the defaults")
    pairs = []
    for name, task in known.items():
        options = {} if schedules[name] is None else schedules[name]
        if not isinstance(options, dict):
            raise PlanError(
                f"task {name!r} of the plan has {shown(options)}; write a mapping of {', '.join(_TASK_KEYS)}"
            )
        check_keys(f"task {name!r} of the plan", options, _TASK_KEYS)
        pairs.append((task, options))
    return pairs, {
        **{key: _entries(content, key) for key in ("deps", "cross_iter_deps", "stale", "order")},
        "pipeline_depth": content.get("pipeline_depth"),
        "name": "plan" if content.get("name") is None else str(content["name"]),
    }


def _entries(content: Mapping[str, Any], key: str) -> Any:
    """What *key* has, for the plan to check; a key without a value has nothing."""
    found = content.get(key)
    return () if found is None else found
