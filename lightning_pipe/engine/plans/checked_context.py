"""Contexts that a task sees only what it declares of: for tests, since each access costs a call.

Dependencies follow from what tasks declare to read and write. A task that touches another field is right in plans that
happen to run it after the task that writes the field, and races with that task in others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning_pipe.engine.common.errors import PlanError

CHECK = "LIGHTNING_PIPE_CHECK_CONTEXTS"
# Every task may ask which iteration it runs for; nobody writes that.
_FREE = frozenset({"iter_idx"})


def checks_contexts() -> bool:
    """Whether the environment asks for checked contexts, for the tasks that are made from now on."""
    return os.environ.get(CHECK, "") not in ("", "0")


class CheckedTask:
    """A task's function, called with a view of the context in place of the context.

    Args:
        fn: the function.
        name: of the task.
        reads: fields that the task declares to read.
        writes: fields that the task declares to write; it may read them too.
    """

    def __init__(self, fn: Callable[[Any], None], name: str, reads: frozenset[str], writes: frozenset[str]) -> None:
        self.fn = fn
        self.name = name
        self.reads = reads | writes | _FREE
        self.writes = writes

    def __call__(self, ctx: Any) -> None:
        self.fn(_View(self, ctx))

    def check(self, field: str, writes: bool) -> None:
        """Raise unless the task declares the access."""
        if field not in (self.writes if writes else self.reads):
            verb = "writes" if writes else "reads"
            raise PlanError(
                f"task {self.name!r} {verb} the context field {field!r}, which it does not declare. Add {field!r} to"
                f" its {verb}: without it a plan may run the task beside another one that uses the field"
            )


class _View:
    """A context as one task sees it."""

    __slots__ = ("_ctx", "_task")

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

    def take(self, name: str) -> Any:
        self._task.check(name, writes=True)
        return self._ctx.take(name)

    def has(self, name: str) -> bool:
        self._task.check(name, writes=False)
        return bool(self._ctx.has(name))

    def __repr__(self) -> str:
        return repr(self._ctx)
