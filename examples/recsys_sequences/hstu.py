"""Layers of hierarchical sequential transduction units (HSTU).

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations", ICML 2024, section 3. Attention is pointwise, without a softmax, so that how often something occurs in
a history is not divided away; its output is gated by a projection of the input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad, silu

TIME_BUCKETS = 32


class RelativeBias(nn.Module):
    """What is added to the attention of position i to position j: a number for i - j, and one for the time between.

    Args:
        layers: each has numbers of its own.
        max_length: of a sequence.
    """

    def __init__(self, layers: int, max_length: int) -> None:
        super().__init__()
        self.position = nn.Embedding(max_length, layers)
        self.time = nn.Embedding(TIME_BUCKETS, layers)
        for table in (self.position, self.time):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, seconds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each layer [B, N, N]; without a meaning where j > i.

        Args:
            seconds: time of each position, int64 [B, N].
        """
        positions = torch.arange(seconds.shape[1], device=seconds.device)
        distances = (positions[:, None] - positions).clamp(min=0)
        # How many binary digits the seconds from j to i have.
        bounds = 2 ** torch.arange(TIME_BUCKETS - 1, device=seconds.device)
        between = (seconds[:, :, None] - seconds[:, None, :]).clamp(min=0)
        # Of all layers at once: the backward of a lookup costs as much for one.
        return (self.position(distances) + self.time(torch.bucketize(between, bounds, right=True))).unbind(-1)


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
        self.output_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
        """[B, N, width] from the same.

        Args:
            x: padded at the end.
            bias: [B, N, N].
            causal: 1 where position i may attend to j, else 0: [N, N]. So nothing sees the padding.
        """
        batch, length, width = x.shape
        u, v, q, k = silu(self.projection(self.input_norm(x))).chunk(4, dim=-1)
        q, k, v = (one.view(batch, length, self.heads, -1).transpose(1, 2) for one in (q, k, v))
        weights = silu(q @ k.transpose(2, 3) + bias[:, None]) * (causal / self.max_length)
        attended = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return x + self.output(self.dropout(u * self.output_norm(attended)))


class HSTU(nn.Module):
    """Several units, one on top of the other.

    Attention costs the square of the length that sequences are padded to. So those of about one length go together, and
    a batch costs about what its sequences do, not what as many of its longest one would.

    Args:
        layers: how many units.
        width: as of :class:`HSTULayer`, and so are the others.
        heads: see there.
        max_length: see there.
        dropout: see there, and before the first.
        together: how many sequences go through the layers at a time.
    """

    def __init__(self, layers: int, width: int, heads: int, max_length: int, dropout: float, together: int = 8) -> None:
        super().__init__()
        self.together = together
        self.dropout = nn.Dropout(dropout)
        self.bias = RelativeBias(layers, max_length)
        self.layers = nn.ModuleList(HSTULayer(width, heads, max_length, dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor, seconds: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """What each position knows of itself and those before it.

        Args:
            x: embeddings, [B, N, width], padded at the end.
            seconds: time of each position, int64 [B, N].
            lengths: without the padding, at least 1, int64 [B].

        Returns:
            [B, N, width]; behind a sequence's length nothing of meaning.
        """
        by_length = lengths.argsort(stable=True)
        groups = []
        for rows in by_length.split(self.together):
            longest = int(lengths[rows[-1]])
            knows = self._units(x[rows, :longest], seconds[rows, :longest])
            groups.append(pad(knows, (0, 0, 0, x.shape[1] - longest)))
        return torch.cat(groups)[by_length.argsort()]

    def _units(self, x: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        causal = torch.ones(length, length, device=x.device, dtype=x.dtype).tril()
        x = self.dropout(x)
        for layer, bias in zip(self.layers, self.bias(seconds), strict=True):
            x = layer(x, bias, causal)
        return x
