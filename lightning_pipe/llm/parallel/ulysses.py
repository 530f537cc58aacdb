"""Ulysses attention over sequences that are cut over ranks: each rank computes some heads for the whole length.

An all-to-all before attention gives a rank the whole sequences of its heads. An all-to-all after attention returns all
heads of its chunk (DeepSpeed-Ulysses, arXiv 2309.14509)::

    (rows, heads, length / c, width) ──► (rows, heads / c, length, width) ──► attention ──► and back

It works unchanged for any model that calls ``scaled_dot_product_attention``, since a function mode intercepts those
calls. A model that sees only a chunk cannot build the right mask, so its mask is replaced by the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_pipe._compat.attention import function_modes_disabled
from lightning_pipe._compat.collectives import all_to_all_single_autograd, wait_tensor
from lightning_pipe.llm.parallel.sdpa_intercept import (
    ChunkMaskCheck,
    SDPAInterceptMode,
    check_mask_heads,
    check_sdpa_call_shardable,
)
from lightning_pipe.llm.parallel.sequence_chunks import AttentionPattern


class UlyssesAttention(SDPAInterceptMode):
    """While entered, computes ``scaled_dot_product_attention`` of chunks over the whole sequences.

    Every rank of the group enters it around the same forward. It keeps no state between calls, so it may be nested, or
    entered again when activation checkpointing recomputes a forward. Backward does not need the mode.

    The number of query heads must be a multiple of the number of ranks. Key and value heads need not be: they are
    repeated first, as far as necessary. A mask that the model built from its chunk is replaced. Attention dropout is
    drawn by each rank for its own heads: equally random as on one device, but with other numbers.
    """

    def __init__(self, group: dist.ProcessGroup, attention: AttentionPattern | None = None) -> None:
        super().__init__()
        self._group = group
        # Built once and shared by all layers, since autograd keeps each layer's mask until backward.
        self._mask = None if attention is None else attention.as_mask()
        self._square = attention is not None and attention.mask is not None
        self._mask_check = ChunkMaskCheck(self._mask, group.rank(), group.size(), square=self._square)

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
        check_sdpa_call_shardable(query, key, attn_mask, is_causal, size, self._square)
        check_mask_heads(self._mask, query)
        self._mask_check.check(attn_mask, query.shape[-2])
        repeats = size // math.gcd(key.shape[1], size)
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        query, key, value = _gather_sequence_scatter_heads([query, key, value], self._group)
        mask = self._local_head_mask(query)
        with function_modes_disabled():  # an outer context may be in the same mode
            attended = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, mask is None, **options)
        return _gather_heads_scatter_sequence(attended, self._group)

    def _local_head_mask(self, query: Tensor) -> Tensor | None:
        mask = self._mask
        if mask is None:
            return None
        if mask.shape[1] > 1:
            heads = query.shape[1]
            mask = mask.narrow(1, self._group.rank() * heads, heads)
        return mask.to(query.dtype) if mask.is_floating_point() else mask


def _gather_sequence_scatter_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange (rows, heads, length / c, width) for (rows, heads / c, length, width): own heads of all chunks."""
    size = group.size()
    # The first dimension is the destination rank before the exchange, and the source rank after it.
    parts = [tensor.reshape(len(tensor), size, -1, *tensor.shape[2:]).movedim(1, 0) for tensor in tensors]
    received = _all_to_all_autograd(torch.cat([part.flatten(1) for part in parts], 1), group)
    pieces = received.split([part[0].numel() for part in parts], 1)
    return [piece.view(part.shape).movedim(0, 2).flatten(2, 3) for piece, part in zip(pieces, parts, strict=True)]


def _gather_heads_scatter_sequence(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange (rows, heads / c, length, width) for (rows, heads, length / c, width): own chunk of all heads."""
    parts = tensor.reshape(*tensor.shape[:2], group.size(), -1, tensor.shape[-1]).movedim(2, 0)
    return _all_to_all_autograd(parts, group).movedim(0, 1).flatten(1, 2)


def _all_to_all_autograd(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send parts[i] to rank i, and receive result[i] from it; backward sends the gradients back."""
    received: Tensor = wait_tensor(all_to_all_single_autograd(parts.contiguous(), None, None, group))
    return received
