"""Checked contexts, in which a task can only access the fields that it declares.

Dependencies are derived from the declared reads and writes of tasks. A task that accesses an undeclared field is only
correct in plans that happen to run it after the task that writes the field; in other plans the two race. The check is
meant for tests, since it adds a function call to each access.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning_pipe.engine.common.errors import PlanError

CHECK = "LIGHTNING_PIPE_CHECK_CONTEXTS"
# Readable by every task, because no task writes it.
_FREE = frozenset({"iter_idx"})


def is_context_check_enabled() -> bool:
    """Return True if the environment enables checked contexts. Only tasks created afterwards are checked."""
    return os.environ.get(CHECK, "") not in ("", "0")


class CheckedTask:
    """Task function that receives a checking view of the context instead of the context."""

    def __init__(self, fn: Callable[[Any], None], name: str, reads: frozenset[str], writes: frozenset[str]) -> None:
        self.fn = fn
        self.name = name
        self.reads = reads | writes | _FREE
        self.writes = writes

    def __call__(self, ctx: Any) -> None:
        self.fn(_View(self, ctx))

    def check(self, field: str, writes: bool) -> None:
        """Raise a :class:`PlanError` unless the task declares the access."""
        if field not in (self.writes if writes else self.reads):
            verb = "writes" if writes else "reads"
            raise PlanError(
                f"task {self.name!r} {verb} the context field {field!r}, which it does not declare. Add {field!r} to"
                f" its {verb}; otherwise a plan may run it concurrently with another task that uses the field"
            )


class _View:
    """View of a context that checks each access against the declarations of one task."""

    __slots__ = ("_ctx", "_task")
    _ctx: Any
    _task: CheckedTask

    def __init__(self, task: CheckedTask, ctx: Any) -> None:
        object.__setattr__(self, "_task", task)
        object.__setattr__(self, "_ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        self._task.check(name, writes=False)
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._task.check(name, writes=True)
        setattr(self._ctx, name, value)

    def __delattr__(self, name: str) -> None:
        self._task.check(name, writes=True)
        delattr(self._ctx, name)

    def pop(self, name: str) -> Any:
        self._task.check(name, writes=True)
        return self._ctx.pop(name)

    def has(self, name: str) -> bool:
        self._task.check(name, writes=False)
        return bool(self._ctx.has(name))

    def __repr__(self) -> str:
        return repr(self._ctx)
