"""Conversion between plan data and YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from lightning_pipe.engine.common.checked_yaml import check_keys, load_mapping
from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import shown
from lightning_pipe.engine.plans.schedule import TaskSchedule

_PLAN_KEYS = ("name", "pipeline_depth", "tasks", "order", "deps", "cross_iter_deps", "stale")
_DEFAULTS = vars(TaskSchedule())


def write_content(values: Mapping[str, Any]) -> str:
    """Convert the values of a :class:`~lightning_pipe.engine.PlanSpec` to YAML; inverse of :func:`read_content`."""
    content = {key: values["schedule" if key == "tasks" else key] for key in _PLAN_KEYS}
    content = {key: value for key, value in content.items() if value not in (None, ())}
    content["tasks"] = {
        task: {key: value for key, value in vars(where).items() if value != _DEFAULTS[key]}
        for task, where in content["tasks"].items()
    }
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110))


def read_content(text: str) -> dict[str, Any]:
    """Read the arguments of a :class:`~lightning_pipe.engine.PlanSpec` from YAML *text*. Values are not checked."""
    content = load_mapping(text, "plan", _PLAN_KEYS, compare="'lightning-pipe plan show NAME'")
    tasks, name = content.pop("tasks", None), content.pop("name", None)
    if not isinstance(tasks, dict):
        raise PlanError(f"the plan's 'tasks' must map each task to its schedule; found {shown(tasks)}")
    return {
        "name": "plan" if name is None else str(name),
        "schedule": {task: _schedule(task, {} if options is None else options) for task, options in tasks.items()},
        **{key: value for key, value in content.items() if value is not None},
    }


def _schedule(task: object, options: object) -> TaskSchedule:
    what = f"task {shown(task)} of the plan"
    if not isinstance(options, dict):
        raise PlanError(f"{what} has {shown(options)}; write a mapping of {', '.join(_DEFAULTS)}")
    check_keys(what, options, tuple(_DEFAULTS))
    return TaskSchedule(**options)
