"""Ranking metrics of the next item among all candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchmetrics import MeanMetric

AT = 10


@dataclass(frozen=True)
class Score:
    """Means over users. With one target item, these are the retrieval hit rate and NDCG of torchmetrics.

    Args:
        hit_rate: share of users whose target is among the first ``AT`` items.
        ndcg: mean of 1 / log2(1 + rank of the target), or 0 if it is not among the first ``AT`` items.
    """

    hit_rate: float
    ndcg: float


def gains(scores: torch.Tensor, target: torch.Tensor, excluded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hit and discounted gain of each row within the first ``AT`` items, as the mean over all orders of equal scores.

    Popularity has many equal scores, as do items that share a table row.

    Args:
        scores: score of each item, [B, items].
        target: number of the target item, int64 [B].
        excluded: True for items that are not ranked, bool [B, items].

    Returns:
        Hits [B] and gains [B], float32.
    """
    target_scores = scores.gather(1, target[:, None])
    above = ((scores > target_scores) & ~excluded).sum(1)
    places = ((scores == target_scores) & ~excluded).sum(1)  # possible positions of the target, from `above` on
    discounts = 1 / torch.log2(torch.arange(AT, dtype=torch.float64, device=scores.device) + 2)
    gained = torch.cat([discounts.new_zeros(1), discounts.cumsum(0)])
    first, last = above.clamp(max=AT), (above + places).clamp(max=AT)
    return ((last - first) / places).float(), ((gained[last] - gained[first]) / places).float()


class RankingMetrics(nn.Module):
    """Means of :func:`gains` over the users of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.hit_rate = MeanMetric()
        self.ndcg = MeanMetric()

    def update(self, scores: torch.Tensor, target: torch.Tensor, excluded: torch.Tensor, weight: torch.Tensor) -> None:
        """Add a batch. Arguments are as in :func:`gains`, with the *weight* of each row, [B]."""
        hits, gained = gains(scores, target, excluded)
        self.hit_rate.update(hits, weight)
        self.ndcg.update(gained, weight)
