"""What a pipeline calls for its tasks: their functions, replays of them, or functions that are watched.

Tested in ``tests/engine/runtime/test_pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.task import IterContext, PipelineTask
from lightning_pipe.engine.runtime.executor import Operation
from lightning_pipe.engine.runtime.replay import Key, Shortcut

K = TypeVar("K")
V = TypeVar("V")


class StandIns:
    """Puts other functions in the place of tasks' own.

    Args:
        tasks: of the plan, by name.
        operations: that run them; nothing but their functions changes.
    """

    def __init__(self, tasks: Mapping[str, PipelineTask], operations: Sequence[Operation]) -> None:
        self._tasks = tasks
        self._operations = operations

    @property
    def replayed(self) -> tuple[str, ...]:
        """The tasks that are replayed."""
        return tuple(op.name for op in self._operations if isinstance(op.fn, Shortcut))

    def replay(self, names: Sequence[str], key: Key | None, rehearse: bool) -> None:
        """Replay tasks, see :class:`~lightning_pipe.engine.runtime.replay.Shortcut`; all of them, or none.

        Raises:
            PlanError: there is no such task, or it cannot be replayed.
        """
        self._check(names)
        for name in names:
            if reason := self._tasks[name].not_replayable:
                raise PlanError(
                    f"task {name!r} cannot be replayed, since {reason}; shortcut others, or measure its time"
                )
        for op in self._operations:
            if op.name in names:
                op.fn = Shortcut(self._tasks[op.name], key, rehearse=rehearse)

    def run(self, names: Sequence[str]) -> None:
        """Run tasks again, all of them if none is named; what was captured is forgotten.

        Raises:
            PlanError: there is no such task.
        """
        self._check(names)
        for op in self._operations:
            if not names or op.name in names:
                op.fn = self._tasks[op.name].fn

    @contextmanager
    def watched(self, names: Iterable[str], read: Callable[[str, IterContext], Mapping[K, V]]) -> Iterator[dict[K, V]]:
        """Have *read* called with a task's name and the context behind each of its runs; yields what that gave."""
        found: dict[K, V] = {}
        wanted = set(names)
        watched = [op for op in self._operations if op.name in wanted]
        functions = [op.fn for op in watched]
        try:
            for op in watched:
                op.fn = _WatchedTask(op.name, op.fn, read, found)
            yield found
        finally:
            for op, fn in zip(watched, functions, strict=True):
                op.fn = fn

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._tasks:
                raise PlanError(f"the plan has no task {name!r}; its tasks are {', '.join(self._tasks)}")


class _WatchedTask:
    """A task's function, and what is read of the context behind it."""

    def __init__(
        self,
        name: str,
        fn: Callable[[IterContext], None],
        read: Callable[[str, IterContext], Mapping[Any, Any]],
        found: dict[Any, Any],
    ) -> None:
        self._name, self._fn, self._read, self._found = name, fn, read, found

    def __call__(self, ctx: IterContext) -> None:
        self._fn(ctx)
        self._found.update(self._read(self._name, ctx))
