"""Runs a rank's stages over the micro-batches of a batch, under one of PyTorch's schedules.

PyTorch's stages and schedules are built for one number of micro-batches and one shape, over the same modules::

    micro-batches ──► number and shapes ──► schedule and stages, built or cached ──► run ──► losses or outputs

They hold the buffers for receiving tensors, so the least recently used are released above a limit of bytes.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe._compat.torch import tree_leaves
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.llm.model.shapes import StageShape, StageShapes
from lightning_pipe.llm.schedules.checks import choose_supported_schedule, describe_schedule_fallback, splits_backward
from lightning_pipe.llm.schedules.execution import build_evaluation_schedule, build_schedule, run_schedule
from lightning_pipe.llm.schedules.specs import ScheduleSpec
from lightning_pipe.llm.schedules.timed_stage import TimedStage

ResultOf = Callable[[Tensor, Any], Any]


@dataclass(frozen=True)
class StageInputs:
    """Inputs of the stages for one micro-batch."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    contexts: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()


@dataclass
class _CachedSchedule:
    schedule: Any
    bytes: int


@dataclass(eq=False)
class ScheduleRunner:
    """One rank's part of a pipeline; all ranks of the group call the same methods with micro-batches of the same size.

    Attributes:
        events: list that the stages append bars to while ``record_events`` is set.
        failure: first exception of a forward or a result of this rank in the last run, or None. The run is completed
            regardless, since the other ranks take part in it: raise the exception once all ranks know of it.
    """

    stages: Mapping[int, nn.Module]
    num_stages: int
    spec: ScheduleSpec
    group: dist.ProcessGroup
    device: torch.device
    shapes: StageShapes
    cache_bytes: int = field(default=2**30, kw_only=True)
    continue_after_failure: bool = field(default=True, kw_only=True)
    overlap: bool = field(default=False, kw_only=True)
    events: list[Bar] = field(default_factory=list, init=False)
    failure: Exception | None = field(default=None, init=False)
    record_events: bool = field(default=False, init=False)
    _cache: OrderedDict[Any, _CachedSchedule] = field(default_factory=OrderedDict, init=False)
    _replaced: bool = field(default=False, init=False)

    def train(self, micro_batches: Sequence[StageInputs], loss_fn: ResultOf) -> list[Tensor]:
        """Forward and backward of every micro-batch; gradients are added to the parameters' ``.grad``."""
        return self._run(micro_batches, loss_fn, train=True)

    def evaluate(self, micro_batches: Sequence[StageInputs], result_of: Callable[[Tensor, Any], Any]) -> list[Any]:
        """Forward of every micro-batch, without gradients."""
        return self._run(micro_batches, result_of, train=False)

    def _run(self, micro_batches: Sequence[StageInputs], result_of: ResultOf, *, train: bool) -> list[Any]:
        cached = self._find_or_build_schedule(micro_batches, train=train)
        results: list[Any] = []
        self.failure = None
        guarded = self._catch_result_failures(result_of, _check_loss if train else _check_result_has_only_tensors)
        run_schedule(
            cached.schedule,
            [micro_batch.args for micro_batch in micro_batches],
            [
                {
                    **micro_batch.kwargs,
                    "result_of": lambda output, target=micro_batch.target: guarded(output, target),
                    "contexts": micro_batch.contexts,
                }
                for micro_batch in micro_batches
            ],
            [None] * len(micro_batches),
            losses=results,
        )
        return results

    def _catch_result_failures(self, result_of: ResultOf, check: Callable[[Any], Tensor]) -> ResultOf:
        def compute_result_or_zero_on_failure(output: Tensor, target: Any) -> Tensor:
            try:
                return check(result_of(output, target))
            except Exception as error:  # any exception: the other ranks are in the middle of the schedule
                self._note_failure(error)
                return _make_zero_loss_from_output(output)

        return compute_result_or_zero_on_failure

    def _note_failure(self, error: Exception) -> None:
        self.failure = self.failure or error

    def _find_or_build_schedule(self, micro_batches: Sequence[StageInputs], *, train: bool) -> _CachedSchedule:
        """Cached or new schedule for this number and shape; ranks must agree, or neighbors would deadlock."""
        first = micro_batches[0]
        signatures = [_shapes(micro_batch.args) for micro_batch in micro_batches]
        if any(signature != signatures[0] for signature in signatures):
            raise InputError(
                f"the micro-batches of one step have the shapes {', '.join(map(str, dict.fromkeys(signatures)))};"
                " expected one shape, since neighbors exchange tensors of one shape. To fix it, pad them to one length"
            )
        shapes = self.shapes.infer(first.args, first.kwargs)
        key = (train, len(micro_batches), *((_shapes(shape.inputs), _shapes(shape.outputs)) for shape in shapes))
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        if train and splits_backward(self.spec):
            self.shapes.refuse_reentrant_checkpoints(first.args, first.kwargs, self.spec.name)
        cached = self._cache[key] = self._build_train_or_eval_schedule(shapes, len(micro_batches), train)
        while len(self._cache) > 1 and sum(entry.bytes for entry in self._cache.values()) > self.cache_bytes:
            self._cache.popitem(last=False)
        return cached

    def _build_train_or_eval_schedule(self, shapes: Sequence[StageShape], count: int, train: bool) -> _CachedSchedule:
        stages = [
            self._build_stage(index, module, shapes[index], train) for index, module in sorted(self.stages.items())
        ]
        if train:
            numbers = count, self.group.size(), len(stages)
            spec = choose_supported_schedule(self.spec, *numbers)
            if spec != self.spec and not self._replaced:
                self._replaced = True
                if dist.get_rank() == 0:
                    warnings.warn(describe_schedule_fallback(self.spec, count, self.group.size()), stacklevel=2)
            schedule = build_schedule(spec, stages, count, _use_output_as_loss, overlap=self.overlap)
        else:
            schedule = build_evaluation_schedule(self.spec, stages, count, _use_output_as_loss)
        # Each rank counts the largest pair of buffers of all stages, so that all ranks release the same schedules.
        exchanged = [(*shape.inputs, *(shape.outputs if train else ())) for shape in shapes]
        largest = max(sum(tensor.nbytes for tensor in tensors) for tensors in exchanged)
        return _CachedSchedule(schedule, count * largest * len(stages))

    def _build_stage(self, index: int, module: nn.Module, shape: StageShape, train: bool) -> TimedStage:
        inputs, outputs = shape.inputs, shape.outputs
        if not train:
            inputs, outputs = tuple(map(Tensor.detach, inputs)), tuple(map(Tensor.detach, outputs))
        return TimedStage(
            module,
            index,
            self.num_stages,
            self.device,
            input_args=inputs,
            output_args=outputs,
            group=self.group,
            events=self.events,
            recording=lambda: self.record_events,
            on_failure=self._note_failure if self.continue_after_failure else None,
        )


def _use_output_as_loss(output: Any, target: Any) -> Any:
    """Return the output: the last stage has already computed the loss or result from it."""
    return output


def _check_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        description = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.dim() else repr(loss)
        raise InputError(
            f"the loss of a micro-batch is {description}; expected a scalar tensor with a gradient. Return the sum over"
            " its tokens, which is divided later, once, by the number of all tokens"
        )
    return loss


def _make_zero_loss_from_output(output: Any) -> Tensor:
    return torch.stack([leaf.sum() * 0 for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]).sum()


def _check_result_has_only_tensors(result: Any) -> Any:
    leaves = [leaf for leaf in tree_leaves(result) if leaf is not None]
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)})
        raise InputError(
            f"the result of a micro-batch is a {type(result).__name__}{f' of {kinds}' if kinds else ''}; expected a"
            " tensor, or tuples, lists and dicts of tensors. Return one from prediction()"
        )
    return result


def _shapes(values: Any) -> tuple[Any, ...]:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
