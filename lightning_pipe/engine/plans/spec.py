"""Plan as plain data: the schedule of its tasks by name, and functions to edit it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import short_repr
from lightning_pipe.engine.common.strict_yaml import check_mapping_keys, load_mapping
from lightning_pipe.engine.plans.schedule import MAIN, TaskSchedule
from lightning_pipe.engine.plans.task import PipelineTask

Edge = tuple[str, str] | tuple[str, str, int]

_PLAN_KEYS = ("name", "pipeline_depth", "tasks", "order", "deps", "cross_iter_deps", "stale")
_DEFAULTS = vars(TaskSchedule())

# Far more batches than any memory holds: a typing error such as 200000 would fill it.
_HIGHEST_STAGE = 1000
_NAME = "text without control characters"


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
        _expect(_is_name(self.name), "a plan has the name", self.name, _NAME)
        plan = f"plan {self.name!r}"
        for task, where in self.schedule.items():
            _expect(_is_name(task), f"{plan} has the task", task, _NAME)
            has = f"{plan}: task {task!r} has"
            stages = f"a whole number from 0 to {_HIGHEST_STAGE}; each stage keeps one more batch in memory"
            _expect(_is_count(where.stage, _HIGHEST_STAGE), f"{has} stage", where.stage, stages)
            _expect(_is_name(where.thread_group), f"{has} thread_group", where.thread_group, _NAME)
            _expect(where.stream is None or _is_name(where.stream), f"{has} stream", where.stream, _NAME)
            ordered = where.globally_ordered
            _expect(isinstance(ordered, bool), f"{has} globally_ordered", ordered, "true or false")
        depth, most = self.pipeline_depth, _HIGHEST_STAGE + 1
        batches = f"a whole number of batches in flight, at most {most}"
        _expect(depth is None or _is_count(depth, most), f"{plan} has pipeline_depth", depth, batches)
        self._check_entries("order", self._task_name)
        self._check_entries("deps", self._parse_edge)
        self._check_entries("cross_iter_deps", self._parse_edge)
        self._check_entries("stale", self._parse_edge)

    @classmethod
    def from_yaml(cls, text: str) -> PlanSpec:
        """Read a plan from YAML text.

        Raises:
            PlanError: the text is not YAML, has an unknown or repeated key, or a value of a wrong type, shape or range.
        """
        return cls(**_load_spec_yaml(text))

    def to_yaml(self) -> str:
        """Convert the plan to YAML; inverse of :meth:`from_yaml`."""
        return _dump_spec_yaml(vars(self))

    @property
    def max_stage(self) -> int:
        """Highest stage of all tasks; 0 without tasks."""
        return max((where.stage for where in self.schedule.values()), default=0)

    @property
    def thread_group_names(self) -> tuple[str, ...]:
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
        self, name: str, task_schedule: TaskSchedule, *, after: str | None = None, before: str | None = None
    ) -> PlanSpec:
        """Add a task, by default at the end of the order.

        Args:
            name: name of the new task.
            task_schedule: schedule of the new task.
            after: task that the new one directly follows in the order (default None).
            before: task that the new one directly precedes in the order (default None).

        Raises:
            PlanError: the order does not name *after* or *before*.
        """
        added = replace(self, schedule={**self.schedule, name: task_schedule})
        return added._insert_into_order(name, after, before) if self.order else added

    def move(self, name: str, *, after: str | None = None) -> PlanSpec:
        """Move a task directly after another one, or to the end of the order.

        Args:
            name: task to move.
            after: task that it then directly follows; None (default) for the end of the order.

        Raises:
            PlanError: the order does not name *name* or *after*.
        """
        place = self.position(name)
        return replace(self, order=(*self.order[:place], *self.order[place + 1 :]))._insert_into_order(name, after)

    def _insert_into_order(self, name: str, after: str | None, before: str | None = None) -> PlanSpec:
        place = self.position(after) + 1 if after else self.position(before) if before else len(self.order)
        return replace(self, order=(*self.order[:place], name, *self.order[place:]))

    def without(self, names: Collection[str]) -> PlanSpec:
        """Remove tasks, and all edges and entries of ``stale`` that name them. Unknown names are ignored."""
        return self._filter_tasks(lambda *tasks: not any(task in names for task in tasks))

    def only(self, names: Collection[str]) -> PlanSpec:
        """Keep the tasks in *names*. Remove all others, with the edges and entries of ``stale`` that name them."""
        return self._filter_tasks(lambda *tasks: all(task in names for task in tasks))

    def _filter_tasks(self, keeps: Callable[..., bool]) -> PlanSpec:
        deps, cross_iter_deps, stale = (
            tuple(edge for edge in edges if keeps(*edge[:2])) for edges in (self.deps, self.cross_iter_deps, self.stale)
        )
        schedule = {name: where for name, where in self.schedule.items() if keeps(name)}
        order = tuple(name for name in self.order if keeps(name))
        return PlanSpec(self.name, schedule, order, deps, cross_iter_deps, stale, self.pipeline_depth)

    # ------------------------------------------------------------------ checks

    def _check_entries(self, field: str, checked: Callable[[str, Any], Any]) -> None:
        """Replace entries given by the user with checked ones."""
        entries = getattr(self, field)
        is_list = isinstance(entries, Iterable) and not isinstance(entries, str | Mapping)
        _expect(is_list, f"plan {self.name!r}: {field} is", entries, "a list")
        object.__setattr__(self, field, tuple(checked(field, entry) for entry in entries))

    def _task_name(self, field: str, entry: Any) -> str:
        name = entry.name if isinstance(entry, PipelineTask) else entry
        _expect(isinstance(name, str), f"plan {self.name!r}: {field} has the task", name, "the name of a task")
        return str(name)

    def _parse_edge(self, field: str, entry: Any) -> Edge:
        form = "(upstream, downstream)"
        if field != "deps":
            form += f" or (upstream, downstream, distance) with a distance from 1 to {_HIGHEST_STAGE}"
        is_edge = isinstance(entry, tuple | list) and 2 <= len(entry) <= (2 if field == "deps" else 3)
        is_edge = is_edge and all(_is_count(distance, _HIGHEST_STAGE) and distance for distance in entry[2:])
        _expect(is_edge, f"plan {self.name!r}: {field} has the entry", entry, form)
        return (self._task_name(field, entry[0]), self._task_name(field, entry[1]), *entry[2:])


def _expect(valid: bool, subject: str, value: object, expected: str) -> None:
    if not valid:
        raise PlanError(f"{subject} {short_repr(value)}; expected {expected}")


def _is_name(value: object) -> bool:
    """Return True for a name that can be printed safely in tables, errors, traces and reports."""
    return isinstance(value, str) and bool(value) and value.isprintable()


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


# ---------------------------------------------------------------------- YAML


def _dump_spec_yaml(values: Mapping[str, Any]) -> str:
    """Convert the values of a :class:`~lightning_pipe.engine.PlanSpec` to YAML; inverse of :func:`_read`."""
    content = {key: values["schedule" if key == "tasks" else key] for key in _PLAN_KEYS}
    content = {key: value for key, value in content.items() if value not in (None, ())}
    content["tasks"] = {
        task: {key: value for key, value in vars(where).items() if value != _DEFAULTS[key]}
        for task, where in content["tasks"].items()
    }
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110))


def _load_spec_yaml(text: str) -> dict[str, Any]:
    """Read the arguments of a :class:`~lightning_pipe.engine.PlanSpec` from YAML *text*. Values are not checked."""
    content = load_mapping(text, "plan", _PLAN_KEYS, compare="'lightning-pipe plan show NAME'")
    tasks, name = content.pop("tasks", None), content.pop("name", None)
    _expect(isinstance(tasks, dict), "the plan has the tasks", tasks, "a mapping from each task to its schedule")
    return {
        "name": "plan" if name is None else str(name),
        "schedule": {
            task: _parse_task_schedule(task, {} if options is None else options) for task, options in tasks.items()
        },
        **{key: value for key, value in content.items() if value is not None},
    }


def _parse_task_schedule(task: object, options: object) -> TaskSchedule:
    return TaskSchedule(**check_mapping_keys(f"task {short_repr(task)} of the plan", options, tuple(_DEFAULTS)))
