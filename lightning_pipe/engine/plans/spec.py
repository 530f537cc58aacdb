"""A plan as plain data: the names of its tasks, and where and in which order they run. Plans are edited here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import shown
from lightning_pipe.engine.plans.plan_yaml import read_content, write_content
from lightning_pipe.engine.plans.schedule import MAIN, TaskSchedule
from lightning_pipe.engine.plans.task import PipelineTask

Edge = tuple[str, str] | tuple[str, str, int]

# Far above what any memory holds; a slip such as 200000 would take half a minute to check.
_HIGHEST_STAGE = 1000
_DEEPEST = _HIGHEST_STAGE + 1
# Each is followed through everything that the tasks declare. The plans of this project give up three at most.
_MOST_STALE = 32


@dataclass(frozen=True)
class PlanSpec:
    """A plan as plain data: an edit returns a new one, and ``PipelinePlan.from_spec`` gives it tasks.

    The data of a :class:`~lightning_pipe.engine.PipelinePlan` is its attribute ``spec``. Types, shapes and ranges of
    the values are checked here; whether tasks and their dependencies allow the plan is checked with its tasks.

    Args:
        name: what logs, tables and errors call it.
        schedule: each task's :class:`TaskSchedule`, by name.
        order: the tasks in the order in which one period submits them. An empty order is derived from the dependencies
            when the plan is given its tasks, and stays empty in edits.
        deps: as :class:`~lightning_pipe.engine.PipelinePlan` takes them, and so the others.
        cross_iter_deps: see there.
        stale: see there.
        pipeline_depth: see there.

    Raises:
        PlanError: a value of a wrong type, shape or range.
    """

    name: str
    schedule: Mapping[str, TaskSchedule]
    order: tuple[str, ...] = ()
    deps: tuple[Edge, ...] = ()
    cross_iter_deps: tuple[Edge, ...] = ()
    stale: tuple[Edge, ...] = ()
    pipeline_depth: int | None = None

    def __post_init__(self) -> None:
        self._check_name("", "name", self.name)
        for task, where in self.schedule.items():
            self._check_schedule(task, where)
        if self.pipeline_depth is not None and not _is_count(self.pipeline_depth, _DEEPEST):
            raise PlanError(
                f"plan {self.name!r} has pipeline_depth {shown(self.pipeline_depth)}; it counts batches in memory, a"
                f" whole number up to {_DEEPEST}"
            )
        self._replace("order", self._task_name)
        self._replace("deps", self._edge)
        self._replace("cross_iter_deps", self._edge)
        self._replace("stale", self._edge)
        if len(self.stale) > _MOST_STALE:
            raise PlanError(
                f"plan {self.name!r} has {len(self.stale)} entries in stale; expected at most {_MOST_STALE}"
            )

    @classmethod
    def from_yaml(cls, text: str) -> PlanSpec:
        """Read a plan from YAML text.

        Raises:
            PlanError: not YAML, an unknown or repeated key, or a value of a wrong type, shape or range.
        """
        return cls(**read_content(text))

    def to_yaml(self) -> str:
        """The plan as YAML; :meth:`from_yaml` reads it back."""
        return write_content(vars(self))

    @property
    def max_stage(self) -> int:
        """The highest stage of its tasks; 0 without tasks."""
        return max((where.stage for where in self.schedule.values()), default=0)

    @property
    def thread_groups(self) -> tuple[str, ...]:
        """Its thread groups, ``"main"`` first, then workers in program order."""
        return tuple(dict.fromkeys((MAIN, *(where.thread_group for where in self.schedule.values()))))

    def position(self, name: str) -> int:
        """The index of a task in the order.

        Raises:
            PlanError: the order does not name the task.
        """
        if name not in self.order:
            raise PlanError(f"plan {self.name!r}: order must name each task once; missing: {name}")
        return self.order.index(name)

    def insert(
        self, name: str, where: TaskSchedule, *, after: str | None = None, before: str | None = None
    ) -> PlanSpec:
        """Add a task, at the end of the order unless it is given a place.

        Args:
            name: of the task.
            where: its schedule.
            after: the task that it directly follows in the order.
            before: the task that it directly precedes in the order.

        Raises:
            PlanError: the order does not name that task.
        """
        added = replace(self, schedule={**self.schedule, name: where})
        return added._placed(name, after, before) if self.order else added

    def move(self, name: str, *, after: str | None = None) -> PlanSpec:
        """Move a task to the place directly after another one, or to the end of the order.

        Raises:
            PlanError: the order does not name one of the two.
        """
        place = self.position(name)
        return replace(self, order=(*self.order[:place], *self.order[place + 1 :]))._placed(name, after)

    def _placed(self, name: str, after: str | None, before: str | None = None) -> PlanSpec:
        place = self.position(after) + 1 if after else self.position(before) if before else len(self.order)
        return replace(self, order=(*self.order[:place], name, *self.order[place:]))

    def without(self, names: Collection[str]) -> PlanSpec:
        """Leave tasks out, and all edges and entries of ``stale`` that name them; unknown names are ignored."""
        return self._with(lambda *tasks: not any(task in names for task in tasks))

    def only(self, names: Collection[str]) -> PlanSpec:
        """Leave all other tasks out, and all edges and entries of ``stale`` that name them."""
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
        """Replace the entries that the user gave by checked ones."""
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
                f"plan {self.name!r}: {what} has distance {shown(entry[2])} in {shown(entry)}; it counts iterations,"
                f" from 1 to {_HIGHEST_STAGE}"
            )
        return (upstream, downstream, entry[2])

    def _check_schedule(self, task: Any, where: TaskSchedule) -> None:
        plan = f"plan {self.name!r}: "
        self._check_name(plan, "task", task)
        if not _is_count(where.stage, _HIGHEST_STAGE):
            raise PlanError(
                f"{plan}task {task!r} has stage {shown(where.stage)}; stages are whole numbers from 0 to"
                f" {_HIGHEST_STAGE}, each of which keeps one more batch in memory"
            )
        names = {"thread_group": where.thread_group} | ({} if where.stream is None else {"stream": where.stream})
        for what, name in names.items():
            if not isinstance(name, str) or not name:
                raise PlanError(f"{plan}task {task!r} has {what} {shown(name)}; give it a name")
            self._check_name(plan, f"{what} of task {task!r}", name)
        if not isinstance(where.globally_ordered, bool):
            raise PlanError(f"{plan}task {task!r} has globally_ordered {shown(where.globally_ordered)}; true or false")

    def _check_name(self, plan: str, what: str, name: object) -> None:
        """Names are printed: in tables, errors, traces and reports."""
        if not isinstance(name, str) or not name.isprintable():
            raise PlanError(
                f"{plan}{what} {shown(name)} of a plan; expected text without control characters, line ends and marks"
                " of direction"
            )


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
