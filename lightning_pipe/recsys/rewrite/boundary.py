"""The cut between embeddings and the dense part, where ``loss.backward()`` stops and ``EmbBackward`` starts.

    lookup, output dist ──► source ─ ─ ─(no autograd edge)─ ─ ─► cut output ──► user's dense part ──► loss
                              ▲                                      │
                              └──── EmbBackward: cut.gradient ◄──────┘ DenseBackward stops here and leaves the gradient

The cut output is neither a leaf nor a view, so users may change it in place. It shares the memory of the source, and
also its version counter: if an operation of the output dist ever saved its result for backward, an in-place change
would raise an autograd error instead of giving a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_pipe._compat.torch import is_view
from lightning_pipe.recsys.modules.output_order import OrderedKeyedTensor


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
    return _map_tensors(output, lambda tensor, name: cut_autograd_at_tensor(tensor, cuts, name), "")


def detach_output(output: Any) -> Any:
    """Return the output of :func:`cut_autograd_at_output` under ``no_grad``: the same values without gradients."""
    return _map_tensors(output, lambda tensor, _: tensor.detach(), "")


def _map_tensors(output: Any, change: Callable[[torch.Tensor, str], torch.Tensor], name: str) -> Any:
    if isinstance(output, torch.Tensor):
        return change(output, name)
    if isinstance(output, OrderedKeyedTensor):
        return OrderedKeyedTensor(_map_tensors(output.source, change, name), output.keys())
    if isinstance(output, KeyedTensor):
        return KeyedTensor(
            keys=output.keys(),
            length_per_key=output.length_per_key(),
            values=change(output.values(), name),
            key_dim=output.key_dim(),
            offset_per_key=output.offset_per_key(),
        )
    if isinstance(output, JaggedTensor):
        return JaggedTensor(
            values=change(output.values(), name),
            weights=output.weights_or_none(),
            lengths=output.lengths_or_none(),
            offsets=output.offsets_or_none(),
        )
    if isinstance(output, dict):
        return {key: _map_tensors(value, change, str(key)) for key, value in output.items()}
    if isinstance(output, tuple):
        return tuple(_map_tensors(value, change, name) for value in output)
    assert output is None or isinstance(output, KeyedJaggedTensor), type(output)  # ids: not differentiable
    return output
