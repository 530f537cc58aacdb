"""Shapes of each stage's inputs and outputs, found by running the whole model once without memory."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from lightning_pipe._compat.torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    tree_leaves,
    tree_map_only,
)
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.model.stage_module import PassThroughModule, StageModule

_CACHE_SIZE = 256  # signatures; an entry is a few tensors without data for each stage


@dataclass(frozen=True)
class StageShape:
    """Tensors on the meta device.

    Attributes:
        inputs: inputs of the stage's module: the micro-batch on the first stage, hidden states on a later stage.
        outputs: outputs of the stage's module. Floating-point outputs that depend on a parameter require a gradient,
            as do outputs of the next stage that depend on them.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class StageShapes:
    """Shapes and dtypes of every stage's inputs and output, on every rank.

    PyTorch's own inference runs a real forward and backward of the first micro-batch of every new shape, which draws
    random numbers, and clears gradients that FSDP accumulates.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mode: FakeTensorMode,
        check: Callable[[Tensor | tuple[Tensor, ...], Mapping[str, Any]], object] | None = None,
    ) -> None:
        self._stages = list(stages)
        # Frozen parameters may be trained later, so outputs that depend on any parameter receive a gradient.
        for stage in self._stages:
            for parameter in stage.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
        self._mode = mode
        self._check = check if len(self._stages) > 1 else None
        self._cache: OrderedDict[Any, list[StageShape]] = OrderedDict()
        self._training_checked = False

    def infer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StageShape]:
        """Shapes of all stages for one micro-batch."""
        leaves = tree_leaves((args, dict(kwargs)))
        key = (
            *map(make_shape_cache_key, leaves),
            *sorted(_list_active_autocast_dtypes({leaf.device.type for leaf in filter(_is_tensor, leaves)})),
        )
        if key not in self._cache:
            self._cache[key] = self._infer_uncached(args, dict(kwargs))
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return self._cache[key]

    def _infer_uncached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StageShape]:
        shapes: list[StageShape] = []
        with self._mode:
            inputs, fakes = tree_map_only((Tensor, BlockMask), self._convert_to_fake, (args, kwargs))
        for index, stage in enumerate(self._stages):
            outputs = self._run(index, stage, inputs, fakes)
            shapes.append(
                StageShape(
                    tuple(map(_convert_to_meta, filter(_is_tensor, inputs))), tuple(map(_convert_to_meta, outputs))
                )
            )
            if self._check is not None:
                # Check before a later stage fails with a less helpful error.
                sent = tuple(map(_linspace_like, outputs))
                self._check(sent[0] if len(sent) == 1 else sent, tree_map_only(Tensor, Tensor.cpu, kwargs))
                self._check = None
            inputs = _detach_as_received(outputs)
        return shapes

    def refuse_reentrant_checkpoints(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], schedule: str) -> None:
        """Refuse layers that recompute with ``use_reentrant=True``, for a schedule with backwards in two parts.

        PyTorch would fail in the backward, on the rank of the layer alone. The first stage is not checked: its backward
        is whole. Stages run in training mode here, and only once, on the first call.
        """
        if self._training_checked:
            return
        self._training_checked = True
        with self._mode:
            inputs, fakes = tree_map_only((Tensor, BlockMask), self._convert_to_fake, (args, dict(kwargs)))
        for index, stage in enumerate(self._stages):
            if index > 0:
                self._refuse_reentrant(index, stage.train(), inputs, fakes, schedule)
            inputs = _detach_as_received(self._run(index, stage.eval(), inputs, fakes))

    def _refuse_reentrant(
        self, index: int, stage: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], schedule: str
    ) -> None:
        try:
            with patch.object(torch.utils.checkpoint, "CheckpointFunction", _RaisingCheckpointFunction):
                self._call_stage_with_fake_tensors(stage, inputs, kwargs)
        except _ReentrantCheckpointError as error:
            raise SetupError(
                f"{find_failing_module(error, _model_of(stage)) or 'the model'} of stage {index} calls"
                f" torch.utils.checkpoint with use_reentrant=True, which schedule {schedule} cannot run,"
                " since its backwards run in two parts. Use use_reentrant=False, the strategy's"
                " activation_checkpoint, or schedule 1f1b or interleaved_1f1b"
            ) from None
        except Exception:  # any other exception: training itself will show it
            return

    def _convert_to_fake(self, value: Tensor | BlockMask) -> Any:
        if isinstance(value, Tensor):
            return self._mode.from_tensor(value)
        fake = copy.copy(value)
        vars(fake).update(tree_map_only(Tensor, self._mode.from_tensor, vars(value)))
        return fake

    def _call_stage_with_fake_tensors(self, stage: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Functions that the model itself compiles, such as FlexAttention, cannot be compiled for fake tensors.
        eager = torch.compiler.set_stance("force_eager")
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), eager, self._mode, FalseTensorBoolMode():
            return stage(*inputs, **kwargs)

    def _run(self, index: int, stage: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        results: list[tuple[nn.Module, Any]] = []
        hook = register_module_forward_hook(lambda module, _, result: results.append((module, result)))
        try:
            output = self._call_stage_with_fake_tensors(stage, inputs, kwargs)
        except (InputError, SetupError):
            raise
        except Exception as error:
            block = find_failing_module(error, stage)
            unknown = isinstance(error, TypeError) and "keyword argument" in str(error)
            fix = "Leave the loss to summed_loss; compute what depends on the values of a batch where it is made"
            if unknown:
                fix = "Give forward that argument (parallel.cp adds position_ids), or leave it out in model_inputs"
            elif isinstance(error, NotImplementedError):  # such as FlexAttention's backward on CPUs
                fix = "Use another device, or another function there"
            raise SetupError(
                f"the forward pass of stage {index} cannot be run without data, to find the shapes that stages"
                f" exchange: {block or 'it'} fails with {type(error).__name__}: {error}. {fix}"
            ) from error
        finally:
            hook.remove()
        if index == len(self._stages) - 1:
            # The last stage's output is not sent, so it may have any type.
            return tuple(filter(_is_tensor, tree_leaves(output)))
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(map(_is_tensor, outputs)):
            kind = type(output).__name__
            if isinstance(output, tuple):
                kinds = ["Tensor" if _is_tensor(value) else type(value).__name__ for value in output]
                kind += f" of ({', '.join(kinds)})"
            raise SetupError(
                f"stage {index} gave a {kind}{_describe_module_returning_output(stage, results, output)}; expected a"
                " tensor, or a tuple of"
                " tensors, which the next stage takes as its arguments. Let the layers of the model pass tensors only:"
                " make other values attributes of the layers, or keyword arguments of the model (model_inputs), which"
                " every stage gets"
            )
        return outputs


def bypass_data_dependent_layer(layer: Any, slot: nn.Module) -> None:
    """Make a layer with fake parameters do as *slot* where its forward needs values, such as the choices of a router.

    A slot of another stage returns its hidden states, so layers keep their shape.
    """
    forward = layer.forward

    @functools.wraps(forward)
    def run_or_bypass_if_data_dependent(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return slot(*args, **kwargs)

    layer.forward = run_or_bypass_if_data_dependent


def _describe_module_returning_output(stage: nn.Module, results: Sequence[tuple[nn.Module, Any]], output: Any) -> str:
    """Part of a message with the first module that returned a stage's output; empty if no module did."""

    def get_object_ids(value: Any) -> list[int]:
        return list(map(id, value if isinstance(value, tuple) else (value,)))

    names = {id(module): name for name, module in _model_of(stage).named_modules() if name}
    for module, result in results:
        if (
            id(module) in names
            and not isinstance(module, PassThroughModule)
            and get_object_ids(result) == get_object_ids(output)
        ):
            return f", which {names[id(module)]!r} ({type(module).__name__}) returned"
    return ""


def _model_of(stage: nn.Module) -> nn.Module:
    """Model with the names that the user knows."""
    return next((module.module for module in stage.modules() if isinstance(module, StageModule)), stage)


def _detach_as_received(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(output.detach().requires_grad_(output.requires_grad) for output in outputs)


class _ReentrantCheckpointError(Exception):
    """Raised in place of a reentrant checkpoint."""


class _RaisingCheckpointFunction:
    @staticmethod
    def apply(*args: Any) -> Any:
        raise _ReentrantCheckpointError


def find_failing_module(error: Exception, model: nn.Module) -> str | None:
    """Name of the innermost module whose forward raised an error."""
    names = {id(module): name for name, module in model.named_modules()}
    name, trace = None, error.__traceback__
    while trace is not None:
        name = names.get(id(trace.tb_frame.f_locals.get("self"))) or name
        trace = trace.tb_next
    return name


class FalseTensorBoolMode(TorchFunctionMode):
    """Mode in which the truth value of a tensor is False, as Hugging Face's forwards ask if a mask masks anything.

    Without data the value is unknown. It does not affect shapes in a model whose stages keep the shape of their input.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return False if func is Tensor.__bool__ else func(*args, **(kwargs or {}))


def _linspace_like(like: Tensor) -> Tensor:
    """Distinct values on the CPU, so that any change by a forward is detected."""
    return torch.linspace(-1.0, 1.0, like.numel(), device="cpu").view(like.shape).to(like.dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _list_active_autocast_dtypes(device_types: set[str]) -> Iterator[str]:
    for kind in device_types:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            yield f"{kind} {torch.get_autocast_dtype(kind)}"


def _convert_to_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def make_shape_cache_key(value: Any) -> Any:
    """Description of a value that determines shapes: a tensor's shape and dtype, or the text of any other value."""
    if isinstance(value, BlockMask):
        return BlockMask, tuple(value.shape)  # its text is a picture of its blocks
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)
