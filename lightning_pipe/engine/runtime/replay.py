"""Replays of a task: its function is run once, and from then on what it did is done again without running it.

    first run    fields before ──► fn(ctx) ──► fields after     captured: what differs, and the declared effects
    replays      fields before ─────────────► fields after      put back; upstream of it gradients are zeros

What a replay saves is what a task costs: :class:`~lightning_pipe.engine.profiling.profiler.TaskProfiler` measures with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine.plans.task import DeclaredIO, IterContext, PipelineTask
from lightning_pipe.engine.runtime.captured import Captured, capture

__all__ = ["Key", "Shortcut", "graft"]

Key = Callable[[IterContext], Hashable]


@dataclass(frozen=True)
class _TaskRun:
    """What one run of a task did."""

    produced: Captured
    deleted: tuple[str, ...]
    effects: list[tuple[DeclaredIO, Captured]]


class Shortcut:
    """Stands in for a task's function.

    Args:
        task: whose function it is.
        key: of an iteration: those with one key have the same values upstream, and one run is captured for each. None
            where all have the same.
        rehearse: let what comes later in a captured iteration find what it finds in a replayed one, gradients that end
            at the task included: what it does otherwise then comes of effects that are not declared.
    """

    def __init__(self, task: PipelineTask, key: Key | None = None, *, rehearse: bool = False) -> None:
        self._task = task
        self._key = key
        self._rehearse = rehearse
        self._owned = frozenset(name for io in task.io for name in io.fields)
        self._runs: dict[Hashable, _TaskRun] = {}

    def __call__(self, ctx: IterContext) -> None:
        key = None if self._key is None else self._key(ctx)
        run = self._runs.get(key)
        if run is not None:
            self._replay(ctx, run)
        elif self._rehearse:
            aside = type(ctx)()
            vars(aside).update(vars(ctx))
            run = self._runs[key] = self._capture(aside)
            self._replay(ctx, run)
        else:
            self._runs[key] = self._capture(ctx)

    def _capture(self, ctx: IterContext) -> _TaskRun:
        before = dict(vars(ctx))
        self._task.fn(ctx)
        after = vars(ctx)
        # What is said to be written and is the same object was changed in place.
        produced = {
            name: value
            for name, value in after.items()
            if name not in self._owned
            and (name not in before or value is not before[name] or name in self._task.writes)
        }
        deleted = tuple(name for name in before if name not in after and name not in self._owned)
        return _TaskRun(capture(produced), deleted, [(io, capture(io.capture(ctx))) for io in self._task.io])

    def _replay(self, ctx: IterContext, run: _TaskRun) -> None:
        upstream = self._upstream(ctx) if torch.is_grad_enabled() else None
        give = None if upstream is None else _Grafts(upstream)
        # Produced first, and deleted last: to restore may take what the task has put there, or would have taken.
        vars(ctx).update(run.produced.give(give))
        for io, effect in run.effects:
            io.restore(ctx, effect.give(give))
        for name in run.deleted:
            vars(ctx).pop(name, None)

    def _upstream(self, ctx: IterContext) -> list[Tensor]:
        """What the outputs would have gradients for."""
        found: dict[int, Tensor] = {}
        for name in self._task.reads:
            if name in vars(ctx) and name not in self._owned:
                _collect(getattr(ctx, name), found)
        for io in self._task.io:
            for tensor in io.upstream(ctx):
                if tensor.requires_grad:
                    found[id(tensor)] = tensor
        return list(found.values())


class _Grafts:
    def __init__(self, upstream: list[Tensor]) -> None:
        self._upstream = upstream

    def __call__(self, value: Tensor) -> Tensor:
        return graft(value, self._upstream)


def graft(value: Tensor, upstream: Iterable[Tensor]) -> Tensor:
    """*value* on a graph that it did not come from: its gradient goes to it, and zeros to each of *upstream*.

    So all that would have had a gradient has one, of zeros: whoever waits for gradients gets them.

    Args:
        value: a tensor without a graph.
        upstream: tensors that require grad.
    """
    anchor = torch.empty(0, device=value.device, requires_grad=True)
    result: Tensor = _Graft.apply(value, anchor, *upstream)  # type: ignore[no-untyped-call]
    return result


class _Graft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, *upstream: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in upstream]
        return value.detach()  # not the argument itself: what is handed on may be changed in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # One number each, seen as many times as needed.
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like]
        return (gradient, None, *zeros)


def _collect(value: Any, found: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            found[id(value)] = value
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, found)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _collect(one, found)
