"""Private names of PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import _unsafe_preserve_version_counter as version_counters_preserved
from torch.autograd import profiler
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.fx.experimental import _config as shape_options
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.overrides import _len_torch_function_stack as function_mode_count
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
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
    "ALL_TO_ALL_SINGLE",
    "COMPILED",
    "GROUPED_MM",
    "BatchNorm",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "EnumerableShardingSpec",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "ShardedTensor",
    "TorchDispatchMode",
    "TreeSpec",
    "allow_dynamic_sizes_below_two",
    "allow_empty_optimizers",
    "copy_sharded_tensor",
    "device_from_to_args",
    "dispatch_mode_stack",
    "flatten_state_dict",
    "foreach_mul_",
    "foreach_norms",
    "forget_optimizers_in_backward",
    "fsspec_writer",
    "function_mode_count",
    "function_mode_stack",
    "get_active_saved_tensor_hooks",
    "get_backend_object",
    "get_ddp_bucket_parameters",
    "get_default_process_group_store",
    "get_found_inf_per_device",
    "get_operator_schema",
    "get_optimizers_in_backward",
    "get_overload_packet",
    "get_process_group_timeout",
    "get_reset_parameters_method",
    "get_tensor_backward_hooks",
    "has_idle_dataloader_workers",
    "is_profiler_enabled",
    "is_view",
    "leak_cpp_references",
    "make_tensor_subclass",
    "pop_dispatch_mode",
    "pop_function_mode",
    "push_dispatch_mode",
    "push_function_mode",
    "pytree",
    "rebuild_buckets",
    "register_pytree_node",
    "set_donated_buffers",
    "set_element",
    "set_optimizer_in_backward",
    "storage_key",
    "supports_amp_scaling",
    "trace_compiled_functions_as_plain",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version_counters_preserved",
    "will_execute_node",
]

# The method of process groups has another name before PyTorch 2.13.
ALL_TO_ALL_SINGLE = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
# Name under which the module that ``torch.compile(module)`` returns has the module.
COMPILED = "_orig_mod"
# Operation of ``torch.nn.functional.grouped_mm``.
GROUPED_MM = torch.ops.aten._grouped_mm.default

_CPU = torch.device("cpu")


def get_backend_object(group: dist.ProcessGroup, device: torch.device = _CPU) -> Any:
    """Backend object that runs the collectives of *group* for tensors on *device* (default CPU)."""
    return group._get_backend(device)


def get_process_group_timeout(group: Any = None) -> timedelta:
    """Time limit of a collective of *group* (default: the default group's). PyTorch has no function that returns it."""
    group = dist.distributed_c10d._get_default_group() if group is None else group
    limits = []
    for device in group._device_types:
        with suppress(AttributeError, RuntimeError):  # a backend without options
            limits.append(get_backend_object(group, device).options._timeout)
    return min(limits, default=dist.distributed_c10d.default_pg_timeout)


def leak_cpp_references(tensors: list[torch.Tensor]) -> None:
    """Add a C++ reference to each tensor that lasts until the process ends."""
    if tensors:
        # Leaked: the references must outlive the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch._C.ScriptList(tensors)))


def get_found_inf_per_device(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, torch.Tensor]:
    """Flags for which a scaler skips the step of *optimizer*, by device: 1 after an overflow, otherwise 0."""
    flags: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return flags


def get_default_process_group_store() -> dist.Store:
    """Store of the default process group."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def fsspec_writer(url: str, **arguments: Any) -> Any:
    """Return the ``FsspecWriter`` of ``torch.distributed.checkpoint``."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(url, **arguments)


def is_profiler_enabled() -> bool:
    """Return True if PyTorch's profiler is on in any thread. The public API only covers the calling thread."""
    return profiler._is_profiler_enabled


def get_active_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Innermost pair of ``torch.autograd.graph.saved_tensors_hooks`` in this thread; None if no hooks are active."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def pop_dispatch_mode(mode: Any) -> None:
    """Leave *mode*, which must be the mode last entered with :func:`push_dispatch_mode`."""
    _pop_dispatch_mode(getattr(mode, "_mode_key", None))


@contextmanager
def allow_empty_optimizers() -> Generator[None, None, None]:
    """Allow the user's optimizers without parameters, for ranks whose stages are all frozen; PyTorch rejects them."""
    make = torch.optim.Optimizer.__init__

    def init_allowing_no_parameters(
        self: torch.optim.Optimizer, params: Iterable[Any], defaults: dict[str, Any]
    ) -> None:
        parameters: Any = params if isinstance(params, torch.Tensor) else list(params)
        make(self, [{"params": []}] if isinstance(parameters, list) and not parameters else parameters, defaults)

    torch.optim.Optimizer.__init__ = init_allowing_no_parameters  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = make  # type: ignore[method-assign]


def supports_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``GradScaler.step`` lets the optimizer itself skip steps after an overflow, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def foreach_mul_(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors of one device and type in place, in one kernel."""
    torch._foreach_mul_(tensors, factor)


def foreach_norms(tensors: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """2-norm of each tensor of one device and type, in one kernel."""
    return torch._foreach_norm(tensors)


def get_overload_packet(operator: Any) -> Any:
    """Operator of ``torch.ops`` whose overload a dispatch mode sees."""
    return operator._overloadpacket


def device_from_to_args(*args: Any, **kwargs: Any) -> torch.device | None:
    """Device that a call of ``nn.Module.to`` with these arguments names."""
    device: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device


def get_tensor_backward_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """Hooks that ``Tensor.register_hook`` has registered, as the tensor's own dictionary; None without any."""
    return tensor._backward_hooks


def get_reset_parameters_method(module: torch.nn.Module) -> Callable[[], Any] | None:
    """Method that initializes a module's parameters; ``nn.MultiheadAttention`` has it under a private name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def get_operator_schema(operator: Any) -> Any:
    """Schema of an operator overload, with its ``name``, ``arguments`` and ``is_mutable``."""
    return operator._schema


def is_view(tensor: torch.Tensor) -> bool:
    """Return True if autograd treats *tensor* as a view of another tensor."""
    return tensor._is_view()


def make_tensor_subclass(kind: type[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a subclass over the same memory, which is not a view of *tensor*."""
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor)
    return made


def storage_key(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """Key of a storage, unique among all storages that exist at the same time."""
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    key: int = storage._cdata
    return key


def will_execute_node(node: Any) -> bool:
    """Return True if the running backward will run this node of the graph."""
    return torch._C._will_engine_execute_node(node)


def set_donated_buffers(donated: bool) -> bool:
    """Set whether graphs that this thread compiles may overwrite saved tensors; return the previous setting."""
    import torch._functorch.config

    before: bool = torch._functorch.config.donated_buffer
    torch._functorch.config.donated_buffer = donated
    return before


def trace_compiled_functions_as_plain() -> Any:
    """Context in which ``torch.fx`` traces the original of a compiled function, instead of raising an error."""
    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)


def allow_dynamic_sizes_below_two() -> Any:
    """Context in which an exported program can have sizes of 0 and 1: by default, they are at least 2."""
    return shape_options.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def compile_and_package(program: Any, file: str | Path) -> None:
    """Compile an exported program ahead of time to a package. From a name, PyTorch would expect the suffix .pt2.

    All parameters and buffers are kept as constants, which can be replaced: PyTorch would write small ones as literals.
    """
    keep_constants: Any = {"always_keep_tensor_constants": True}
    with allow_dynamic_sizes_below_two(), Path(file).open("wb") as package:
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=keep_constants)


def copy_sharded_tensor(tensor: ShardedTensor, values: Sequence[torch.Tensor]) -> ShardedTensor:
    """Return a tensor that is sharded in the same way, with other values of this rank's shards."""
    shards = [
        Shard(value.to(shard.tensor.device), shard.metadata)
        for value, shard in zip(values, tensor.local_shards(), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, tensor.metadata(), process_group=tensor._process_group
    )


def get_optimizers_in_backward(parameter: torch.Tensor) -> list[tuple[Any, dict[str, Any]]]:
    """Optimizers that ``apply_optimizer_in_backward`` attached to a parameter, as pairs of class and arguments."""
    classes = getattr(parameter, "_optimizer_classes", ())
    return list(zip(classes, getattr(parameter, "_optimizer_kwargs", ()), strict=True))


def set_optimizer_in_backward(parameter: Any, optimizer: Any, arguments: dict[str, Any]) -> None:
    """Attach an optimizer to a parameter as ``apply_optimizer_in_backward`` does, for TorchRec's sharders."""
    parameter._optimizer_classes, parameter._optimizer_kwargs = [optimizer], [arguments]


def forget_optimizers_in_backward(parameter: Any) -> None:
    """Release the optimizers that ``apply_optimizer_in_backward`` has made for a parameter, with their state."""
    parameter._in_backward_optimizers = []


def get_ddp_bucket_parameters(model: DistributedDataParallel) -> list[list[torch.Tensor]]:
    """Parameters in the order of their gradients in each bucket that ranks sum."""
    return [bucket.parameters() for bucket in model.reducer._get_zeros_like_grad_buckets()]


def rebuild_buckets(model: DistributedDataParallel) -> bool:
    """Order the buckets as the first backward pass produced the gradients; False if that has been done before."""
    return bool(model.reducer._rebuild_buckets())


def has_idle_dataloader_workers(loader: Any) -> bool:
    """Return True if a loader's persistent workers have been started and wait for its next iteration."""
    return isinstance(loader, torch.utils.data.DataLoader) and loader._iterator is not None
