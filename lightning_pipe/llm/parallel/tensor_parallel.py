"""Tensor parallelism inside a stage: ranks shard the matrices of each layer, and replicate all other parameters.

A layer's first matrices are cut by columns, so that each rank computes some heads or features. The last one is cut by
rows, and an all-reduce adds the ranks' partial sums::

    hidden states ──► colwise ──► some heads, features ──► rowwise ──► all-reduce ──► hidden states
     (all ranks)                 (those of each rank)                                  (all ranks)

Between the two, a rank sees a part of the activations. Whole parameters that are used there (Qwen3's norms of queries
and keys, whose width is one head) get a partial gradient on each rank, which :class:`TensorParallelGradients` sums. All
other parameters get the same gradient on every rank, since the gradient of the hidden states is reduced where it leaves
a matrix.

Sources: Megatron-LM (arXiv 1909.08053), ``torch.distributed.tensor.parallel``, and for the words of plans
``transformers.integrations.tensor_parallel``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.parallel.gradients import group_by_device_and_dtype, local_tensor
from lightning_pipe.llm.parallel.sequence_parallel import (
    TOKEN_SHARD,
    apply_sequence_parallel,
    find_sequence_parallel_modules,
)
from lightning_pipe.llm.parallel.tensor_plan import PARTIAL_GRADIENT, TensorPlan, resolve_parallel_styles

_MARK = "_tensor_parallel_partial_gradients"  # on a module whose own parameters see a part of the activations
_NORM_TOLERANCE = 0.01  # a smaller relative difference of norms is attributed to non-deterministic kernels


def apply_tensor_parallel(
    stage: StageModule, config: PPModuleConfig, mesh: DeviceMesh, plan: TensorPlan, *, sequences: bool = False
) -> None:
    """Keep this rank's part of each matrix of a stage's layers, in place, without communication.

    Call it before activation checkpointing, compilation and data parallelism. Sharded parameters become DTensors on the
    mesh, other parameters stay unchanged. The stage takes and returns whole hidden states, the same on every rank of
    the mesh.

    The words of a plan are Hugging Face's:

    - ``colwise``: cut by columns (a linear layer's output features); returns the rank's part of the output.
    - ``rowwise``: cut by rows (a linear layer's input features); takes the rank's part and returns the whole output.
    - ``colwise_rep``: as ``colwise``, with the output gathered.
    - ``rowwise_rep``: as ``rowwise``, from a whole input.
    - ``replicate``: stays whole.
    - ``partial_gradient`` (added by this project): the module's own parameters stay whole, but see a part of the
      activations.

    A forward must infer the number of heads or features from its input, as Hugging Face's models do (``view(..., -1,
    head_dim)``), and in a fused matrix the parts of one head must be adjacent. Dropout between ``colwise`` and
    ``rowwise`` is drawn by each rank for its part. Dropout elsewhere must be the same on all ranks, so their random
    states must be equal.
    """
    model = stage.module
    styles = resolve_parallel_styles(model, config, plan, mesh.size())
    if sequences:
        apply_sequence_parallel(model, config, mesh, styles)
        for module in find_sequence_parallel_modules(model, config, styles).values():
            setattr(module, _MARK, True)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if sequences and isinstance(style, RowwiseParallel):
            style = RowwiseParallel(input_layouts=style.input_layouts[0], output_layouts=TOKEN_SHARD)
        if isinstance(style, ParallelStyle):
            parallelize_module(module, mesh, style, src_data_rank=None)
            if isinstance(style, RowwiseParallel):
                # A model may change the result in place (Llama 4 adds to its shared expert's), and this is a view.
                module.register_forward_hook(lambda module, args, output: output.clone())
        elif style == PARTIAL_GRADIENT:
            setattr(module, _MARK, True)


class TensorParallelGradients:
    """Completes the gradients of whole parameters after a step's last backward, in one all-reduce."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._group = mesh.get_group()
        self._dimension = mesh.mesh_dim_names[0]  # type: ignore[index]
        self._device = mesh.device_type
        self._checked = False

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Sum the partial gradients over the mesh. Call it once each optimizer step, before scaling and clipping.

        Call it after the data-parallel reduction and after all accumulated batches; otherwise gradients would be summed
        twice. The first time that no gradient contains NaN or infinity, the ranks compare their gradients.
        """
        complete: dict[str, Tensor] = {}
        incomplete: dict[str, Tensor] = {}
        for name, parameter, is_partial in self._uncut():
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                # A user's own ParallelStyle may leave a partial sum.
                gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
                parameter.grad = gradient
            (incomplete if is_partial else complete)[name] = local_tensor(gradient)
        if not self._checked:
            self._checked = self._compare(complete, incomplete)
        for gradients in group_by_device_and_dtype(incomplete.values()):
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self._group)
            for gradient, summed in zip(
                gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
            ):
                gradient.copy_(summed.view_as(gradient))

    def _uncut(self) -> Iterator[tuple[str, nn.Parameter, bool]]:
        """Trained parameters that are not sharded over the mesh, and True if their gradients are partial."""
        for prefix, module in self._model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and not self._is_cut(parameter):
                    yield f"{prefix}.{key}".removeprefix("."), parameter, hasattr(module, _MARK)

    def _is_cut(self, parameter: nn.Parameter) -> bool:
        if not isinstance(parameter, DTensor):
            return False
        names = parameter.device_mesh.mesh_dim_names or ()
        return self._dimension in names and not parameter.placements[names.index(self._dimension)].is_replicate()

    def _compare(self, complete: Mapping[str, Tensor], incomplete: Mapping[str, Tensor]) -> bool:
        """Check that the whole gradients agree and the partial ones differ; False if NaN or infinity prevents it."""
        names = [*complete, *incomplete]
        if not names:
            return True
        gradients = [gradient.double() for gradient in (*complete.values(), *incomplete.values())]
        numbers = torch.stack(
            [*(gradient.norm() for gradient in gradients), *(gradient.sum() for gradient in gradients)]
        ).to(self._device)
        not_finite = (~numbers.isfinite().all()).double()[None]
        numbers = torch.cat([numbers, -numbers]).nan_to_num(0.0, 0.0, 0.0)
        largest = torch.cat([numbers, not_finite])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        if largest[-1] > 0:
            return False
        high, high_sum, low, low_sum = (
            (largest[:-1] * numbers.new_tensor([1, 1, -1, -1]).repeat_interleave(len(names))).view(4, -1).tolist()
        )
        for index, name in enumerate(names):
            if name in complete and high[index] - low[index] > _NORM_TOLERANCE * high[index]:
                raise SetupError(
                    f"the gradient of {name} has norms from {low[index]:.6g} to {high[index]:.6g} on the ranks that"
                    " share its layer; expected equal norms, since the tensor-parallel plan leaves it whole. If it is"
                    f" used between sharded matrices, give its module {PARTIAL_GRADIENT!r} in the plan; otherwise check"
                    " that the ranks get the same batches and draw the same random numbers"
                )
            is_equal = high[index] == low[index] and high_sum[index] == low_sum[index]
            if name in incomplete and is_equal and high[index] > 0:
                raise SetupError(
                    f"the gradient of {name} is the same on all ranks that share its layer, so it is complete, but"
                    f" the tensor-parallel plan has {PARTIAL_GRADIENT!r}. Use 'replicate' for its module, or remove the"
                    " entry"
                )
        return True
