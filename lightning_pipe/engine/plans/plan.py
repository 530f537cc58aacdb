"""When and where: a plan gives each task a stage, a stream and a thread group, and is checked when built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pipe.engine.plans.dependencies import Dependency, required_dependencies
from lightning_pipe.engine.plans.errors import PlanError
from lightning_pipe.engine.plans.order import check_order, derive_order, find_cycle
from lightning_pipe.engine.plans.plan_yaml import arguments_of, dump_plan, read_content
from lightning_pipe.engine.plans.render import plan_table, plan_timeline
from lightning_pipe.engine.plans.shown import shown
from lightning_pipe.engine.plans.task import PipelineTask

MAIN = "main"

# Far above what any memory holds; a slip such as 200000 would take half a minute to check.
_HIGHEST_STAGE = 1000
_DEEPEST = _HIGHEST_STAGE + 1
# Each is followed through everything that the tasks declare. The plans of this project give up three at most.
_MOST_STALE = 32


@dataclass(frozen=True)
class TaskSchedule:
    """Where one task runs.

    Args:
        stage: how many iterations ahead of the one being trained the task runs.
        stream: name of a device stream, ``None`` for the current one. Without a device that has streams, the name only
            labels the task.
        thread_group: ``"main"`` is the calling thread; every other name is one worker thread.
        globally_ordered: the task submits collectives whose order must be the same on every rank although other thread
            groups submit some too: its turn comes in the plan's order.
    """

    stage: int = 0
    stream: str | None = None
    thread_group: str = MAIN
    globally_ordered: bool = False


class PipelinePlan:
    """A complete, checked schedule of a set of tasks.

    Args:
        schedule: each task's :class:`TaskSchedule`, a mapping or pairs, in the order in which a *serial* iteration runs
            the tasks. That order gives reads and writes their meaning.
        deps: further dependencies inside an iteration, ``(upstream, downstream)``.
        cross_iter_deps: further dependencies across iterations, ``(upstream, downstream)`` for the next iteration or
            ``(upstream, downstream, distance)``.
        pipeline_depth: the most batches in flight at once; by default what the stages need (highest stage + 1).
        stale: required dependencies on outliving state that this plan gives up on purpose, ``(upstream, downstream)``
            or with distance. Each gives up that one distance: the same dependency over one iteration more, which bounds
            how stale a read can be, still holds. The plan's name must contain ``"stale"`` or ``"semi_sync"``.
        name: what logs, tables and errors call it.
        order: the order in which one period submits the tasks, each for its own iteration; by default an order that
            the dependencies allow, tasks of higher stages first.

    Raises:
        PlanError: unknown or repeated task, cycle, dependency on a task of a lower stage, a required dependency dropped
            without ``stale``, too small a depth, or an *order* that contradicts the dependencies.
    """

    def __init__(
        self,
        schedule: Mapping[PipelineTask, TaskSchedule] | Iterable[tuple[PipelineTask, TaskSchedule]],
        deps: Iterable[Sequence[Any]] = (),
        cross_iter_deps: Iterable[Sequence[Any]] = (),
        pipeline_depth: int | None = None,
        stale: Iterable[Sequence[Any]] = (),
        *,
        name: str = "plan",
        order: Iterable[str | PipelineTask] = (),
    ) -> None:
        _check_name("", "name", name)
        self.name = name
        pairs = schedule.items() if isinstance(schedule, Mapping) else schedule
        self.tasks: dict[str, PipelineTask] = {}
        self.schedule: dict[str, TaskSchedule] = {}
        for task, where in pairs:
            if task.name in self.tasks:
                raise PlanError(f"plan {name!r}: task {task.name!r} is scheduled twice; give each task one schedule")
            _check_schedule(name, task.name, where)
            self.tasks[task.name] = task
            self.schedule[task.name] = where
        if not self.tasks:
            raise PlanError(f"plan {name!r} has no tasks; schedule at least one")

        self.deps = tuple(self._dependency(entry, 0, "deps") for entry in _entries(name, "deps", deps))
        self.cross_iter_deps = tuple(
            self._dependency(entry, 1, "cross_iter_deps")
            for entry in _entries(name, "cross_iter_deps", cross_iter_deps)
        )
        self.required = required_dependencies(list(self.tasks.values()))
        self.stale: tuple[Dependency, ...] = ()
        given_up = _entries(name, "stale", stale)
        if len(given_up) > _MOST_STALE:
            raise PlanError(f"plan {name!r} has {len(given_up)} entries in stale; expected at most {_MOST_STALE}")
        for entry in given_up:
            self._give_up(entry)
        if self.stale and not any(word in name for word in ("stale", "semi_sync")):
            raise PlanError(
                f"plan {name!r} gives up {'; '.join(map(str, self.stale))}: a plan that trades exactness says so in its"
                " name; put 'stale' or 'semi_sync' into it"
            )
        self.dependencies: tuple[Dependency, ...] = tuple(
            dict.fromkeys((*self.required, *self.deps, *self.cross_iter_deps))
        )
        self._check_cycle()
        self._check_stages()
        self.max_stage = max(where.stage for where in self.schedule.values())
        self.pipeline_depth = self.max_stage + 1 if pipeline_depth is None else pipeline_depth
        if not _is_count(self.pipeline_depth) or self.pipeline_depth > _DEEPEST:
            raise PlanError(
                f"plan {name!r} has pipeline_depth {shown(pipeline_depth)}; it counts batches in memory, a whole number"
                f" up to {_DEEPEST}"
            )
        if self.pipeline_depth < self.max_stage + 1:
            raise PlanError(
                f"plan {name!r} has pipeline_depth {self.pipeline_depth}, but its stages 0 to {self.max_stage} need"
                f" {self.max_stage + 1} batches in flight; raise pipeline_depth or lower the highest stage"
            )
        same_period = [d for d in self.dependencies if self._periods_between(d) == 0]
        given = tuple(self._name(entry, "order") for entry in _entries(name, "order", order))
        stages = {task: where.stage for task, where in self.schedule.items()}
        if given:
            check_order(name, given, list(self.tasks), same_period)
        self.order = given or derive_order(list(self.tasks), stages, same_period)

    @property
    def thread_groups(self) -> tuple[str, ...]:
        """The plan's thread groups, ``"main"`` first, then workers in program order."""
        return tuple(dict.fromkeys((MAIN, *(where.thread_group for where in self.schedule.values()))))

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the device streams the plan uses, in program order."""
        return tuple(dict.fromkeys(where.stream for where in self.schedule.values() if where.stream is not None))

    def description(self) -> list[tuple[str, str]]:
        """The plan in ordered (name, text) entries: what ranks compare before the first period."""
        entries = [("name", self.name), ("pipeline_depth", str(self.pipeline_depth)), ("order", str(self.order))]
        for task, where in self.schedule.items():
            declared = self.tasks[task]
            reads, writes = (sorted(map(repr, entries)) for entries in (declared.reads, declared.writes))
            entries.append((f"task {task}", f"{where} reads {reads} writes {writes}"))
        entries.append(("dependencies", "; ".join(sorted(map(str, self.dependencies)))))
        return entries

    def to_yaml(self) -> str:
        """The plan as YAML; :meth:`from_yaml` reads it back."""
        return dump_plan(self)

    @classmethod
    def from_yaml(cls, text: str, tasks: Iterable[PipelineTask]) -> PipelinePlan:
        """Build a plan for *tasks* (in serial order) from YAML text.

        Raises:
            PlanError: unknown or repeated key or task, a missing task, or whatever the constructor refuses.
        """
        return cls.from_content(read_content(text), tasks)

    @classmethod
    def from_content(cls, content: Mapping[str, Any], tasks: Iterable[PipelineTask]) -> PipelinePlan:
        """Build a plan for *tasks* (in serial order) from what YAML says, in plain types.

        Args:
            content: by the keys of a plan's YAML; ``tasks`` is a mapping.
            tasks: in serial order.

        Raises:
            PlanError: unknown key or task, a missing task, or whatever the constructor refuses.
        """
        pairs, others = arguments_of(content, tasks)
        return cls([(task, TaskSchedule(**options)) for task, options in pairs], **others)

    def table(self) -> str:
        """The plan as a table of tasks: stage, stream, thread group, what each waits for."""
        return plan_table(self)

    def timeline(self, iterations: int = 4) -> str:
        """Which iteration each task runs for, period by period, from filling to draining."""
        return plan_timeline(self, iterations)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.timeline()}"

    def __repr__(self) -> str:
        return f"PipelinePlan({self.name!r}, tasks={len(self.tasks)}, pipeline_depth={self.pipeline_depth})"

    def _name(self, entry: Any, where: str) -> str:
        task = entry.name if isinstance(entry, PipelineTask) else entry
        if not isinstance(task, str) or task not in self.tasks:
            raise PlanError(
                f"plan {self.name!r}: {where} names the unknown task {shown(task)}; its tasks are"
                f" {', '.join(self.tasks)}"
            )
        return task

    def _dependency(self, entry: Any, distance: int, where: str) -> Dependency:
        upstream, downstream, *given = self._pair(entry, where, with_distance=distance > 0)
        return Dependency(upstream, downstream, given[0] if given else distance, f"said in {where}")

    def _pair(self, entry: Any, where: str, with_distance: bool) -> tuple[Any, ...]:
        if not isinstance(entry, (tuple, list)) or len(entry) not in ((2, 3) if with_distance else (2,)):
            raise PlanError(
                f"plan {self.name!r}: {where} has the entry {shown(entry)}; write (upstream, downstream)"
                + (" or (upstream, downstream, distance)" if with_distance else "")
            )
        for distance in entry[2:]:
            if not _is_count(distance) or not 1 <= distance <= _HIGHEST_STAGE:
                raise PlanError(
                    f"plan {self.name!r}: {where} has distance {shown(distance)} in {shown(entry)}; it counts"
                    f" iterations, from 1 to {_HIGHEST_STAGE}"
                )
        return (self._name(entry[0], where), self._name(entry[1], where), *entry[2:])

    def _give_up(self, entry: Any) -> None:
        upstream, downstream, *distance = self._pair(entry, "stale", with_distance=True)
        matches = [
            d
            for d in self.required
            if (d.upstream, d.downstream) == (upstream, downstream) and (not distance or d.distance == distance[0])
        ]
        if not matches:
            raise PlanError(
                f"plan {self.name!r}: stale gives up {downstream} after {upstream}, which no read or write requires"
                f"{f' at distance {distance[0]}' if distance else ''}; required are"
                f" {'; '.join(map(str, self.required)) or 'none'}"
            )
        self.stale = (*self.stale, matches[0])
        self.required = required_dependencies(list(self.tasks.values()), self.stale)
        if matches[0] in self.required:
            raise PlanError(
                f"plan {self.name!r}: stale gives up {matches[0]}; only the order of outliving state can be given up,"
                " a context field is not there before it is written"
            )

    def _periods_between(self, dependency: Dependency) -> int:
        """Periods from upstream's run to downstream's: negative means downstream would run first."""
        stage_of = self.schedule
        return stage_of[dependency.upstream].stage + dependency.distance - stage_of[dependency.downstream].stage

    def _check_cycle(self) -> None:
        cycle = find_cycle(list(self.tasks), [d for d in self.dependencies if d.distance == 0])
        if cycle:
            raise PlanError(
                f"plan {self.name!r}: the dependencies have a cycle, {' -> '.join(cycle)}; remove one of them"
            )

    def _check_stages(self) -> None:
        for dependency in self.dependencies:
            if self._periods_between(dependency) >= 0:
                continue
            up, down = self.schedule[dependency.upstream].stage, self.schedule[dependency.downstream].stage
            if dependency in self.required:
                raise PlanError(
                    f"plan {self.name!r} drops a required dependency: {dependency}, but {dependency.downstream} is in"
                    f" stage {down} and {dependency.upstream} in stage {up}; lower the stage of"
                    f" {dependency.downstream} to {up + dependency.distance} or less, or declare"
                    f" ({dependency.upstream}, {dependency.downstream}, {dependency.distance}) in stale"
                )
            raise PlanError(
                f"plan {self.name!r}: {dependency}, a task of a lower stage: {dependency.downstream} is in stage {down}"
                f" and {dependency.upstream} in stage {up}; raise the latter to {down - dependency.distance} or more"
            )


def _entries(plan: str, what: str, entries: Any) -> list[Any]:
    if isinstance(entries, (str, Mapping)) or not isinstance(entries, Iterable):
        raise PlanError(f"plan {plan!r}: {what} is {shown(entries)}; write a list")
    return list(entries)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_name(plan: str, what: str, name: object) -> None:
    """Names are printed: in tables, errors, traces and reports."""
    if not isinstance(name, str) or not name.isprintable():
        raise PlanError(
            f"{plan and f'plan {plan!r}: '}{what} {shown(name)} of a plan; expected text without control characters,"
            " line ends and marks of direction"
        )


def _check_schedule(plan: str, task: str, where: TaskSchedule) -> None:
    _check_name(plan, "task", task)
    if not _is_count(where.stage) or where.stage > _HIGHEST_STAGE:
        raise PlanError(
            f"plan {plan!r}: task {task!r} has stage {shown(where.stage)}; stages are whole numbers from 0 to"
            f" {_HIGHEST_STAGE}, each of which keeps one more batch in memory"
        )
    names = {"thread_group": where.thread_group} | ({} if where.stream is None else {"stream": where.stream})
    for what, name in names.items():
        if not isinstance(name, str) or not name:
            raise PlanError(f"plan {plan!r}: task {task!r} has {what} {shown(name)}; give it a name")
        _check_name(plan, f"{what} of task {task!r}", name)
    if not isinstance(where.globally_ordered, bool):
        raise PlanError(
            f"plan {plan!r}: task {task!r} has globally_ordered {shown(where.globally_ordered)}; true or false"
        )
