"""Layers of hierarchical sequential transduction units (HSTU).

Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations", ICML 2024, section 3. Attention is pointwise, without a softmax, so that normalization does not remove
the number of occurrences of an item in a history. The output is gated by a projection of the input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad, silu

TIME_BUCKETS = 32


class RelativeBias(nn.Module):
    """Bias of the attention from position i to position j: a term for i - j and one for the time difference.

    Args:
        layers: number of layers. Each has its own biases.
        max_length: maximum length of a sequence.
    """

    def __init__(self, layers: int, max_length: int) -> None:
        super().__init__()
        self.position = nn.Embedding(max_length, layers)
        self.time = nn.Embedding(TIME_BUCKETS, layers)
        for table in (self.position, self.time):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, seconds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Bias of each layer, [B, N, N]. Values for j > i have no meaning.

        Args:
            seconds: time of each position, int64 [B, N].
        """
        positions = torch.arange(seconds.shape[1], device=seconds.device)
        distances = (positions[:, None] - positions).clamp(min=0)
        # Bucket of a time difference: the number of binary digits of the seconds from j to i.
        bounds = 2 ** torch.arange(TIME_BUCKETS - 1, device=seconds.device)
        between = (seconds[:, :, None] - seconds[:, None, :]).clamp(min=0)
        # One lookup for all layers, because its backward costs the same for one layer.
        return (self.position(distances) + self.time(torch.bucketize(between, bounds, right=True))).unbind(-1)


class HSTULayer(nn.Module):
    """One unit: x + W(u * norm(attention(q, k) v)), where u, v, q and k are the SiLU of one projection of norm(x).

    Args:
        width: width of the embeddings, divided among the heads.
        heads: number of attention heads.
        max_length: maximum length of a sequence. Attention sums are divided by it.
        dropout: dropout probability before the last projection.
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
        """Apply the unit to *x*; the result has the same shape.

        Args:
            x: sequences padded at the end, [B, N, width].
            bias: bias of the attention, [B, N, N].
            causal: 1 where position i may attend to j, else 0, [N, N]. Positions of a sequence never attend to padding.
        """
        batch, length, width = x.shape
        u, v, q, k = silu(self.projection(self.input_norm(x))).chunk(4, dim=-1)
        q, k, v = (projection.view(batch, length, self.heads, -1).transpose(1, 2) for projection in (q, k, v))
        weights = silu(q @ k.transpose(2, 3) + bias[:, None]) * (causal / self.max_length)
        attended = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return x + self.output(self.dropout(u * self.output_norm(attended)))


class HSTU(nn.Module):
    """A stack of units.

    The cost of attention is quadratic in the padded length. Sequences of similar length are therefore processed
    together, so that the cost of a batch depends on the lengths of its sequences rather than on the longest one.

    Args:
        layers: number of units.
        width: as in :class:`HSTULayer`.
        heads: as in :class:`HSTULayer`.
        max_length: as in :class:`HSTULayer`.
        dropout: as in :class:`HSTULayer`; also applied before the first unit.
        together: number of sequences that are processed together (default 8).
    """

    def __init__(self, layers: int, width: int, heads: int, max_length: int, dropout: float, together: int = 8) -> None:
        super().__init__()
        self.together = together
        self.dropout = nn.Dropout(dropout)
        self.bias = RelativeBias(layers, max_length)
        self.layers = nn.ModuleList(HSTULayer(width, heads, max_length, dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor, seconds: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Hidden state of each position, computed from it and all earlier positions.

        Args:
            x: embeddings padded at the end, [B, N, width].
            seconds: time of each position, int64 [B, N].
            lengths: lengths without padding, at least 1, int64 [B].

        Returns:
            Hidden states, [B, N, width]. Values after the end of a sequence have no meaning.
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
