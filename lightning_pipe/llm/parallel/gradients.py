"""Norm, clipping and scaling of the gradients of one model whose stages and shards are on several ranks.

Each function takes parameters that are plain tensors or DTensors (FSDP2, tensor parallel), and works on the part that
this rank holds. Ranks exchange the values that all need, which are bitwise equal on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from lightning_pipe._compat.torch import foreach_mul_, foreach_norms
from lightning_pipe.engine.ranks.object_collectives import collective_device

_CPU = torch.device("cpu")
# Types of gradients, sent to other stages as 1 + index. 0 means no gradient.
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class GradientNorm:
    """Norm over the gradients of all stages and shards, equal to that of one device with the whole model.

    The total is computed as in ``torch.nn.utils.get_total_norm``: a norm of the norms of single gradients, in the
    optimizer's order. The stages exchange the norms of their gradients, and each computes the total from all of them.
    Without sharding the result equals the single-device value bitwise; with sharding it differs by the rounding of the
    shards' sums.

    All ranks of the pipeline call it together, and a parameter that several of them hold is passed by one. Among ranks
    that share a sharded parameter, either all have its gradient or none, which FSDP2 ensures.
    """

    def __init__(
        self, order: Sequence[str], parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None
    ) -> None:
        self._group = group
        self._count = len(order)
        self._device = _CPU if group is None else collective_device(group, _CPU)
        positions = {name: position for position, name in enumerate(order)}
        self._parameters = {positions[name]: parameter for name, parameter in parameters.items()}

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Total norm of the current gradients; 0 if there are no gradients. Every rank of the group must call it."""
        device = next((parameter.device for parameter in self._parameters.values()), self._device)
        norms, zero = _compute_whole_gradient_norms(self._parameters), torch.zeros((), device=device)
        types = [1 + _TYPES.index(norms[at].dtype) if at in norms else 0 for at in range(self._count)]
        # Exact: float64 represents every value of these types, and so does the type they are promoted to.
        row = torch.stack([norms.get(at, zero) for at in range(self._count)]).to(self._device, torch.float64)
        norm_table = torch.stack([row, torch.tensor(types).to(row, non_blocking=True)])
        if self._group is not None:
            # Each position is non-zero on one rank only, so the sum copies its value exactly, in any order.
            dist.all_reduce(norm_table, group=self._group)
        codes = [int(code) for code in norm_table[1].tolist()]
        norms_by_code = {
            code: norm_table[0].to(device, _TYPES[code - 1], non_blocking=True).unbind() for code in set(codes) if code
        }
        # The norm of a scalar is its absolute value, so get_total_norm of the norms is the total norm.
        all_norms = [norms_by_code[code][position] for position, code in enumerate(codes) if code]
        return torch.nn.utils.get_total_norm(all_norms).to(device)


@torch.no_grad()
def clip_grads_with_norm(parameters: Iterable[nn.Parameter], max_norm: float, total_norm: Tensor) -> None:
    """Scale gradients down, in place, to a total norm of at most ``max_norm``.

    The factor is that of ``torch.nn.utils.clip_grads_with_norm_``, and the gradients are bitwise the same. They are
    multiplied even if the factor is 1, which avoids synchronizing with the device.
    """
    factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    for gradients in group_by_device_and_dtype(_collect_local_gradients(parameters)):
        foreach_mul_(gradients, factor.to(gradients[0].device))


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place, once each; bitwise equal to ``grad.mul_(factor)``."""
    for gradients in group_by_device_and_dtype(_collect_local_gradients(parameters)):
        if gradients[0].device.type == "cpu":
            # The CPU's foreach kernel is also a loop, and in addition rounds the factor to half precision first.
            for gradient in gradients:
                gradient.mul_(factor)
        else:
            foreach_mul_(gradients, factor)


def force_sum_reduction(module: nn.Module) -> None:
    """Make FSDP2 and composable ``replicate`` sum gradients over ranks; by default they average.

    A loss that is a sum over tokens has gradients that add up, and they are divided once by the number of all tokens.
    Setting the divide factor alone is not enough: it requests a reduction that Gloo does not support.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def _compute_whole_gradient_norms(parameters: Mapping[int, nn.Parameter]) -> dict[int, Tensor]:
    """Norm of each whole gradient, by position; norms of shards are combined over the meshes they are sharded on."""
    gradients = {
        position: _reduce_partial_gradient(parameter.grad)
        for position, parameter in parameters.items()
        if parameter.grad is not None
    }
    norms = dict(
        zip(gradients, _compute_tensor_norms([local_tensor(gradient) for gradient in gradients.values()]), strict=True)
    )
    sharded: defaultdict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = defaultdict(list)
    for position, gradient in gradients.items():
        if isinstance(gradient, DTensor):
            sharded[gradient.device_mesh, _get_sharded_mesh_dims(gradient)].append(position)
    for (mesh, dimensions), positions in sharded.items():
        joined = torch.stack([norms[position].double() for position in positions])
        for dimension in dimensions:
            dist.all_reduce(joined.square_(), group=mesh.get_group(dimension))
            joined.sqrt_()
        norms |= {position: norm.to(norms[position].dtype) for position, norm in zip(positions, joined, strict=True)}
    return norms


def _compute_tensor_norms(parts: Sequence[Tensor]) -> list[Tensor]:
    """Norm of each tensor, in order; 0 for a tensor without elements, such as an empty shard."""
    norms = {id(part): part.new_zeros(()) for part in parts}
    for group in group_by_device_and_dtype([part for part in parts if part.numel()]):
        norms |= zip(map(id, group), foreach_norms(group), strict=True)
    return [norms[id(part)] for part in parts]


def _get_sharded_mesh_dims(gradient: DTensor) -> tuple[int, ...]:
    """Mesh dimensions over which the gradient is sharded; it is replicated over the others."""
    return tuple(index for index, placement in enumerate(gradient.placements) if not placement.is_replicate())


def _reduce_partial_gradient(gradient: Tensor) -> Tensor:
    """The gradient, with partial sums that tensor parallelism left summed over ranks."""
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])
    return gradient


def local_tensor(gradient: Tensor) -> Tensor:
    """This rank's part of a gradient, sharing its memory."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _collect_local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of the existing gradients."""
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]


def group_by_device_and_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Groups of one device and dtype, each of which a foreach operation handles in one kernel."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()
