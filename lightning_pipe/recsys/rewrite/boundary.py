"""The cut between embeddings and the dense part, where ``loss.backward()`` stops and ``EmbBackward`` starts.

    lookup, output dist ──► source ─ ─ ─(no autograd edge)─ ─ ─► cut output ──► user's dense part ──► loss
                              ▲                                      │
                              └──── EmbBackward: cut.gradient ◄──────┘ DenseBackward stops here and leaves the gradient

The cut output is neither a leaf nor a view, so users may change it in place. It shares the memory of the source, and
also its version counter: if an operation of the output dist ever saved its result for backward, an in-place change
would raise an autograd error instead of giving a wrong gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_pipe._compat.torch import is_view
from lightning_pipe.recsys.modules.output_order import map_output_tensors


class EmbeddingCut:
    """One tensor at the boundary."""

    __slots__ = ("gradient", "name", "source")

    def __init__(self, name: str, source: torch.Tensor) -> None:
        self.name = name  # of its feature, or "" if one tensor holds all features of its module
        self.source = source  # output of the lookup and the output dist, with its autograd graph
        self.gradient: torch.Tensor | None = None  # sum of those that the dense backward has sent so far

    def scaled_gradient(self, scale: torch.Tensor | float | None) -> torch.Tensor:
        """Return the gradient times ``scale``, shaped like the source; zeros if this rank did not use the output."""
        if self.gradient is None:
            return torch.zeros_like(self.source)
        return self.gradient if scale is None else self.gradient * scale


class _Boundary(torch.autograd.Function):
    """Identity without an autograd edge: the anchor makes the result require grad, and the cut gets the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, detached: torch.Tensor, cut: EmbeddingCut) -> torch.Tensor:
        ctx.cut = cut
        return detached.detach()  # a new tensor: if the argument was returned, the result would be a view of it

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        cut: EmbeddingCut = ctx.cut
        cut.gradient = gradient if cut.gradient is None else cut.gradient + gradient
        return None, None, None


def cut_autograd_at_tensor(source: torch.Tensor, cuts: list[EmbeddingCut], name: str = "") -> torch.Tensor:
    """Return ``source`` for the dense part and add its cut to ``cuts``. A tensor without a graph is returned as is."""
    if not source.requires_grad:
        return source
    cut = EmbeddingCut(name, source)
    cuts.append(cut)
    anchor = torch.empty(0, device=source.device, requires_grad=True)
    # In-place changes fail on one of several views of a tensor (TorchRec splits sequences by feature), so views are
    # copied.
    detached = source.detach().clone() if is_view(source) else source.detach()
    result: torch.Tensor = _Boundary.apply(anchor, detached, cut)
    return result


def cut_autograd_at_output(output: Any, cuts: list[EmbeddingCut]) -> Any:
    """Cut every differentiable tensor in a sharded module's awaited output."""
    return map_output_tensors(output, lambda tensor, name: cut_autograd_at_tensor(tensor, cuts, name))
