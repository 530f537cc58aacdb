"""Plan of a pipeline: a stage, stream and thread group for each task, checked on construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import short_repr
from lightning_pipe.engine.plans.collectives import check_collective_order
from lightning_pipe.engine.plans.dependencies import Dependency, required_dependencies
from lightning_pipe.engine.plans.order import check_order, derive_order, find_cycle
from lightning_pipe.engine.plans.render import plan_table, plan_timeline
from lightning_pipe.engine.plans.schedule import TaskSchedule
from lightning_pipe.engine.plans.spec import Edge, PlanSpec
from lightning_pipe.engine.plans.task import IterContext, PipelineTask


class PipelinePlan:
    """Complete, checked schedule of a set of tasks.

    Args:
        schedule: :class:`TaskSchedule` of each task, as a mapping or pairs, in the order in which a *serial* iteration
            runs the tasks. Dependencies between reads and writes follow this order.
        deps: additional dependencies inside an iteration, as ``(upstream, downstream)`` (default none).
        cross_iter_deps: additional dependencies across iterations, as ``(upstream, downstream)`` for the next iteration
            or ``(upstream, downstream, distance)`` (default none).
        pipeline_depth: maximum number of batches in flight (default: highest stage + 1, the minimum).
        stale: required dependencies on state that this plan omits on purpose, as ``(upstream, downstream)`` or
            ``(upstream, downstream, distance)`` (default none). Results then differ from serial execution. Each entry
            removes one distance; the same dependency at a distance of one more iteration still holds and bounds the
            staleness of reads. The plan's name must contain ``"stale"`` or ``"semi_sync"``.
        name: name of the plan in logs, tables and errors (default "plan").
        order: order in which one period submits the tasks, each for its own iteration (default: derived from the
            dependencies, higher stages first).

    Raises:
        PlanError: unknown or repeated task, cycle, dependency on a task of a lower stage, a required dependency dropped
            without ``stale``, too small a depth, an *order* that contradicts the dependencies, or collectives of one
            process group from several thread groups without ``globally_ordered``.
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
        self.tasks: dict[str, PipelineTask] = {}
        self.schedule: dict[str, TaskSchedule] = {}
        for task, where in schedule.items() if isinstance(schedule, Mapping) else schedule:
            if task.name in self.tasks:
                raise PlanError(f"plan {name!r}: task {task.name!r} is scheduled twice; give each task one schedule")
            self.tasks[task.name] = task
            self.schedule[task.name] = where
        entries: dict[str, Any] = {"order": order, "deps": deps, "cross_iter_deps": cross_iter_deps, "stale": stale}
        spec = PlanSpec(name, self.schedule, pipeline_depth=pipeline_depth, **entries)
        self.name = spec.name
        if not self.tasks:
            raise PlanError(f"plan {name!r} has no tasks; schedule at least one")
        # The most derived context, which all tasks accept.
        contexts = [task.context for task in self.tasks.values()]
        self.context = max(contexts, key=lambda context: len(context.mro()), default=IterContext)
        self.deps = tuple(self._dependency(edge, 0, "deps") for edge in spec.deps)
        self.cross_iter_deps = tuple(self._dependency(edge, 1, "cross_iter_deps") for edge in spec.cross_iter_deps)
        self.required = required_dependencies(list(self.tasks.values()))
        self.stale: tuple[Dependency, ...] = ()
        for edge in spec.stale:
            self._allow_stale_read(edge)
        if self.stale and not any(word in name for word in ("stale", "semi_sync")):
            raise PlanError(
                f"plan {name!r} omits {'; '.join(map(str, self.stale))}, so its results are not exact; put 'stale' or"
                " 'semi_sync' into its name"
            )
        self.dependencies: tuple[Dependency, ...] = tuple(
            dict.fromkeys((*self.required, *self.deps, *self.cross_iter_deps))
        )
        self._check_cycle()
        self._check_stages_respect_dependencies()
        check_collective_order(name, self.tasks.values(), self.schedule, has_streams=False)
        self.max_stage = spec.max_stage
        self.pipeline_depth = self.max_stage + 1 if spec.pipeline_depth is None else spec.pipeline_depth
        if self.pipeline_depth < self.max_stage + 1:
            raise PlanError(
                f"plan {name!r} has pipeline_depth {self.pipeline_depth}, but its stages 0 to {self.max_stage} need"
                f" {self.max_stage + 1} batches in flight; raise pipeline_depth or lower the highest stage"
            )
        same_period = [d for d in self.dependencies if self._periods_between(d) == 0]
        for task_name in spec.order:
            self._check_task_exists(task_name, "order")
        if spec.order:
            check_order(name, spec.order, list(self.tasks), same_period)
        stages = {task: where.stage for task, where in self.schedule.items()}
        self.order = spec.order or derive_order(list(self.tasks), stages, same_period)
        self.spec = replace(
            spec,
            order=self.order,
            cross_iter_deps=_edges(self.cross_iter_deps),
            stale=_edges(self.stale),
            pipeline_depth=self.pipeline_depth,
        )

    @property
    def thread_group_names(self) -> tuple[str, ...]:
        """Thread groups of the plan, ``"main"`` first, then workers in program order."""
        return self.spec.thread_group_names

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the device streams of the plan, in program order."""
        return tuple(dict.fromkeys(where.stream for where in self.schedule.values() if where.stream is not None))

    def description(self) -> list[tuple[str, str]]:
        """Plan as ordered (name, text) entries, which ranks compare before the first period."""
        entries = [("name", self.name), ("pipeline_depth", str(self.pipeline_depth)), ("order", str(self.order))]
        for task, where in self.schedule.items():
            declared = self.tasks[task]
            reads, writes = (sorted(map(repr, entries)) for entries in (declared.reads, declared.writes))
            submits = f" submits to {sorted(declared.collectives)}" if declared.collectives else ""
            entries.append((f"task {task}", f"{where} reads {reads} writes {writes}{submits}"))
        entries.append(("dependencies", "; ".join(sorted(map(str, self.dependencies)))))
        return entries

    def to_yaml(self) -> str:
        """Convert the plan to YAML; inverse of :meth:`from_yaml`."""
        return self.spec.to_yaml()

    @classmethod
    def from_yaml(cls, text: str, tasks: Iterable[PipelineTask]) -> PipelinePlan:
        """Build a plan for *tasks* (in serial order) from YAML text.

        Raises:
            PlanError: unknown or repeated key or task, a missing task, or a plan that the constructor refuses.
        """
        return cls.from_spec(PlanSpec.from_yaml(text), tasks)

    @classmethod
    def from_spec(cls, spec: PlanSpec, tasks: Iterable[PipelineTask]) -> PipelinePlan:
        """Build a plan for *tasks* (in serial order) from its data.

        Args:
            spec: schedule of all tasks by name, with edges and depth.
            tasks: tasks that the spec names, each once.

        Raises:
            PlanError: unknown task, a missing task, or a plan that the constructor refuses.
        """
        tasks_by_name = {task.name: task for task in tasks}
        unknown = [task for task in spec.schedule if task not in tasks_by_name]
        if unknown:
            raise PlanError(
                f"the plan schedules the unknown task {short_repr(unknown[0])}; the tasks are"
                f" {', '.join(tasks_by_name)}. Correct the name or, if the task is your own, pass it as"
                " extra_tasks. Commands only know the built-in tasks."
            )
        missing = [task for task in tasks_by_name if task not in spec.schedule]
        if missing:
            raise PlanError(
                f"the plan leaves out {', '.join(missing)}. Add `{missing[0]}: {{}}` to the tasks of its file, and the"
                " name to its order, if it has one. `lightning-pipe plan show NAME --format yaml` writes the file of a"
                " named plan."
            )
        return cls(
            [(task, spec.schedule[name]) for name, task in tasks_by_name.items()],
            spec.deps,
            spec.cross_iter_deps,
            spec.pipeline_depth,
            spec.stale,
            name=spec.name,
            order=spec.order,
        )

    def table(self) -> str:
        """Table of the tasks with their stages, streams, thread groups and dependencies."""
        return plan_table(self.spec, self.dependencies, self.stale)

    def timeline(self, iterations: int = 4) -> str:
        """Table of the iteration that each task runs for, period by period, from filling to draining.

        Args:
            iterations: number of iterations that the table shows (default 4).
        """
        return plan_timeline(self.spec, iterations)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.timeline()}"

    def __repr__(self) -> str:
        return f"PipelinePlan({self.name!r}, tasks={len(self.tasks)}, pipeline_depth={self.pipeline_depth})"

    def _check_task_exists(self, task: str, where: str) -> None:
        if task not in self.tasks:
            raise PlanError(
                f"plan {self.name!r}: {where} names the unknown task {short_repr(task)}; its tasks are"
                f" {', '.join(self.tasks)}"
            )

    def _dependency(self, edge: Edge, distance: int, where: str) -> Dependency:
        self._check_task_exists(edge[0], where)
        self._check_task_exists(edge[1], where)
        return Dependency(edge[0], edge[1], edge[2] if len(edge) == 3 else distance, f"listed in {where}")

    def _allow_stale_read(self, edge: Edge) -> None:
        upstream, downstream, *distance = edge
        self._check_task_exists(upstream, "stale")
        self._check_task_exists(downstream, "stale")
        matches = [
            d
            for d in self.required
            if (d.upstream, d.downstream) == (upstream, downstream) and (not distance or d.distance == distance[0])
        ]
        if not matches:
            raise PlanError(
                f"plan {self.name!r}: stale lists {downstream} after {upstream}, which no read or write requires"
                f"{f' at distance {distance[0]}' if distance else ''}; the required dependencies are:"
                f" {'; '.join(map(str, self.required)) or 'none'}"
            )
        self.stale = (*self.stale, matches[0])
        self.required = required_dependencies(list(self.tasks.values()), self.stale)
        if matches[0] in self.required:
            raise PlanError(
                f"plan {self.name!r}: stale lists {matches[0]}; only dependencies on State can be stale, since a"
                " context field does not exist before its task writes it"
            )

    def _periods_between(self, dependency: Dependency) -> int:
        """Number of periods from the upstream run to the downstream run; negative if downstream would run first."""
        stage_of = self.schedule
        return stage_of[dependency.upstream].stage + dependency.distance - stage_of[dependency.downstream].stage

    def _check_cycle(self) -> None:
        cycle = find_cycle(list(self.tasks), [d for d in self.dependencies if d.distance == 0])
        if cycle:
            raise PlanError(
                f"plan {self.name!r}: the dependencies have a cycle, {' -> '.join(cycle)}; remove one of them"
            )

    def _check_stages_respect_dependencies(self) -> None:
        for dependency in self.dependencies:
            if self._periods_between(dependency) >= 0:
                continue
            upstream, downstream, distance = dependency.upstream, dependency.downstream, dependency.distance
            up, down = self.schedule[upstream].stage, self.schedule[downstream].stage
            stale = f", or declare ({upstream}, {downstream}, {distance}) in stale"
            raise PlanError(
                f"plan {self.name!r} drops a required dependency: {dependency}, but {downstream} is in stage {down} and"
                f" {upstream} in stage {up}; lower the former to {up + distance} or less, or raise the latter to"
                f" {down - distance} or more{stale if dependency in self.required else ''}"
            )


def _edges(dependencies: Iterable[Dependency]) -> tuple[Edge, ...]:
    return tuple((dependency.upstream, dependency.downstream, dependency.distance) for dependency in dependencies)
