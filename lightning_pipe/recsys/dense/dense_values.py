"""Initial values of dense parameters and buffers: the first rank's on every rank, as in data parallelism."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine.common.errors import SetupError


def _dense_modules(module: nn.Module, tables: set[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Modules in the order in which they are initialized, children first, without modules inside a table's module."""
    modules: list[tuple[str, nn.Module]] = []

    def visit(name: str, current: nn.Module) -> None:
        if current in tables:
            return
        for child_name, child in current.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)
        modules.append((name, current))

    visit("", module)
    return list({id(current): (name, current) for name, current in reversed(modules)}.values())[::-1]


def _find_meta_tensor_names(module: nn.Module) -> list[str]:
    return [
        name
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    ]


def check_dense_initializable(module: nn.Module, tables: set[nn.Module]) -> None:
    """Check that every dense tensor on the meta device can be initialized."""
    for name, current in _dense_modules(module, tables):
        meta = _find_meta_tensor_names(current)
        if meta and not callable(getattr(current, "reset_parameters", None)):
            raise SetupError(
                f"{', '.join(f'{name}.{tensor_name}' if name else tensor_name for tensor_name in meta)} is on the"
                f" meta device, and {type(current).__name__} has no reset_parameters method to initialize it. Add that"
                " method, or create the module on a real device"
            )


@torch.no_grad()
def materialize_dense(module: nn.Module, tables: set[nn.Module], device: torch.device) -> None:
    """Allocate dense tensors that are on the meta device and initialize them with ``reset_parameters``.

    Draws from the global random state, in an order that depends only on the module; the caller seeds and restores that
    state. A parameter shared by several modules stays shared.
    """
    materialized: dict[int, torch.Tensor] = {}
    for _, current in _dense_modules(module, tables):
        meta = _find_meta_tensor_names(current)
        for name in meta:
            tensor = getattr(current, name)
            if id(tensor) not in materialized:
                empty = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                materialized[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            setattr(current, name, materialized[id(tensor)])
        if meta:
            current.reset_parameters()  # type: ignore[operator]


@torch.no_grad()
def broadcast_from_first_rank(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors with those of the group's first rank. Collective: shapes and order agree on all ranks."""
    if group.size() == 1:
        return
    for tensor in tensors:
        sent = tensor.detach().contiguous()  # copies a channels-last weight, for example, but not a contiguous one
        dist.broadcast(sent, group_src=0, group=group)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)
