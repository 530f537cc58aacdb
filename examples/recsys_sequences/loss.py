"""A mean over the tokens of all ranks, whose numbers of tokens differ."""

from __future__ import annotations

import torch
import torch.distributed as dist


def token_weighted_mean(loss_sum: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mean over the tokens of all ranks, times the number of ranks: gradients are averaged.

    Args:
        loss_sum: the sum of the losses of this rank's tokens.
        tokens: how many these are.
    """
    total, ranks = tokens.clone(), 1
    if dist.is_initialized():
        ranks = dist.get_world_size()
        dist.all_reduce(total)
    return loss_sum * (ranks / total)
