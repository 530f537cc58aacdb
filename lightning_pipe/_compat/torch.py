"""Private names of PyTorch."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _unsafe_preserve_version_counter as version_counters_preserved
from torch.autograd import profiler
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.overrides import _len_torch_function_stack as function_mode_count
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as dispatch_modes_disabled
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "EnumerableShardingSpec",
    "ShardedTensor",
    "TorchDispatchMode",
    "TreeSpec",
    "backend_of",
    "default_gloo_devices",
    "default_store",
    "dispatch_mode_stack",
    "dispatch_modes_disabled",
    "empty_optimizers_allowed",
    "function_mode_count",
    "function_mode_stack",
    "gloo_of_one_thread",
    "is_profiler_at_work",
    "is_traceable_wrapper_subclass",
    "is_view",
    "looks_for_overflow",
    "optimizers_in_backward",
    "overflow_flags",
    "pop_dispatch_mode",
    "pop_function_mode",
    "present_as_gloo",
    "push_dispatch_mode",
    "push_function_mode",
    "pytree",
    "register_pytree_node",
    "saved_tensor_hooks",
    "schema_of",
    "set_optimizer_in_backward",
    "storage_key",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version_counters_preserved",
]

_CPU = torch.device("cpu")


def backend_of(group: dist.ProcessGroup, device: torch.device = _CPU) -> Any:
    """The object that runs a group's collectives of tensors on *device*.

    Raises:
        RuntimeError: the group has none for this device.
    """
    return group._get_backend(device)


def default_gloo_devices() -> list[Any] | None:
    """The sockets of the default process group; None if it is not Gloo's own, or is wrapped."""
    try:
        default = backend_of(dist.distributed_c10d._get_default_group())
    except (AttributeError, RuntimeError, ValueError):  # another PyTorch; no backend for the CPU; no default group
        return None
    return getattr(default.options, "_devices", None) if isinstance(default, dist.ProcessGroupGloo) else None


def gloo_of_one_thread(asked: Any, devices: list[Any]) -> Any:
    """A backend of Gloo's with one thread for collectives, which listens in the thread of *devices*.

    ``torch.distributed.new_group`` takes no options for Gloo: its groups have a listening thread and at least two more.

    Args:
        asked: what an extended creator of ``torch.distributed.Backend.register_backend`` is called with.
        devices: of :func:`default_gloo_devices`.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices
    options._threads = 1
    options._timeout = asked.timeout
    options.global_ranks_in_group = asked.global_ranks_in_group
    options.group_name = asked.group_id
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)


def present_as_gloo(group: Any) -> None:
    """Let ``torch.distributed.get_backend`` say ``gloo`` of a group that a registered backend made."""
    gloo = dist.ProcessGroup.BackendType.GLOO
    for device in dist.Backend.backend_capability[dist.Backend.GLOO]:
        group._register_backend(torch.device(device), gloo, backend_of(group))
    group._set_default_backend(gloo)
    groups = dist.distributed_c10d._world.pg_map
    groups[group] = dist.Backend(dist.Backend.GLOO), groups[group][1]


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
    """The flags by which a scaler skips an optimizer's step, by device: 1 after an overflow, else 0.

    Args:
        scaler: whose ``unscale_`` was called for *optimizer*. It steps only if there is a flag.
        optimizer: the optimizer.
    """
    flags: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return flags


def default_store() -> dist.Store:
    """The default process group's store."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def is_profiler_at_work() -> bool:
    """Whether PyTorch's profiler is on in any thread of the process; its public question is answered per thread."""
    return profiler._is_profiler_enabled


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost pair of ``torch.autograd.graph.saved_tensors_hooks`` in this thread; None without one."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def pop_dispatch_mode(mode: Any) -> None:
    """Leave *mode*, which :func:`push_dispatch_mode` has entered last."""
    _pop_dispatch_mode(getattr(mode, "_mode_key", None))


@contextmanager
def empty_optimizers_allowed() -> Generator[None, None, None]:
    """Let optimizers be made of no parameters, as they are on a rank whose stages are all frozen.

    PyTorch refuses them and has no option for it, and the user's ``configure_optimizers`` makes them: in the body
    ``Optimizer.__init__`` is replaced.
    """
    make = torch.optim.Optimizer.__init__

    def make_also_of_none(self: torch.optim.Optimizer, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        given: Any = params if isinstance(params, torch.Tensor) else list(params)
        make(self, [{"params": []}] if isinstance(given, list) and not given else given, defaults)

    torch.optim.Optimizer.__init__ = make_also_of_none  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = make  # type: ignore[method-assign]


def looks_for_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``GradScaler.step`` leaves it to the optimizer to skip a step, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def schema_of(operator: Any) -> Any:
    """The schema of an operator's overload: its ``name``, ``arguments`` and ``is_mutable``."""
    return operator._schema


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another."""
    return tensor._is_view()


def storage_key(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """A number that no two storages have that live at the same time."""
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    key: int = storage._cdata
    return key


def optimizers_in_backward(parameter: torch.Tensor) -> list[tuple[Any, dict[str, Any]]]:
    """The optimizers that ``apply_optimizer_in_backward`` has given a parameter: classes and arguments."""
    classes = getattr(parameter, "_optimizer_classes", ())
    return list(zip(classes, getattr(parameter, "_optimizer_kwargs", ()), strict=True))


def set_optimizer_in_backward(parameter: Any, optimizer: Any, arguments: dict[str, Any]) -> None:
    """Say a parameter's optimizer as ``apply_optimizer_in_backward`` does, which TorchRec's sharders read."""
    parameter._optimizer_classes, parameter._optimizer_kwargs = [optimizer], [arguments]
