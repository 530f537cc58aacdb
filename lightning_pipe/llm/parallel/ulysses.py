"""Attention over sequences that are cut over ranks: each takes some of the heads, for the whole length.

An all-to-all before attention gives a rank the whole sequences of its share of heads, one behind it gives the heads of
its chunk back (DeepSpeed-Ulysses, arXiv 2309.14509)::

    (rows, heads, length / c, width) ──► (rows, heads / c, length, width) ──► attention ──► and back

It works for any model that calls ``scaled_dot_product_attention``, as it is: a function mode sees those calls. What a
rank's chunk alone tells a model of who attends to whom is not the truth, so its mask gives way to the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from lightning_pipe.llm.parallel.attention_mode import AttentionMode, OwnMasks, check_call, check_mask_heads
from lightning_pipe.llm.parallel.context_parallel import FullAttention

__all__ = ["Ulysses"]


class Ulysses(AttentionMode):
    """While it is entered, ``scaled_dot_product_attention`` of chunks is that of the whole sequences.

    Every rank of the group enters it around the same forward. It holds nothing of a call, so that it may be entered
    again, inside itself or when activation checkpointing runs a forward once more; backward needs no mode.

    Query heads are a multiple of the ranks. Key and value heads need not be: fewer than that are repeated first, as far
    as needed. A mask that the model built from its chunk is replaced, whatever it says. Under dropout of attention
    each rank draws for its own heads: as random as on one device, but not the same numbers.

    Args:
        group: the ranks that hold the chunks, in their order.
        attention: who attends to whom in the whole sequences; causal where None.
    """

    def __init__(self, group: dist.ProcessGroup, attention: FullAttention | None = None) -> None:
        super().__init__()
        self._group = group
        # Made once, and the same for all layers, since autograd keeps it for each until backward.
        self._mask = None if attention is None else attention.as_mask()
        self._square = attention is not None and attention.mask is not None
        # Of a batch that brings masks the model's are parts.
        self._own = None if self._square else OwnMasks(self._mask, group.rank(), group.size())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        size = self._group.size()
        check_call(query, key, attn_mask, is_causal, size, self._square)
        check_mask_heads(self._mask, query)
        if self._own is not None:
            self._own.check(attn_mask)
        repeats = size // math.gcd(key.shape[1], size)
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        query, key, value = _heads_to_ranks([query, key, value], self._group)
        mask = self._of_own_heads(query)
        with torch._C.DisableTorchFunction():  # the same mode may be entered further out
            attended = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, mask is None, **options)
        return _chunks_to_ranks(attended, self._group)

    def _of_own_heads(self, query: Tensor) -> Tensor | None:
        mask = self._mask
        if mask is None:
            return None
        if mask.shape[1] > 1:
            heads = query.shape[1]
            mask = mask.narrow(1, self._group.rank() * heads, heads)
        return mask.to(query.dtype) if mask.is_floating_point() else mask


def _heads_to_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each (rows, heads, length / c, width) becomes (rows, heads / c, length, width): its heads of all chunks."""
    size = group.size()
    # In front comes the rank that it goes to, and afterwards the one that it came from.
    parts = [tensor.reshape(len(tensor), size, -1, *tensor.shape[2:]).movedim(1, 0) for tensor in tensors]
    received = _all_to_all(torch.cat([part.flatten(1) for part in parts], 1), group)
    pieces = received.split([part[0].numel() for part in parts], 1)
    return [piece.view(part.shape).movedim(0, 2).flatten(2, 3) for piece, part in zip(pieces, parts, strict=True)]


def _chunks_to_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(rows, heads / c, length, width) becomes (rows, heads, length / c, width): its chunk of all heads."""
    parts = tensor.reshape(*tensor.shape[:2], group.size(), -1, tensor.shape[-1]).movedim(2, 0)
    return _all_to_all(parts, group).movedim(0, 1).flatten(1, 2)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """parts[i] goes to rank i; the result's [i] came from it. Backward sends gradients back."""
    received: Tensor = wait_tensor(all_to_all_single_autograd(parts.contiguous(), None, None, group))
    return received
