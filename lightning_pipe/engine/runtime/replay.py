"""Replay of a task: the function runs once, and later runs restore its captured effects instead.

    first run    fields before ──► fn(ctx) ──► fields after     captured: changed fields and declared effects
    replays      fields before ─────────────► fields after      restored; upstream gradients are zeros

The time saved by a replay is the cost of the task, which
:class:`~lightning_pipe.engine.profiling.profiler.TaskProfiler` measures in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine.plans.task import DeclaredIO, IterContext, PipelineTask
from lightning_pipe.engine.runtime.captured import Snapshot, take_snapshot

Key = Callable[[IterContext], Hashable]


@dataclass(frozen=True)
class _CapturedTaskRun:
    """Captured effects of one run of a task."""

    produced: Snapshot
    deleted: tuple[str, ...]
    effects: list[tuple[DeclaredIO, Snapshot]]


class Shortcut:
    """Replacement for a task's function that captures the first run of each key and replays it afterwards.

    With *replay_first*, later tasks of a captured iteration get the same inputs as in a replayed one, so that a
    remaining difference between the two comes from an undeclared effect.
    """

    def __init__(self, task: PipelineTask, key: Key | None = None, *, replay_first: bool = False) -> None:
        self._task = task
        self._key = key
        self._replay_first = replay_first
        self._owned = frozenset(name for io in task.io for name in io.fields)
        self._runs: dict[Hashable, _CapturedTaskRun] = {}

    def __call__(self, ctx: IterContext) -> None:
        key = None if self._key is None else self._key(ctx)
        run = self._runs.get(key)
        if run is not None:
            self._replay_run(ctx, run)
        elif self._replay_first:
            aside = type(ctx)()
            vars(aside).update(vars(ctx))
            run = self._runs[key] = self._capture_run(aside)
            self._replay_run(ctx, run)
        else:
            self._runs[key] = self._capture_run(ctx)

    def _capture_run(self, ctx: IterContext) -> _CapturedTaskRun:
        before = dict(vars(ctx))
        self._task.fn(ctx)
        after = vars(ctx)
        # A field that is declared as written and is still the same object was changed in place.
        produced = {
            name: value
            for name, value in after.items()
            if name not in self._owned
            and (name not in before or value is not before[name] or name in self._task.writes)
        }
        deleted = tuple(name for name in before if name not in after and name not in self._owned)
        return _CapturedTaskRun(
            take_snapshot(produced), deleted, [(io, take_snapshot(io.capture(ctx))) for io in self._task.io]
        )

    def _replay_run(self, ctx: IterContext, run: _CapturedTaskRun) -> None:
        upstream = self._collect_inputs_requiring_grad(ctx) if torch.is_grad_enabled() else None
        give = None if upstream is None else partial(attach_upstream_with_zero_grads, upstream=upstream)
        # Fields are set first and deleted last, because restore() may use fields that the task sets or deletes.
        vars(ctx).update(run.produced.copy_captured_value(give))
        for io, effect in run.effects:
            io.restore(ctx, effect.copy_captured_value(give))
        for name in run.deleted:
            vars(ctx).pop(name, None)

    def _collect_inputs_requiring_grad(self, ctx: IterContext) -> list[Tensor]:
        """Tensors for which the outputs would have gradients."""
        tensors: dict[int, Tensor] = {}
        for name in self._task.reads:
            if name in vars(ctx) and name not in self._owned:
                _collect_grad_tensors(getattr(ctx, name), tensors)
        for io in self._task.io:
            for tensor in io.upstream(ctx):
                if tensor.requires_grad:
                    tensors[id(tensor)] = tensor
        return list(tensors.values())


def attach_upstream_with_zero_grads(value: Tensor, upstream: Iterable[Tensor]) -> Tensor:
    """Attach *value* to a graph whose backward gives *upstream* zeros, so that hooks that wait for gradients run."""
    anchor = torch.empty(0, device=value.device, requires_grad=True)
    result: Tensor = _ZeroGradsForUpstream.apply(value, anchor, *upstream)
    return result


class _ZeroGradsForUpstream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, *upstream: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in upstream]
        return value.detach()  # a new tensor, because later tasks may change the result in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Expanded scalars, which need no memory for the full shape.
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like]
        return (gradient, None, *zeros)


def _collect_grad_tensors(value: Any, tensors: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            tensors[id(value)] = value
    elif isinstance(value, dict):
        for item in value.values():
            _collect_grad_tensors(item, tensors)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect_grad_tensors(item, tensors)
