"""Overrides of task functions in a pipeline: replays, and functions whose contexts are read after each run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.task import IterContext, PipelineTask
from lightning_pipe.engine.runtime.executor import Operation
from lightning_pipe.engine.runtime.replay import Key, Shortcut

K = TypeVar("K")
V = TypeVar("V")


class Overrides:
    """Replaces the functions of tasks temporarily."""

    def __init__(self, tasks: Mapping[str, PipelineTask], operations: Sequence[Operation]) -> None:
        self._tasks = tasks
        self._operations = operations

    @property
    def replayed(self) -> tuple[str, ...]:
        """Names of the replayed tasks."""
        return tuple(op.name for op in self._operations if isinstance(op.fn, Shortcut))

    def replay(self, names: Sequence[str], key: Key | None, rehearse: bool) -> None:
        """Replay tasks, see :class:`~lightning_pipe.engine.runtime.replay.Shortcut`. On an error no task is changed."""
        self._check(names)
        for name in names:
            if reason := self._tasks[name].not_replayable:
                raise PlanError(
                    f"task {name!r} cannot be replayed, since {reason}; replay other tasks, or measure only its time"
                )
        for op in self._operations:
            if op.name in names:
                op.fn = Shortcut(self._tasks[op.name], key, rehearse=rehearse)

    def run(self, names: Sequence[str]) -> None:
        """Run tasks again instead of replaying them, by default all, and discard their captured effects."""
        self._check(names)
        for op in self._operations:
            if not names or op.name in names:
                op.fn = self._tasks[op.name].fn

    @contextmanager
    def watched(self, names: Iterable[str], read: Callable[[str, IterContext], Mapping[K, V]]) -> Iterator[dict[K, V]]:
        """Call *read* with the task's name and the context after each run; yields a dictionary of the results."""
        found: dict[K, V] = {}
        wanted = set(names)
        watched = [op for op in self._operations if op.name in wanted]
        functions = [op.fn for op in watched]
        try:
            for op in watched:
                op.fn = _watching(op.fn, partial(read, op.name), found)
            yield found
        finally:
            for op, fn in zip(watched, functions, strict=True):
                op.fn = fn

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._tasks:
                raise PlanError(f"the plan has no task {name!r}; its tasks are {', '.join(self._tasks)}")


def _watching(
    fn: Callable[[IterContext], None], read: Callable[[IterContext], Mapping[K, V]], found: dict[K, V]
) -> Callable[[IterContext], None]:
    """Task function that reads the context after each run."""

    def run(ctx: IterContext) -> None:
        fn(ctx)
        found.update(read(ctx))

    return run
