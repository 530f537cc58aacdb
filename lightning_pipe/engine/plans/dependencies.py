"""The dependencies that correctness needs, derived from what tasks declare to read and write.

Two accesses of the same thing, one of them a write, must keep the order that serial execution gives them. For a context
field only accesses of the same iteration meet; outliving state is shared, so the last accesses of an iteration also
come before the first ones of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_pipe.engine.plans.task import PipelineTask, State


@dataclass(frozen=True)
class Dependency:
    """*downstream* of iteration ``i + distance`` runs after *upstream* of iteration ``i``.

    Args:
        upstream: name of the task that comes first.
        downstream: name of the task that waits.
        distance: iterations between the two, 0 for a dependency inside one iteration.
        reason: why, for error messages; not part of equality.
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


def required_dependencies(tasks: Sequence[PipelineTask], given_up: Iterable[Dependency] = ()) -> tuple[Dependency, ...]:
    """Dependencies that make any schedule of *tasks* equal to running them serially.

    Args:
        tasks: in the order in which a serial iteration runs them.
        given_up: dependencies on outliving state to do without. Each takes away that one ordering and no other: what
            followed from it by way of a third access is returned in its place, and so is the same dependency over one
            iteration more, which bounds how stale a read can be.

    Returns:
        Each dependency once, in program order; those that follow from others by way of a third access of the same thing
        are left out, and so are those of a task on its own earlier runs, which one thread and one stream keep in order.
    """
    names = dict.fromkeys(name for task in tasks for name in (*task.reads, *task.writes))
    without = frozenset(given_up)
    # Every iteration writes what any writes, so an access of the iteration before stands for all earlier ones.
    iterations = 2 + max((dependency.distance for dependency in without), default=0)
    found: dict[Dependency, None] = {}
    # Two loops over the same names: a State and a context field of one spelling are different things.
    for name in names:
        for dependency in _conflicts(_accesses(tasks, name, False, 1), f"field {str(name)!r}", frozenset()):
            found.setdefault(dependency)
    for name in names:
        for dependency in _conflicts(_accesses(tasks, name, True, iterations), repr(State(name)), without):
            found.setdefault(dependency)
    return tuple(found)


def _accesses(tasks: Sequence[PipelineTask], name: str, is_state: bool, iterations: int) -> list[_Access]:
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


def _conflicts(accesses: Sequence[_Access], what: str, without: frozenset[Dependency]) -> Iterator[Dependency]:
    ordered: list[set[int]] = []  # for each access, the earlier ones that the dependencies found so far put before it
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
                f"{after.task} {verb} {what} that {before.task} {'writes' if before.writes else 'reads'}",
            )
            if dependency not in without:
                before_it |= {earlier} | ordered[earlier]
                if before.task != after.task:
                    yield dependency
        ordered.append(before_it)
