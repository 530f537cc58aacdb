"""Dependencies required for correctness, derived from the declared reads and writes of tasks.

Two accesses to the same field or state must keep their serial order if at least one of them is a write. A context field
belongs to one iteration. State outlives iterations, so the last accesses of an iteration also precede the first ones of
the next iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_pipe.engine.plans.task import PipelineTask, State


@dataclass(frozen=True)
class Dependency:
    """Dependency of *downstream* of iteration ``i + distance`` on *upstream* of iteration ``i``.

    Args:
        upstream: name of the task that runs first.
        downstream: name of the task that waits.
        distance: number of iterations between the two (default 0, the same iteration).
        reason: explanation for error messages (default: none); ignored in comparisons.
    """

    upstream: str
    downstream: str
    distance: int = 0
    reason: str = field(default="", compare=False)

    def __str__(self) -> str:
        ahead = f" of {self.distance} iteration(s) before" if self.distance else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.downstream} after {self.upstream}{ahead}{why}"


@dataclass(frozen=True)
class _Access:
    task: str
    iteration: int
    writes: bool


def required_dependencies(
    tasks: Sequence[PipelineTask], stale_dependencies: Iterable[Dependency] = ()
) -> tuple[Dependency, ...]:
    """Dependencies that make every schedule of *tasks* equivalent to serial execution.

    Args:
        tasks: tasks in the order in which a serial iteration runs them.
        stale_dependencies: dependencies on state to omit (default none). Only these orderings are removed. A dependency
            that was implied by an omitted one through a third access is returned explicitly. So is the same dependency
            at a distance of one more iteration, which bounds the staleness of reads.

    Returns:
        Each dependency once, in program order. Dependencies implied by others through a third access to the same field
        or state are omitted. So are dependencies of a task on its own earlier runs, which its thread and stream already
        keep in order.
    """
    names = dict.fromkeys(name for task in tasks for name in (*task.reads, *task.writes))
    without = frozenset(stale_dependencies)
    # All iterations make the same accesses, so the previous iteration stands for all earlier ones.
    iterations = 2 + max((dependency.distance for dependency in without), default=0)
    dependencies: dict[Dependency, None] = {}
    # Two loops over the same names, because a State and a context field may have the same name.
    for name in names:
        for dependency in _derive_dependencies(
            _list_task_accesses_to_field(tasks, name, False, 1), f"field {str(name)!r}", frozenset()
        ):
            dependencies.setdefault(dependency)
    for name in names:
        for dependency in _derive_dependencies(
            _list_task_accesses_to_field(tasks, name, True, iterations), repr(State(name)), without
        ):
            dependencies.setdefault(dependency)
    return tuple(dependencies)


def _list_task_accesses_to_field(
    tasks: Sequence[PipelineTask], name: str, is_state: bool, iterations: int
) -> list[_Access]:
    accesses = []
    for iteration in range(iterations):
        for task in tasks:
            reads, writes = (
                any(entry == name and isinstance(entry, State) == is_state for entry in entries)
                for entries in (task.reads, task.writes)
            )
            if reads or writes:
                accesses.append(_Access(task.name, iteration, writes))
    return accesses


def _derive_dependencies(
    accesses: Sequence[_Access], accessed: str, without: frozenset[Dependency]
) -> Iterator[Dependency]:
    ordered: list[set[int]] = []  # earlier accesses that each access already follows, by index
    for index, after in enumerate(accesses):
        before_it: set[int] = set()
        for earlier in reversed(range(index)):
            before = accesses[earlier]
            if earlier in before_it or not (before.writes or after.writes):
                continue
            verb = "overwrites" if after.writes else "reads"
            dependency = Dependency(
                before.task,
                after.task,
                after.iteration - before.iteration,
                f"{after.task} {verb} {accessed} that {before.task} {'writes' if before.writes else 'reads'}",
            )
            if dependency not in without:
                before_it |= {earlier} | ordered[earlier]
                if before.task != after.task:
                    yield dependency
        ordered.append(before_it)
