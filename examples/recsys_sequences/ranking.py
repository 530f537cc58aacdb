"""How far up the item that came next stands among all that could have come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchmetrics import MeanMetric

AT = 10


@dataclass(frozen=True)
class Score:
    """Means over users; with one item to find, what torchmetrics calls retrieval hit rate and NDCG.

    Args:
        hit_rate: how often the item is among the first ``AT``.
        ndcg: 1 / log2(1 + its rank) where it is, 0 where not.
    """

    hit_rate: float
    ndcg: float


def gains(scores: torch.Tensor, target: torch.Tensor, excluded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's hit and discounted gain in the first ``AT``: the mean over all orders of items of one score.

    A popularity has many equal scores, and so have items that share a row of a table.

    Args:
        scores: of each item, [B, items].
        target: the number of the item to find, int64 [B].
        excluded: items that do not take part, bool [B, items].

    Returns:
        Hits [B] and gains [B], float32.
    """
    own = scores.gather(1, target[:, None])
    above = ((scores > own) & ~excluded).sum(1)
    places = ((scores == own) & ~excluded).sum(1)  # those that it may take, from the one behind `above` on
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
        """Takes a batch in; arguments as of :func:`gains`, and each row's *weight*, [B]."""
        hits, gained = gains(scores, target, excluded)
        self.hit_rate.update(hits, weight)
        self.ndcg.update(gained, weight)
