"""Backward of the output dists and the lookups, in one call or in two halves.

    cuts ──► output dists' backward ──► kernel outputs ──► kernels' backward, optimizers inside
             └────────── first half ──────────┘ └────────── second half ──────────┘

Between the halves, the gradient of every row is known on the rank that owns it and no table has changed, so a norm over
all gradients can be computed. All collectives are in the first half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine.ranks.object_collectives import all_reduce_any
from lightning_pipe.engine.runtime.record_stream import record_stream
from lightning_pipe.recsys.kernels.fused_kernels import add_to_kernel_iteration_counts
from lightning_pipe.recsys.kernels.kernel_calls import KernelOutputGradients
from lightning_pipe.recsys.kernels.row_adam import get_attached_row_optimizer
from lightning_pipe.recsys.rewrite.batch_state import Embeddings, ModuleCall


class TableBackward:
    """Sends the gradients that the dense backward left at the cuts of a batch's embeddings into the tables.

    An output that this rank did not use sends zeros, so that other ranks do not wait for it. All ranks call the same
    methods with the same arguments.
    """

    def __init__(self, modules: Mapping[str, nn.Module], group: dist.ProcessGroup | None) -> None:
        self._modules = modules
        self._group = group

    def run(self, embeddings: Embeddings, scale: torch.Tensor | float | None, agree_unused: bool) -> None:
        """Run the backward, or after ``run_to_kernels`` its second half. Optimizers fused into the lookups step here.

        A kernel takes its learning rate at lookup. If the rate has changed since then and the calls were captured, the
        kernel is called again, for a backward with the current rate.
        """
        if embeddings.kernel_gradients is None and not _are_lookups_current(embeddings):
            self.run_to_kernels(embeddings, agree_unused)
        if embeddings.kernel_gradients is not None:
            _run_kernel_backward(embeddings.kernel_gradients, scale)
        elif calls := self._select_calls_for_backward(embeddings, agree_unused):
            cuts = [cut for call in calls for cut in call.cuts]
            torch.autograd.backward([cut.source for cut in cuts], [cut.scaled_gradient(scale) for cut in cuts])
        embeddings.release(trained=True)

    def run_to_kernels(self, embeddings: Embeddings, agree_unused: bool = False) -> KernelOutputGradients:
        """Run the first half: through the output dists, up to the captured calls of the lookups. No table changes."""
        embeddings.kernel_gradients = _compute_kernel_output_gradients(
            self._select_calls_for_backward(embeddings, agree_unused)
        )
        return embeddings.kernel_gradients

    def discard(self, embeddings: Embeddings) -> None:
        """Discard the gradients instead of ``run``: tables and the step counts of their optimizers do not change."""
        for call in embeddings.calls:
            if call.cuts:  # without grad mode, the lookup was not counted
                add_to_kernel_iteration_counts(self._modules[call.name], -1)
        if embeddings.kernel_gradients is not None:
            for weights in embeddings.kernel_gradients.replicated:
                weights.grad = None
        embeddings.release(trained=False)

    def overflowed(self, embeddings: Embeddings) -> bool:
        """Return True if the dense backward left an infinity or NaN at the cuts of any rank."""
        finite = [gradient.isfinite().all() for gradient in embeddings.gradient_tensors()]
        return all_reduce_any([bool(finite) and not torch.stack(finite).all().item()], self._group)[0]

    def _select_calls_for_backward(self, embeddings: Embeddings, agree_unused: bool) -> list[ModuleCall]:
        """Return the calls that backward goes through: those with a cut, since others cannot be trained."""
        calls = embeddings.calls
        if agree_unused:
            used = all_reduce_any([any(cut.gradient is not None for cut in call.cuts) for call in calls], self._group)
            calls = [call for call, is_used in zip(calls, used, strict=True) if is_used]
        calls = [call for call in calls if call.cuts]
        for call in calls:
            for cut in call.cuts:
                record_stream([cut.source, cut.gradient])
        return calls


def _are_lookups_current(embeddings: Embeddings) -> bool:
    return all(
        kernel.is_current
        for call in embeddings.calls
        if call.lookups is not None
        for kernel in call.lookups.kernel_calls
    )


def _compute_kernel_output_gradients(calls: Sequence[ModuleCall]) -> KernelOutputGradients:
    captured = [call.lookups for call in calls if call.lookups is not None]
    kernels = [kernel for lookups in captured for kernel in lookups.kernel_calls]
    replicated = list(dict.fromkeys(weights for lookups in captured for weights in lookups.replicated))
    if not calls:
        return KernelOutputGradients([], [], [])
    # A rank without a kernel must run the output dist's backward too, since other ranks wait for it there.
    ends = [output for lookups in captured for output in lookups.outputs]
    cuts = [cut for call in calls for cut in call.cuts]
    inputs = [*(call.output for call in kernels), *replicated, *ends]
    if not inputs:  # a replayed lookup, which calls no kernel
        return KernelOutputGradients([], [], [])
    gradients = torch.autograd.grad(
        [cut.source for cut in cuts],
        inputs,
        [cut.scaled_gradient(None) for cut in cuts],
        materialize_grads=True,
    )
    for weights, gradient in zip(replicated, gradients[len(kernels) :], strict=False):
        weights.grad = gradient
    return KernelOutputGradients(kernels, list(gradients[: len(kernels)]), replicated)


def _run_kernel_backward(kernel_gradients: KernelOutputGradients, scale: torch.Tensor | float | None) -> None:
    if kernel_gradients.calls:
        record_stream(kernel_gradients.gradients)
        gradients = (
            kernel_gradients.gradients
            if scale is None
            else [gradient * scale for gradient in kernel_gradients.gradients]
        )
        pairs = list(zip(kernel_gradients.calls, gradients, strict=True))
        fused = [pair for pair in pairs if get_attached_row_optimizer(pair[0].kernel) is None]
        if fused:
            outputs = [call.output_at_current_rate() for call, _ in fused]
            torch.autograd.backward(outputs, [gradient for _, gradient in fused])
        for optimizer in dict.fromkeys(get_attached_row_optimizer(call.kernel) for call in kernel_gradients.calls):
            if optimizer is not None:
                optimizer.step([pair for pair in pairs if get_attached_row_optimizer(pair[0].kernel) is optimizer])
    if scale is not None:
        for weights in kernel_gradients.replicated:
            assert weights.grad is not None
            weights.grad.mul_(scale)
