"""PyTorch's thread-local settings, transferred from the main thread to a worker.

Grad mode, inference mode, autocast, function modes (such as the default device), dispatch modes, saved-tensor hooks and
the current device are thread-local; a worker with its own settings would compute different results. Settings of the
whole process (default dtype, intra-op threads, deterministic flags, the CPU generator) are never changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from lightning_pipe._compat.torch import (
    dispatch_mode_stack,
    function_mode_stack,
    get_active_saved_tensor_hooks,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)

_UNCHANGED = nullcontext()


class TorchThreadState(NamedTuple):
    """Snapshot of a thread's settings. Two snapshots are equal if a task would see no difference."""

    grad: bool
    inference: bool
    autocast_cpu: torch.dtype | None
    autocast_cuda: torch.dtype | None
    autocast_cache: bool
    function_modes: Sequence[Any]
    dispatch_modes: Sequence[Any]
    saved_tensor_hooks: Any
    cuda_device: int | None


def get_thread_state() -> TorchThreadState:
    """Take a snapshot of the calling thread's settings."""
    return TorchThreadState(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        torch.is_autocast_cache_enabled(),
        function_mode_stack(),  # type: ignore[no-untyped-call]
        dispatch_mode_stack(),
        get_active_saved_tensor_hooks(),
        torch.cuda.current_device() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    )


def use_thread_state(state: TorchThreadState) -> AbstractContextManager[None]:
    """Run the body of the context under *state*, and restore the thread's own settings afterwards."""
    current = get_thread_state()
    return _UNCHANGED if current == state else _apply_thread_state(state, current)


@contextmanager
def _apply_thread_state(state: TorchThreadState, current: TorchThreadState) -> Iterator[None]:
    with ExitStack() as stack:
        if state.inference != current.inference:
            stack.enter_context(torch.inference_mode(state.inference))
        # Inference mode changes grad mode too, so grad mode is set after it.
        stack.enter_context(torch.set_grad_enabled(state.grad))
        for device, dtype in (("cpu", state.autocast_cpu), ("cuda", state.autocast_cuda)):
            if dtype is not None or torch.is_autocast_enabled(device):
                stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=state.autocast_cache)
                )
        if state.saved_tensor_hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*state.saved_tensor_hooks))
        if state.cuda_device is not None and state.cuda_device != current.cuda_device:
            stack.enter_context(torch.cuda.device(state.cuda_device))
        # A worker starts with empty mode stacks. Modes are pushed directly, since not every mode can be entered twice.
        for mode in state.function_modes:
            push_function_mode(mode)  # type: ignore[no-untyped-call]
            stack.callback(pop_function_mode)
        for dispatch_mode in state.dispatch_modes:
            push_dispatch_mode(dispatch_mode)
            stack.callback(pop_dispatch_mode, dispatch_mode)
        yield
