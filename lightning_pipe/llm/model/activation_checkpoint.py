"""Layers that keep little for their backward and compute the rest of it again.

``torch.utils.checkpoint`` computes a region again in every call of the autograd engine. A backward in two parts, as
zero-bubble schedules and DualPipeV run it, calls the engine once for a layer's inputs and then once for each group of
its parameters: a layer with seven matrices would run some ten times, and selective checkpointing ends with "Trying to
backward an extra time". Here a layer is computed again once, at the first tensor that is asked for; what that gives is
kept as the graph's own tensors are, until the graph lets go of it.

    forward:   saved tensor ──pack──► placeholder          the layer keeps its arguments
    backward:  placeholder ──unpack──► not there? run the layer again, fill all placeholders ──► tensor
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import (
    TorchFunctionMode,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_pipe._compat.torch import (
    function_mode_count,
    function_mode_stack,
    pop_function_mode,
    push_function_mode,
    schema_of,
    tree_leaves,
)
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number
from lightning_pipe.llm.model.stage_module import PassThrough, StageModule

__all__ = ["ActivationCheckpoint", "checkpoint_layers"]

Mode = Literal["full", "selective"]

# What is dear to compute again: products of matrices, attention, and exchanges between ranks. By name, since some are
# registered only when the package that has them is imported.
_KEPT = {
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flex_attention",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::reduce_scatter_tensor",
}


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Layers to recompute in backward.

    Args:
        mode: ``full`` (default) recomputes the whole layer, ``selective`` keeps the outputs of matrix multiplications,
            attention and exchanges between ranks, which costs memory and saves time.
        every: distance between checkpointed layers (default 1: all layers). 2 checkpoints every second layer.

    Raises:
        SetupError: the mode is unknown, or ``every`` is below 1.
    """

    mode: Mode = "full"
    every: int = 1

    def __post_init__(self) -> None:
        check_choice("activation_checkpoint.mode", self.mode, get_args(Mode))
        check_whole_number("activation_checkpoint.every", self.every, 1)


def checkpoint_layers(stage: StageModule, layers: Sequence[str], mode: Mode = "full", every: int = 1) -> None:
    """Let a stage's layers compute again in backward what they would keep from forward, in place.

    Gradients do not change, to the bit on one device: random numbers, autocast and function modes (context
    parallelism's among them) are those of the forward again. Names of parameters and modules do not change either,
    since only ``layer.forward`` is replaced. A layer is computed again once for each micro-batch, whatever the
    schedule; under one that runs backwards in two parts, what that gives is held from the first part to the second.

    Call it before layers are compiled and before ``fully_shard``. Compiled layers leave it to the compiler, which has
    the same two modes (``torch.utils.checkpoint`` inside of a graph); but where function modes are active, as with
    context parallelism, a layer that is checkpointed runs uncompiled.

    Args:
        stage: of the model.
        layers: FQNs of the whole model's layers.
        mode: "full" keeps a layer's arguments only. "selective" also keeps the outputs of every product of matrices,
            of attention and of exchanges between ranks, and computes the rest again. (torchtitan keeps every second
            product; that made memory depend on the order in which a layer happens to call them.)
        every: only layers whose index in the whole model is a multiple of it; so the split does not matter.

    Raises:
        SetupError: another mode, or an ``every`` below 1. In backward: a layer that did something else the second
            time, or whose arguments were changed in place after its forward.
    """
    if mode not in ("full", "selective"):
        raise SetupError(f"the mode of activation checkpointing is {mode!r}; expected 'full' or 'selective'")
    if every < 1:
        raise SetupError(f"activation checkpointing is for every {every} layers; expected 1 (all layers) or more")
    for name in layers[::every]:
        layer: Any = stage.module.get_submodule(name)
        if not isinstance(layer, PassThrough):
            # A partial of a bound method: a copy of the layer then has a forward of its own.
            layer.forward = functools.partial(_checkpointed, layer.forward, mode == "selective")


def _checkpointed(forward: Callable[..., Any], selective: bool, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # In a graph, checkpoint drops function modes without a word. Where there are any the layer is not compiled.
    if torch.compiler.is_compiling() and not function_mode_count():
        # The compiler wants contexts to be made here, and none of those that do nothing.
        contexts: Any = {}
        if selective:
            contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
        return checkpoint(lambda *given: forward(*given, **kwargs), *args, use_reentrant=False, **contexts)
    return _run_and_keep(forward, selective, args, kwargs)


@torch.compiler.disable
def _run_and_keep(forward: Callable[..., Any], selective: bool, args: Any, kwargs: Any) -> Any:
    keep, reuse = create_selective_checkpoint_contexts(_policy) if selective else (nullcontext(), nullcontext())
    region = _Region(functools.partial(forward, *args, **kwargs), (args, kwargs), reuse)
    with saved_tensors_hooks(region.pack, _unpack), keep:
        return forward(*args, **kwargs)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op.name() in _KEPT and not _draws(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers: left out the second time, the next one would draw other numbers."""
    names = [argument.name for argument in schema_of(op).arguments] if isinstance(op, torch._ops.OpOverload) else []
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


class _Placeholder:
    """Stands in the graph for a tensor that is computed again when it is asked for."""

    __slots__ = ("__weakref__", "dtype", "region", "shape", "value")

    def __init__(self, region: _Region, tensor: Tensor) -> None:
        self.region = region
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.value: Tensor | None = None


def _unpack(placeholder: _Placeholder) -> Tensor:
    if placeholder.value is None:
        placeholder.region.run_again()
    assert placeholder.value is not None
    return placeholder.value


class _Filled(Exception):
    """All that was saved is there again; the rest of the layer need not run."""


class _Region:
    """A layer's forward for one micro-batch: what it saved, and what it takes to run it again.

    Placeholders hold the region, and the graph holds them: the region is gone when the graph is.
    """

    def __init__(self, run: Callable[[], Any], inputs: Any, context: AbstractContextManager[Any]) -> None:
        tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
        self._run: Callable[[], Any] | None = run
        self._versions = [(value, value._version) for value in tensors if not value.is_inference()]
        self._contexts = [*_thread_state(tensors), _random_state(tensors), context]
        self._saved: list[weakref.ref[_Placeholder]] = []

    def pack(self, tensor: Tensor) -> _Placeholder:
        placeholder = _Placeholder(self, tensor)
        self._saved.append(weakref.ref(placeholder))
        return placeholder

    def run_again(self) -> None:
        assert self._run is not None
        if any(value._version != version for value, version in self._versions):
            raise SetupError(
                "a layer under activation checkpointing cannot be recomputed, since its arguments were changed in"
                " place after its forward. Change a copy of them instead"
            )
        filled = 0

        def fill(tensor: Tensor) -> Tensor:
            nonlocal filled
            placeholder = self._saved[filled]()
            filled += 1
            tensor = tensor.detach()  # a node that saved its own output would never be let go of
            if placeholder is not None:
                if (tensor.shape, tensor.dtype) != (placeholder.shape, placeholder.dtype):
                    raise _unequal(
                        f"saved {tuple(tensor.shape)} of {tensor.dtype} where it had saved"
                        f" {tuple(placeholder.shape)} of {placeholder.dtype}"
                    )
                placeholder.value = tensor
            if filled == len(self._saved):
                raise _Filled
            return tensor

        with ExitStack() as stack:
            try:
                for context in self._contexts:
                    stack.enter_context(context)
                stack.enter_context(torch.enable_grad())
                stack.enter_context(saved_tensors_hooks(fill, _as_it_is))
                self._run()
            except _Filled:
                pass
            else:
                raise _unequal(f"saved {filled} tensors where it had saved {len(self._saved)}")
        self._run, self._versions, self._contexts = None, [], []


def _unequal(what: str) -> SetupError:
    return SetupError(
        f"a layer under activation checkpointing, recomputed for its backward, {what}; expected the same operations for"
        " the same arguments. Make the layer deterministic, or disable activation checkpointing"
    )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


# ---------------------------------------------------------------------- what was there in the forward


def _thread_state(tensors: Sequence[Tensor]) -> list[AbstractContextManager[Any]]:
    """Autocast and function modes as they are now, to be entered later."""
    autocasts = [
        torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in sorted({"cpu", *(value.device.type for value in tensors)})
    ]
    return [*autocasts, _function_modes(function_mode_stack())]


@contextmanager
def _function_modes(modes: Sequence[TorchFunctionMode]) -> Generator[None, None, None]:
    """Just these modes: those of backward's caller may be the same ones, which must not act twice."""
    found = _exchange(modes)
    try:
        yield
    finally:
        _exchange(found)


def _exchange(modes: Sequence[TorchFunctionMode]) -> list[TorchFunctionMode]:
    found: list[TorchFunctionMode] = function_mode_stack()
    for _ in found:
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
    return found


def _random_state(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """The random generators' states as they are now, to be entered later, and left for those of then."""
    devices = {value.device for value in tensors if value.device.type not in ("cpu", "meta")}
    return _random_states(torch.get_rng_state(), [(one, _generator(one).get_rng_state(one)) for one in devices])


@contextmanager
def _random_states(of_cpu: Tensor, of_devices: Sequence[tuple[torch.device, Tensor]]) -> Generator[None, None, None]:
    kind = of_devices[0][0].type if of_devices else None
    with torch.random.fork_rng(devices=[device for device, _ in of_devices], device_type=kind):
        torch.set_rng_state(of_cpu)
        for device, state in of_devices:
            _generator(device).set_rng_state(state, device)
        yield


def _generator(device: torch.device) -> Any:
    return torch.get_device_module(device)
