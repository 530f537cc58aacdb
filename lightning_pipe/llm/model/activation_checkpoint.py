"""Activation checkpointing: layers that save little in the forward and recompute the rest in the backward.

``torch.utils.checkpoint`` recomputes a region in every call of the autograd engine. A backward in two parts, as in
zero-bubble schedules and DualPipeV, calls the engine once for a layer's inputs and then once for each group of its
parameters: a layer with seven matrices would run about ten times, and selective checkpointing fails with "Trying to
backward an extra time". Here a layer is recomputed once, when the first of its tensors is needed. The recomputed
tensors are kept like the graph's own tensors, until the graph releases them.

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
    get_operator_schema,
    pop_function_mode,
    push_function_mode,
    tree_leaves,
)
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number
from lightning_pipe.llm.model.hf_experts import has_routers
from lightning_pipe.llm.model.routing_replay import LayerRouting, current_routing
from lightning_pipe.llm.model.stage_module import PassThroughModule, StageModule

Mode = Literal["full", "selective"]

# Operations that are expensive to recompute: matrix products, attention, and exchanges between ranks. Listed by name,
# since some are registered only when their package is imported.
_SAVED_OPS = {
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
        every_n_layers: distance between checkpointed layers (default 1: all layers). 2 checkpoints every second layer.

    Raises:
        SetupError: the mode is unknown, or ``every_n_layers`` is below 1.
    """

    mode: Mode = "full"
    every_n_layers: int = 1

    def __post_init__(self) -> None:
        check_choice("activation_checkpoint.mode", self.mode, get_args(Mode))
        check_whole_number("activation_checkpoint.every_n_layers", self.every_n_layers, 1)


def apply_activation_checkpoint(
    stage: StageModule, layers: Sequence[str], mode: Mode = "full", every_n_layers: int = 1
) -> None:
    """Make a stage's layers recompute their activations in the backward, in place.

    Gradients stay the same, bit for bit on one device: random numbers, choices of experts, autocast and function modes
    (including those of context parallelism) are restored to those of the forward. Names of parameters and modules stay
    the same, too, since only ``layer.forward`` is replaced. A layer is recomputed once for each micro-batch under any
    schedule. Under a schedule with two-part backwards, the recomputed tensors are held from the first part to the
    second.

    Call it before layers are compiled and before ``fully_shard``. In compiled layers the compiler recomputes, with the
    same two modes (``torch.utils.checkpoint`` inside a graph). If function modes are active, as with context
    parallelism, checkpointed layers run uncompiled.
    """
    for name in layers[::every_n_layers]:
        layer: Any = stage.module.get_submodule(name)
        if not isinstance(layer, PassThroughModule):
            # A partial of a bound method is copied with the layer, so that a copy runs its own forward.
            layer.forward = functools.partial(_checkpointed, layer.forward, mode == "selective", has_routers(layer))


def _checkpointed(forward: Callable[..., Any], selective: bool, routes: bool, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Inside a graph, `checkpoint` silently drops function modes, so a layer with active modes is not compiled.
    if torch.compiler.is_compiling() and not function_mode_count():
        # The compiler requires contexts to be created here, and does not accept null contexts.
        contexts: Any = {}
        if selective:
            contexts = {
                "context_fn": functools.partial(create_selective_checkpoint_contexts, _decide_save_or_recompute)
            }
        return checkpoint(lambda *inputs: forward(*inputs, **kwargs), *args, use_reentrant=False, **contexts)
    return _run_eager_checkpoint(forward, selective, routes, args, kwargs)


@torch.compiler.disable
def _run_eager_checkpoint(forward: Callable[..., Any], selective: bool, routes: bool, args: Any, kwargs: Any) -> Any:
    keep, reuse = (
        create_selective_checkpoint_contexts(_decide_save_or_recompute) if selective else (nullcontext(), nullcontext())
    )
    routing = LayerRouting() if routes and current_routing() is None else nullcontext()
    region = _CheckpointedForward(functools.partial(forward, *args, **kwargs), (args, kwargs), (reuse, routing))
    with saved_tensors_hooks(region.pack_saved_tensor, _unpack_or_recompute), keep, routing:
        return forward(*args, **kwargs)


def _decide_save_or_recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op.name() in _SAVED_OPS and not _op_uses_random_numbers(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _op_uses_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operation draws random numbers. Skipping it would change the numbers of later operations."""
    names = (
        [argument.name for argument in get_operator_schema(op).arguments]
        if isinstance(op, torch._ops.OpOverload)
        else []
    )
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


class _SavedTensorPlaceholder:
    """Placeholder in the graph for a tensor that is recomputed when it is needed."""

    __slots__ = ("__weakref__", "dtype", "region", "shape", "value")

    def __init__(self, region: _CheckpointedForward, tensor: Tensor) -> None:
        self.region = region
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.value: Tensor | None = None


def _unpack_or_recompute(placeholder: _SavedTensorPlaceholder) -> Tensor:
    if placeholder.value is None:
        placeholder.region.run_again()
    assert placeholder.value is not None
    return placeholder.value


class _StopRecomputationError(Exception):
    """Raised when all saved tensors have been recomputed, to skip the rest of the layer."""


class _CheckpointedForward:
    """A layer's forward for one micro-batch: its saved tensors, and the state to run it again.

    The graph holds the placeholders, which hold the region, so the region is freed with the graph.
    """

    def __init__(self, run: Callable[[], Any], inputs: Any, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
        self._run: Callable[[], Any] | None = run
        self._versions = [(value, value._version) for value in tensors if not value.is_inference()]
        self._contexts = [*_make_thread_state_contexts(tensors), _capture_rng_for_restore(tensors), *contexts]
        self._saved: list[weakref.ref[_SavedTensorPlaceholder]] = []

    def pack_saved_tensor(self, tensor: Tensor) -> _SavedTensorPlaceholder:
        placeholder = _SavedTensorPlaceholder(self, tensor)
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

        def fill_placeholder(tensor: Tensor) -> Tensor:
            nonlocal filled
            placeholder = self._saved[filled]()
            filled += 1
            tensor = tensor.detach()  # a node that saved its own output would never be freed
            if placeholder is not None:
                if (tensor.shape, tensor.dtype) != (placeholder.shape, placeholder.dtype):
                    raise _make_recompute_mismatch_error(
                        f"saved {tuple(tensor.shape)} of {tensor.dtype} where it had saved"
                        f" {tuple(placeholder.shape)} of {placeholder.dtype}"
                    )
                placeholder.value = tensor
            if filled == len(self._saved):
                raise _StopRecomputationError
            return tensor

        with ExitStack() as stack:
            try:
                for context in self._contexts:
                    stack.enter_context(context)
                stack.enter_context(torch.enable_grad())
                stack.enter_context(saved_tensors_hooks(fill_placeholder, lambda tensor: tensor))
                self._run()
            except _StopRecomputationError:
                pass
            else:
                raise _make_recompute_mismatch_error(f"saved {filled} tensors where it had saved {len(self._saved)}")
        self._run, self._versions, self._contexts = None, [], []


def _make_recompute_mismatch_error(difference: str) -> SetupError:
    return SetupError(
        f"a layer under activation checkpointing, recomputed for its backward, {difference}; expected the same"
        " operations for the same arguments. Make the layer deterministic, or disable activation checkpointing"
    )


# ---------------------------------------------------------------------- what was there in the forward


def _make_thread_state_contexts(tensors: Sequence[Tensor]) -> list[AbstractContextManager[Any]]:
    """Contexts that restore the current autocast and function modes."""
    autocasts = [
        torch.autocast(
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in sorted({"cpu", *(value.device.type for value in tensors)})
    ]
    return [*autocasts, _temporary_function_modes(function_mode_stack())]


@contextmanager
def _temporary_function_modes(modes: Sequence[TorchFunctionMode]) -> Generator[None, None, None]:
    """Activate only these modes: modes of the backward's caller may be among them, and must not act twice."""
    previous = _set_function_mode_stack(modes)
    try:
        yield
    finally:
        _set_function_mode_stack(previous)


def _set_function_mode_stack(modes: Sequence[TorchFunctionMode]) -> list[TorchFunctionMode]:
    previous: list[TorchFunctionMode] = function_mode_stack()
    for _ in previous:
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
    return previous


def _capture_rng_for_restore(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Context that restores the random generators' current states, and on exit those at its entry."""
    devices = {value.device for value in tensors if value.device.type not in ("cpu", "meta")}
    return _temporary_rng_states(
        torch.get_rng_state(), [(device, _get_device_rng_module(device).get_rng_state(device)) for device in devices]
    )


@contextmanager
def _temporary_rng_states(
    cpu_state: Tensor, device_states: Sequence[tuple[torch.device, Tensor]]
) -> Generator[None, None, None]:
    kind = device_states[0][0].type if device_states else None
    with torch.random.fork_rng(devices=[device for device, _ in device_states], device_type=kind):
        torch.set_rng_state(cpu_state)
        for device, state in device_states:
            _get_device_rng_module(device).set_rng_state(state, device)
        yield


def _get_device_rng_module(device: torch.device) -> Any:
    return torch.get_device_module(device)
