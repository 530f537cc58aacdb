"""Backward of the output dists and the lookups: at once, or in two halves.

    cuts ──► output dists' backward ──► kernel outputs ──► kernels' backward, optimisers inside
             └────────── first half ──────────┘ └────────── second half ──────────┘

Between the halves the gradient of every row is known on the rank that owns it, and no table has changed: the place for
a norm over all gradients. The collectives are all in the first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_pipe.recsys.boundary import Cut
from lightning_pipe.recsys.kernel_calls import KernelCall, LookupCalls

__all__ = ["KernelGradients", "ModuleCall", "backward_at_once", "backward_to_kernels"]


@dataclass
class ModuleCall:
    """One call of a sharded module in a step.

    Attributes:
        name: of the module.
        cuts: of its output.
        lookups: what its lookups were called with; None where backward runs at once.
    """

    name: str
    cuts: list[Cut]
    lookups: LookupCalls | None = None


def backward_at_once(calls: Sequence[ModuleCall], scale: torch.Tensor | float | None) -> None:
    """Sends the gradients at the cuts, times ``scale``, all the way."""
    cuts = [cut for call in calls for cut in call.cuts]
    if cuts:
        torch.autograd.backward([cut.source for cut in cuts], [cut.scaled_gradient(scale) for cut in cuts])


@dataclass
class KernelGradients:
    """What the first half leaves for the second.

    Attributes:
        calls: of fused kernels.
        gradients: of each call's output, shaped like it.
        replicated: the weights of dense kernels; each has its gradient, of this rank's batch alone, in ``.grad``.
    """

    calls: list[KernelCall]
    gradients: list[torch.Tensor]
    replicated: list[nn.Parameter]

    def finish(self, scale: torch.Tensor | float | None) -> None:
        """The second half: sends the gradients, times ``scale``, through the kernels."""
        if self.calls:
            gradients = self.gradients if scale is None else [gradient * scale for gradient in self.gradients]
            torch.autograd.backward([call.output for call in self.calls], gradients)
        if scale is not None:
            for weights in self.replicated:
                assert weights.grad is not None
                weights.grad.mul_(scale)

    def discard(self) -> None:
        """In place of the second half: the tables stay as they are."""
        for weights in self.replicated:
            weights.grad = None


def backward_to_kernels(calls: Sequence[ModuleCall]) -> KernelGradients:
    """The first half, for calls that were captured."""
    captured = [call.lookups for call in calls if call.lookups is not None]
    kernels = [kernel for lookups in captured for kernel in lookups.kernels]
    replicated = list(dict.fromkeys(weights for lookups in captured for weights in lookups.replicated))
    cuts = [cut for call in calls for cut in call.cuts]
    if not cuts:
        return KernelGradients([], [], [])
    # A rank without a kernel must go through the output dist's backward too: the others wait for it there.
    ends = [output for lookups in captured for output in lookups.outputs]
    gradients = torch.autograd.grad(
        [cut.source for cut in cuts],
        [*(call.output for call in kernels), *replicated, *ends],
        [cut.scaled_gradient(None) for cut in cuts],
        materialize_grads=True,
    )
    for weights, gradient in zip(replicated, gradients[len(kernels) :], strict=False):
        weights.grad = gradient
    return KernelGradients(kernels, list(gradients[: len(kernels)]), replicated)
