"""Masks of packed rows, made from the ends of their documents."""

from __future__ import annotations

import torch
from torch import Tensor


def block_diagonal_mask(cu_seq_lens: Tensor, length: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """Mask for ``scaled_dot_product_attention`` that separates the documents of a packed row and is causal in each.

    Args:
        cu_seq_lens: first position of each document, and the end of the last: (documents + 1). Later positions form
            one more document.
        length: number of tokens in the row.
        dtype: bool (True attends, the default), or a floating type (added to the scores: 0 or minus infinity).

    Returns:
        (1, 1, length, length): query by key. Every token attends to itself.
    """
    positions = torch.arange(length, device=cu_seq_lens.device)
    document = torch.bucketize(positions, cu_seq_lens[1:].to(positions.dtype), right=True)
    attends = (document[:, None] == document) & (positions[:, None] >= positions)
    if dtype.is_floating_point:
        attends = torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill_(~attends, float("-inf"))
    return attends[None, None]
