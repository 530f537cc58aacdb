"""Gradients as one model's, although stages and shards hold them: their norm, clipping and scaling.

Each function takes parameters that are plain tensors or DTensors (FSDP2, tensor parallel) and works on the part that
this rank holds; what all ranks must know is exchanged, and is the same to the bit on each.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from lightning_pipe.engine.common.errors import SetupError

__all__ = ["GradientNorm", "clip_by_norm", "force_sum_reduction", "scale_gradients"]

# Types of gradients as they are told to other stages. 0 says that there is no gradient.
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class GradientNorm:
    """The norm over the gradients of all stages and shards, as one device with the whole model would have it.

    The total is ``torch.nn.utils.get_total_norm``'s: a norm of the norms of single gradients, in the optimiser's
    order. So the stages tell each other the norms of their gradients, and each computes the total from all of them:
    without sharding that is the single-device value to the bit, with it within the rounding of the shards' sums.

    Every rank of the pipeline makes one, which compares what they hold, and calls it together with the others. Ranks
    that share a sharded parameter all have its gradient or none has, as FSDP2 sees to.

    Args:
        order: names of all parameters of the unsplit model, in the order in which one device's optimiser has them.
        parameters: this rank's, by those names. Of a parameter that several stages hold (tied embeddings) only one
            stage hands in its copy, so that it counts once.
        group: the ranks that together hold the model's stages, one of each; None where this rank holds them all.

    Raises:
        SetupError: on every rank, if their orders differ, or a parameter is in none of the stages or in several.
    """

    def __init__(
        self, order: Sequence[str], parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None
    ) -> None:
        self._group = group
        self._count = len(order)
        self._device = _communication_device(group)
        positions = {name: position for position, name in enumerate(order)}
        unknown = sorted(set(parameters) - set(positions))
        self._check_orders(order, unknown)
        self._check_holders(order, [positions[name] for name in parameters])
        self._parameters = {positions[name]: parameter for name, parameter in parameters.items()}

    @torch.no_grad()
    def __call__(self, norm_type: float = 2.0) -> Tensor:
        """The total norm of the gradients there are now; 0 where there are none. Every rank of the group calls it.

        Args:
            norm_type: p of the p-norm, above 0; infinity for the largest absolute value.

        Returns:
            A scalar on the device of this rank's parameters, in the type that ``get_total_norm`` gives.
        """
        if not norm_type > 0:
            raise SetupError(f"the gradient norm's type is {norm_type}; needed is a number above 0, such as 2.0 or inf")
        own = torch.zeros(2, self._count, dtype=torch.float64, device=self._device)
        norms = _norms(self._parameters, norm_type)
        if norms:
            # Exact: every type fits into float64, and into what several types are promoted to.
            own[0, list(norms)] = torch.stack([norm.to(self._device) for norm in norms.values()]).to(own)
            own[1, list(norms)] = torch.tensor([1 + _TYPES.index(norm.dtype) for norm in norms.values()]).to(own)
        if self._group is not None:
            # Each position is one rank's and 0 elsewhere, so the sum is a copy of it, whatever the order.
            dist.all_reduce(own, group=self._group)
        home = next((parameter.device for parameter in self._parameters.values()), self._device)
        types = [int(code) for code in own[1].tolist()]
        typed = {code: own[0].to(home, _TYPES[code - 1]).unbind() for code in set(types) if code}
        # The norm of one number is that number, so this goes on where get_total_norm itself has the norms.
        every = [typed[code][position] for position, code in enumerate(types) if code]
        return torch.nn.utils.get_total_norm(every, norm_type).to(home)

    def _check_orders(self, order: Sequence[str], unknown: list[str]) -> None:
        """All ranks raise or none: the exchange of norms takes the same length and meaning on each."""
        digest = int.from_bytes(hashlib.sha256("\n".join(order).encode()).digest()[:7], "big")
        found = torch.tensor([digest, -digest, len(unknown)], device=self._device)
        if self._group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        largest, smallest, unknowns = found.tolist()
        if unknowns:
            raise SetupError(
                f"a rank hands in {unknowns} parameter(s) that the order of {self._count} lacks (this rank:"
                f" {unknown}); needed are the names of the whole, unsplit model, in the order and in each stage"
            )
        if largest != -smallest:
            raise SetupError(
                f"the ranks of a pipeline give different orders of parameters (this one {self._count}, from"
                f" {order[0] if order else None!r} on); needed is the unsplit model's on each: build the same model and"
                " optimiser everywhere"
            )

    def _check_holders(self, order: Sequence[str], held: list[int]) -> None:
        holders = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        holders[held] = 1
        if self._group is not None:
            dist.all_reduce(holders, group=self._group)
        for name, count in zip(order, holders.tolist(), strict=True):
            if count != 1:
                raise SetupError(
                    f"the parameter {name!r} is handed in by {count} ranks of the pipeline; needed is one, so that it"
                    " counts once in the gradient norm: give each parameter of the order to one stage, and of tied"
                    " copies all but one to none"
                )


@torch.no_grad()
def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, total_norm: Tensor) -> None:
    """Scale gradients down, in place, to a total norm of at most ``max_norm``.

    By the same factor as ``torch.nn.utils.clip_grads_with_norm_``, and to the bit the same gradients: those are
    multiplied also where the factor is 1, which spares the device a wait.

    Args:
        parameters: this rank's; those without a gradient are passed over.
        max_norm: the norm to clip to, in the gradients' own unit.
        total_norm: scalar, of all stages and shards: :class:`GradientNorm`'s.
    """
    factor = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    for gradients in _alike(_local(parameters)):
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place, each once: to the bit what ``grad.mul_(factor)`` gives."""
    for gradients in _alike(_local(parameters)):
        if gradients[0].device.type == "cpu":
            # There the multiplication of a list is a loop too, but one that first rounds the factor to half precision.
            for gradient in gradients:
                gradient.mul_(factor)
        else:
            torch._foreach_mul_(gradients, factor)


def force_sum_reduction(module: nn.Module) -> None:
    """Let FSDP2 and composable ``replicate`` sum gradients over ranks; by default they average.

    A loss that is a sum over tokens has gradients that add up, to be divided once by the number of all tokens. The
    divide factor alone is not enough: it asks for a reduction that Gloo does not have.

    Args:
        module: a module with sharded or replicated modules in it, or none.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def _norms(parameters: Mapping[int, nn.Parameter], norm_type: float) -> dict[int, Tensor]:
    """The norm of each whole gradient, by position; shards' are joined over the meshes that they are sharded on."""
    gradients = {
        position: _reduced(parameter.grad) for position, parameter in parameters.items() if parameter.grad is not None
    }
    norms = dict(
        zip(gradients, _part_norms([_part(gradient) for gradient in gradients.values()], norm_type), strict=True)
    )
    sharded: defaultdict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = defaultdict(list)
    for position, gradient in gradients.items():
        if isinstance(gradient, DTensor):
            sharded[gradient.device_mesh, _sharding_dimensions(gradient)].append(position)
    for (mesh, dimensions), positions in sharded.items():
        joined = torch.stack([norms[position].double() for position in positions])
        for dimension in dimensions:
            joined = _join(joined, norm_type, mesh.get_group(dimension))
        norms |= {position: norm.to(norms[position].dtype) for position, norm in zip(positions, joined, strict=True)}
    return norms


def _part_norms(parts: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each tensor, in their order; 0 of one without elements, as a shard may be."""
    norms = {id(part): part.new_zeros(()) for part in parts}
    for alike in _alike([part for part in parts if part.numel()]):
        norms |= zip(map(id, alike), torch._foreach_norm(alike, norm_type), strict=True)
    return [norms[id(part)] for part in parts]


def _join(norms: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """Norms of vectors whose parts are on the ranks of a group, from the norms of the parts."""
    if group.size() == 1:
        return norms
    if norm_type == torch.inf:
        # A maximum over ranks may lose a NaN, a sum does not.
        unknown = norms.isnan().to(norms)
        dist.all_reduce(unknown, group=group)
        largest = norms.nan_to_num(nan=0.0, posinf=torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return largest.masked_fill_(unknown > 0, torch.nan)
    powers = norms**norm_type
    dist.all_reduce(powers, group=group)
    return powers ** (1 / norm_type)


def _sharding_dimensions(gradient: DTensor) -> tuple[int, ...]:
    """Dimensions of the mesh over which the gradient is spread; over the others each rank has the same."""
    return tuple(index for index, placement in enumerate(gradient.placements) if not placement.is_replicate())


def _reduced(gradient: Tensor) -> Tensor:
    """The gradient with what tensor parallelism has left to be summed over ranks summed."""
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])
    return gradient


def _part(gradient: Tensor) -> Tensor:
    """What this rank has of a gradient, sharing its memory."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _local(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of the gradients that there are."""
    return [_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Groups of one device and type: only such a list is one kernel."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()


def _communication_device(group: dist.ProcessGroup | None) -> torch.device:
    return torch.device("cuda" if group is not None and dist.get_backend(group) == "nccl" else "cpu")
