"""Layers of hierarchical sequential transduction units (HSTU).

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations", ICML 2024, section 3. Attention is pointwise, without a softmax, so that how often something occurs in
a history is not divided away; its output is gated by a projection of the input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

TIME_BUCKETS = 32


class RelativeBias(nn.Module):
    """What is added to the attention of position i to position j: a number for i - j, and one for the time between.

    Args:
        max_length: of a sequence.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(max_length).normal_(std=0.02))
        self.time = nn.Embedding(TIME_BUCKETS, 1)
        nn.init.normal_(self.time.weight, std=0.02)

    def forward(self, distances: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        """[B, N, N], from :func:`distances_and_buckets`."""
        return self.position[distances] + self.time(buckets)[..., 0]


def distances_and_buckets(seconds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What biases are looked up by, the same in all layers.

    Args:
        seconds: time of each position, int64 [B, N].

    Returns:
        i - j, int64 [N, N], and how many binary digits the seconds from j to i have, int64 [B, N, N]; 0 where j > i.
    """
    length = seconds.shape[1]
    positions = torch.arange(length, device=seconds.device)
    distances = (positions[:, None] - positions).clamp(min=0)
    bounds = 2 ** torch.arange(TIME_BUCKETS - 1, device=seconds.device)
    between = (seconds[:, :, None] - seconds[:, None, :]).clamp(min=0)
    return distances, torch.bucketize(between, bounds, right=True)


class HSTULayer(nn.Module):
    """One unit: x + W(u * norm(attention(q, k) v)), of which u, v, q and k are SiLU of one projection of norm(x).

    Args:
        width: of the embeddings; each head has its share.
        heads: of the attention.
        max_length: of a sequence; what attention sums is divided by it.
        dropout: before the last projection.
    """

    def __init__(self, width: int, heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.max_length = max_length
        self.input_norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, 4 * width, bias=False)
        self.bias = RelativeBias(max_length)
        self.output_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, distances: torch.Tensor, buckets: torch.Tensor, causal: torch.Tensor
    ) -> torch.Tensor:
        """[B, N, width] from the same.

        Args:
            x: padded at the end.
            distances: [N, N].
            buckets: [B, N, N].
            causal: 1 where position i may attend to j, else 0: [N, N]. So nothing sees the padding.
        """
        batch, length, width = x.shape
        u, v, q, k = silu(self.projection(self.input_norm(x))).chunk(4, dim=-1)
        q, k, v = (one.view(batch, length, self.heads, -1).transpose(1, 2) for one in (q, k, v))
        weights = silu(q @ k.transpose(2, 3) + self.bias(distances, buckets)[:, None]) * (causal / self.max_length)
        attended = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return x + self.output(self.dropout(u * self.output_norm(attended)))


class HSTU(nn.Module):
    """Several units, one on top of the other; arguments as of :class:`HSTULayer`."""

    def __init__(self, layers: int, width: int, heads: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(HSTULayer(width, heads, max_length, dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        """What each position knows of itself and those before it.

        Args:
            x: embeddings, [B, N, width], padded at the end.
            seconds: int64 [B, N].

        Returns:
            [B, N, width].
        """
        distances, buckets = distances_and_buckets(seconds)
        length = x.shape[1]
        causal = torch.ones(length, length, device=x.device, dtype=x.dtype).tril()
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, distances, buckets, causal)
        return x
