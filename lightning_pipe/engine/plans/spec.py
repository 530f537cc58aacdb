"""Plan as plain data: the schedule of its tasks by name, and functions to edit it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from lightning_pipe.engine.common.checked_yaml import check_keys, load_mapping
from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import shown
from lightning_pipe.engine.plans.schedule import MAIN, TaskSchedule
from lightning_pipe.engine.plans.task import PipelineTask

Edge = tuple[str, str] | tuple[str, str, int]

_PLAN_KEYS = ("name", "pipeline_depth", "tasks", "order", "deps", "cross_iter_deps", "stale")
_DEFAULTS = vars(TaskSchedule())

# Far more batches than any memory holds: a typing error such as 200000 would fill it.
_HIGHEST_STAGE = 1000


@dataclass(frozen=True)
class PlanSpec:
    """Immutable plan data without task functions.

    Editing methods return a new spec. ``PipelinePlan.from_spec`` combines a spec with tasks, and the attribute ``spec``
    of a :class:`~lightning_pipe.engine.PipelinePlan` is its data. Types, shapes and ranges of values are checked here;
    dependencies are checked by :class:`~lightning_pipe.engine.PipelinePlan`.

    Args:
        name: name of the plan in logs, tables and errors.
        schedule: :class:`TaskSchedule` of each task, by task name.
        order: task names in the order in which one period submits them (default empty: derived from the dependencies
            when the plan is combined with tasks). An empty order stays empty in edits.
        deps: see :class:`~lightning_pipe.engine.PipelinePlan`, also for *cross_iter_deps*, *stale* and
            *pipeline_depth*.

    Raises:
        PlanError: a value has a wrong type, shape or range.
    """

    name: str
    schedule: Mapping[str, TaskSchedule]
    order: tuple[str, ...] = ()
    deps: tuple[Edge, ...] = ()
    cross_iter_deps: tuple[Edge, ...] = ()
    stale: tuple[Edge, ...] = ()
    pipeline_depth: int | None = None

    def __post_init__(self) -> None:
        _check_name("the name", self.name)
        for task, where in self.schedule.items():
            _check_schedule(f"plan {self.name!r}", task, where)
        if self.pipeline_depth is not None and not _is_count(self.pipeline_depth, _HIGHEST_STAGE + 1):
            raise PlanError(
                f"plan {self.name!r} has pipeline_depth {shown(self.pipeline_depth)}; expected a whole number of"
                f" batches in flight, at most {_HIGHEST_STAGE + 1}"
            )
        self._replace("order", self._task_name)
        self._replace("deps", self._edge)
        self._replace("cross_iter_deps", self._edge)
        self._replace("stale", self._edge)

    @classmethod
    def from_yaml(cls, text: str) -> PlanSpec:
        """Read a plan from YAML text.

        Raises:
            PlanError: the text is not YAML, has an unknown or repeated key, or a value of a wrong type, shape or range.
        """
        return cls(**_read(text))

    def to_yaml(self) -> str:
        """Convert the plan to YAML; inverse of :meth:`from_yaml`."""
        return _written(vars(self))

    @property
    def max_stage(self) -> int:
        """Highest stage of all tasks; 0 without tasks."""
        return max((where.stage for where in self.schedule.values()), default=0)

    @property
    def thread_groups(self) -> tuple[str, ...]:
        """Thread groups of the plan, ``"main"`` first, then workers in program order."""
        return tuple(dict.fromkeys((MAIN, *(where.thread_group for where in self.schedule.values()))))

    def position(self, name: str) -> int:
        """Index of a task in the order.

        Raises:
            PlanError: the order does not name the task.
        """
        if name not in self.order:
            raise PlanError(f"plan {self.name!r}: order must name each task once; missing: {name}")
        return self.order.index(name)

    def insert(
        self, name: str, where: TaskSchedule, *, after: str | None = None, before: str | None = None
    ) -> PlanSpec:
        """Add a task, by default at the end of the order.

        Args:
            name: name of the new task.
            where: schedule of the new task.
            after: task that the new one directly follows in the order (default None).
            before: task that the new one directly precedes in the order (default None).

        Raises:
            PlanError: the order does not name *after* or *before*.
        """
        added = replace(self, schedule={**self.schedule, name: where})
        return added._placed(name, after, before) if self.order else added

    def move(self, name: str, *, after: str | None = None) -> PlanSpec:
        """Move a task directly after another one, or to the end of the order.

        Args:
            name: task to move.
            after: task that it then directly follows; None (default) for the end of the order.

        Raises:
            PlanError: the order does not name *name* or *after*.
        """
        place = self.position(name)
        return replace(self, order=(*self.order[:place], *self.order[place + 1 :]))._placed(name, after)

    def _placed(self, name: str, after: str | None, before: str | None = None) -> PlanSpec:
        place = self.position(after) + 1 if after else self.position(before) if before else len(self.order)
        return replace(self, order=(*self.order[:place], name, *self.order[place:]))

    def without(self, names: Collection[str]) -> PlanSpec:
        """Remove tasks, and all edges and entries of ``stale`` that name them. Unknown names are ignored."""
        return self._with(lambda *tasks: not any(task in names for task in tasks))

    def only(self, names: Collection[str]) -> PlanSpec:
        """Keep the tasks in *names*. Remove all others, with the edges and entries of ``stale`` that name them."""
        return self._with(lambda *tasks: all(task in names for task in tasks))

    def _with(self, keeps: Callable[..., bool]) -> PlanSpec:
        deps, cross_iter_deps, stale = (
            tuple(edge for edge in edges if keeps(*edge[:2])) for edges in (self.deps, self.cross_iter_deps, self.stale)
        )
        schedule = {name: where for name, where in self.schedule.items() if keeps(name)}
        order = tuple(name for name in self.order if keeps(name))
        return PlanSpec(self.name, schedule, order, deps, cross_iter_deps, stale, self.pipeline_depth)

    # ------------------------------------------------------------------ checks

    def _replace(self, what: str, checked: Callable[[str, Any], Any]) -> None:
        """Replace entries given by the user with checked ones."""
        entries = getattr(self, what)
        if isinstance(entries, (str, Mapping)) or not isinstance(entries, Iterable):
            raise PlanError(f"plan {self.name!r}: {what} is {shown(entries)}; write a list")
        object.__setattr__(self, what, tuple(checked(what, entry) for entry in entries))

    def _task_name(self, what: str, entry: Any) -> str:
        name = entry.name if isinstance(entry, PipelineTask) else entry
        if not isinstance(name, str):
            raise PlanError(
                f"plan {self.name!r}: {what} names the unknown task {shown(name)}; write the name of a task"
            )
        return name

    def _edge(self, what: str, entry: Any) -> Edge:
        longest = 2 if what == "deps" else 3
        if not isinstance(entry, (tuple, list)) or not 2 <= len(entry) <= longest:
            raise PlanError(
                f"plan {self.name!r}: {what} has the entry {shown(entry)}; write (upstream, downstream)"
                + (" or (upstream, downstream, distance)" if longest == 3 else "")
            )
        upstream, downstream = (self._task_name(what, one) for one in entry[:2])
        if len(entry) == 2:
            return (upstream, downstream)
        if not entry[2] or not _is_count(entry[2], _HIGHEST_STAGE):
            raise PlanError(
                f"plan {self.name!r}: {what} has distance {shown(entry[2])} in {shown(entry)}; expected a number of"
                f" iterations from 1 to {_HIGHEST_STAGE}"
            )
        return (upstream, downstream, entry[2])


def _check_schedule(plan: str, task: Any, where: TaskSchedule) -> None:
    _check_name(f"{plan}: a task", task)
    if not _is_count(where.stage, _HIGHEST_STAGE):
        raise PlanError(
            f"{plan}: task {task!r} has stage {shown(where.stage)}; stages are whole numbers from 0 to"
            f" {_HIGHEST_STAGE}, and each stage keeps one more batch in memory"
        )
    _check_name(f"{plan}: task {task!r} has thread_group", where.thread_group)
    if where.stream is not None:
        _check_name(f"{plan}: task {task!r} has stream", where.stream)
    if not isinstance(where.globally_ordered, bool):
        raise PlanError(
            f"{plan}: task {task!r} has globally_ordered {shown(where.globally_ordered)}; expected true or false"
        )


def _check_name(what: str, name: object) -> None:
    """Refuse a name that cannot be printed safely in tables, errors, traces and reports."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise PlanError(f"{what} {shown(name)} of a plan is invalid; expected text without control characters")


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


# ---------------------------------------------------------------------- YAML


def _written(values: Mapping[str, Any]) -> str:
    """Convert the values of a :class:`~lightning_pipe.engine.PlanSpec` to YAML; inverse of :func:`_read`."""
    content = {key: values["schedule" if key == "tasks" else key] for key in _PLAN_KEYS}
    content = {key: value for key, value in content.items() if value not in (None, ())}
    content["tasks"] = {
        task: {key: value for key, value in vars(where).items() if value != _DEFAULTS[key]}
        for task, where in content["tasks"].items()
    }
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110))


def _read(text: str) -> dict[str, Any]:
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
