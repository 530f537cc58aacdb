"""Tensor parallelism inside a stage: ranks share the matrices of each layer, and hold all else whole.

A layer's first matrices are cut by columns, so that each rank computes some heads or features, the last by rows, and
the ranks' sums are added::

    hidden states ──► colwise ──► some heads, features ──► rowwise ──► all-reduce ──► hidden states
     (all ranks)                 (those of each rank)                                  (all ranks)

Between the two a rank sees a part of the activations. Whole parameters that are used there (Qwen3's norms of queries
and keys, in the width of one head) get a part of their gradient on each rank, which :class:`TensorGradients` sums. All
others get the same gradient on every rank, since that of the hidden states is reduced where it leaves a matrix.

Sources: Megatron-LM (arXiv 1909.08053), ``torch.distributed.tensor.parallel``, and for the words of plans
``transformers.integrations.tensor_parallel``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.parallel.tensor_plan import PARTIAL_GRADIENT, TensorPlan, resolve_tensor_plan

__all__ = ["TensorGradients", "parallelise_tensors"]

_MARK = "_tensor_parallel_partial_gradients"  # on a module whose own parameters are used on a part of activations
_SAME = 0.01  # norms that differ by a smaller part are one gradient, computed by kernels that are not deterministic


def parallelise_tensors(stage: StageModule, config: ModuleConfig, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Leave a rank its part of each matrix of a stage's layers, in place. Nothing is sent: each rank cuts its own.

    Before activation checkpointing, compilation and data parallelism. What was cut becomes a DTensor on the mesh, other
    parameters stay as they are. The stage takes and gives whole hidden states, the same on every rank of the mesh.

    The words of a plan are Hugging Face's:

    - ``colwise``: cut by columns (a linear layer's output features); the output is the rank's part.
    - ``rowwise``: cut by rows (its input features); takes a rank's part, gives the whole.
    - ``colwise_rep``: as ``colwise``, with the parts of the output gathered.
    - ``rowwise_rep``: as ``rowwise``, from a whole input.
    - ``replicate``: stays whole.
    - ``partial_gradient`` (ours): the module's own parameters stay whole, but see a part of the activations.

    A forward must take the number of heads or features from what it is given, as Hugging Face's models do
    (``view(..., -1, head_dim)``), and a matrix that holds several must have each head's parts side by side. Dropout
    between ``colwise`` and ``rowwise`` is drawn by each rank for its part; dropout elsewhere must be the same on all,
    so the ranks' random states must be.

    Args:
        stage: with its values, the same on every rank of the mesh.
        config: of the whole model.
        mesh: the ranks that share the stage: one named dimension, of the mesh that data parallelism takes its own from.
        plan: of the unsplit model, checked by :func:`~lightning_pipe.llm.parallel.tensor_plan.resolve_tensor_plan`.

    Raises:
        SetupError: what that raises, but for names that are of no module; a mesh of several dimensions.
    """
    _check_mesh(mesh)
    model = stage.module
    for name, style in resolve_tensor_plan(model, config, plan, mesh.size()).items():
        module = model.get_submodule(name)
        if isinstance(style, ParallelStyle):
            parallelize_module(module, mesh, style, src_data_rank=None)
        elif style == PARTIAL_GRADIENT:
            setattr(module, _MARK, True)


class TensorGradients:
    """Completes the gradients of whole parameters after a step's last backward: one all-reduce of a few small vectors.

    Args:
        model: what holds the stages' modules after :func:`parallelise_tensors`, data parallelism and all else.
        mesh: that of :func:`parallelise_tensors`.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        _check_mesh(mesh)
        self._model = model
        self._group = mesh.get_group()
        self._dimension = mesh.mesh_dim_names[0]  # type: ignore[index]
        self._device = mesh.device_type
        self._checked = False

    @torch.no_grad()
    def finish(self) -> None:
        """Sum what each rank has a part of. Once for each optimiser step, before gradients are scaled or measured.

        After the data-parallel reduction, and after all batches that are accumulated, or what is summed would be summed
        again. The first time (that has no NaN or infinity in it), the ranks compare their gradients.

        Raises:
            SetupError: on every rank of the mesh: a parameter that the plan leaves whole has another gradient on
                another rank, or one that it calls partial has the same.
        """
        whole: dict[str, Tensor] = {}
        incomplete: dict[str, Tensor] = {}
        for name, parameter, is_partial in self._uncut():
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                # A style of the user's own that has left the sum to be done.
                gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
                parameter.grad = gradient
            found = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            (incomplete if is_partial else whole)[name] = found
        if not self._checked:
            self._checked = self._compare(whole, incomplete)
        groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in incomplete.values():
            groups[gradient.device, gradient.dtype].append(gradient)
        for alike in groups.values():
            flat = torch.cat([gradient.flatten() for gradient in alike])
            dist.all_reduce(flat, group=self._group)
            for gradient, summed in zip(alike, flat.split([one.numel() for one in alike]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def _uncut(self) -> Iterator[tuple[str, nn.Parameter, bool]]:
        """Trained parameters that every rank of the mesh holds whole, or the same shard of; and if they are partial."""
        for prefix, module in self._model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and not self._is_cut(parameter):
                    yield f"{prefix}.{key}".removeprefix("."), parameter, hasattr(module, _MARK)

    def _is_cut(self, parameter: nn.Parameter) -> bool:
        if not isinstance(parameter, DTensor):
            return False
        names = parameter.device_mesh.mesh_dim_names or ()
        return self._dimension in names and not parameter.placements[names.index(self._dimension)].is_replicate()

    def _compare(self, whole: Mapping[str, Tensor], incomplete: Mapping[str, Tensor]) -> bool:
        """Whether the ranks' gradients could be compared; then those of the first are alike, of the second are not."""
        names = [*whole, *incomplete]
        if not names:
            return True
        found = [gradient.double() for gradient in (*whole.values(), *incomplete.values())]
        numbers = torch.stack([*(one.norm() for one in found), *(one.sum() for one in found)]).to(self._device)
        unknown = (~numbers.isfinite().all()).double()[None]
        numbers = torch.cat([numbers, -numbers]).nan_to_num(0.0, 0.0, 0.0)
        largest = torch.cat([numbers, unknown])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        if largest[-1] > 0:
            return False
        high, high_sum, low, low_sum = (
            (largest[:-1] * numbers.new_tensor([1, 1, -1, -1]).repeat_interleave(len(names))).view(4, -1).tolist()
        )
        for index, name in enumerate(names):
            if name in whole and high[index] - low[index] > _SAME * high[index]:
                raise SetupError(
                    f"the gradient of {name} has norms from {low[index]:.6g} to {high[index]:.6g} on the ranks that"
                    " share its layer; needed is the same on each, since the tensor-parallel plan leaves it whole. If"
                    f" it is used between matrices that are cut, give its module {PARTIAL_GRADIENT!r} in the plan; if"
                    " not, the ranks got other batches or drew other random numbers"
                )
            same = high[index] == low[index] and high_sum[index] == low_sum[index]
            if name in incomplete and same and high[index] > 0:
                raise SetupError(
                    f"the gradient of {name} is the same on all ranks that share its layer, so it is complete, but"
                    f" the tensor-parallel plan says {PARTIAL_GRADIENT!r}; needed is 'replicate' for its module, or no"
                    " entry"
                )
        return True


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1 or not mesh.mesh_dim_names:
        raise SetupError(
            f"the mesh for tensor parallelism has the dimensions {mesh.mesh_dim_names or mesh.ndim}; needed is one,"
            " with a name: give mesh['tensor'] of the mesh of all ranks"
        )
