"""Cuts sequences over the ranks of the context dimension, so that each rank holds a chunk of every sequence.

All ranks of the context dimension read the same batch, and each keeps its chunk of a padded micro-batch::

    tokens     0 1 2 3 | 4 5 6 7        values per token are cut: tokens, labels, positions
               rank 0  | rank 1         the description of attention stays whole: AttentionPattern

    balanced   0 1 | 2 3 4 5 | 6 7      for the ring, where queries stay on their rank: early tokens attend to few
            rank 0 | rank 1  | rank 0   others, so each rank also gets late ones

Tokens of different chunks only meet in attention (``ulysses``, ``ring_attention``). Losses are sums over the rank's own
labels, so losses and gradients add up over context ranks as they do over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.host_values import copy_to_device_of
from lightning_pipe.llm.batches.padding import BOUNDARIES, PadValues

_MASK, _POSITIONS = "attention_mask", "position_ids"


@dataclass(frozen=True)
class AttentionPattern:
    """Attention pattern of the uncut sequences: causal, restricted by the fields that are set.

    The fields keep the size in which the batch has them: all micro-batches of a step are prepared together, and a full
    mask is (length, length).

    Attributes:
        mask: complete query-by-key mask, causality included; bool or additive; (rows or 1, heads or 1, length, length).
        real: False for padding tokens, which no token attends to; bool, (rows, length).
        documents: document number of each token; tokens attend within their document only; integers, (rows or 1,
            length).
    """

    mask: Tensor | None = None
    real: Tensor | None = None
    documents: Tensor | None = None

    def as_mask(self) -> Tensor | None:
        """Mask for ``scaled_dot_product_attention``: (rows or 1, heads or 1, length, length); None if only causal."""
        if self.mask is not None:
            return self.mask
        per_token = self.documents if self.real is None else self.real
        if per_token is None:
            return None
        positions = torch.arange(per_token.shape[1], device=per_token.device)
        attends = (positions[:, None] >= positions)[None]
        if self.documents is not None:
            attends = attends & (self.documents[:, :, None] == self.documents[:, None])
        if self.real is not None:
            attends = attends & self.real[:, None]
        return attends[:, None]


def chunk_positions(rank: int, size: int, length: int, *, balanced: bool = False) -> Tensor:
    """Positions of the tokens that a rank holds: (length / size), int64, on the CPU, ascending."""
    pieces = torch.arange(length).chunk(2 * size if balanced else size)
    return torch.cat([pieces[rank], pieces[-1 - rank]]) if balanced else pieces[rank]


def shard_micro_batch(
    micro_batch: Mapping[str, Any],
    rank: int,
    size: int,
    keys: PadValues | None = None,
    *,
    balanced: bool = False,
    on_host: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], AttentionPattern]:
    """One rank's chunk of a micro-batch, and the attention pattern of the whole micro-batch.

    Both are read from *on_host*, the micro-batch with its values on the host (default: the micro-batch itself).

    The pattern is taken from the first of these that the micro-batch contains:

    - an ``attention_mask`` of (rows or 1, heads or 1, length, length), used unchanged;
    - ``cu_seq_lens_q/k``, the document boundaries of a packed row;
    - ``position_ids``, where a new document begins wherever they do not increase by one, and a mask of (rows, length),
      whose zeros mark padding. No token attends to padding, and positions may jump next to it.
    """
    sequences = _select_sequence_tensors(micro_batch, keys)
    rows, length = _get_sequence_rows_and_length(sequences)
    attention = read_batch_attention(micro_batch, length, on_host)
    host_positions = chunk_positions(rank, size, length, balanced=balanced)
    positions = copy_to_device_of(next(iter(sequences.values())), host_positions)
    local = dict(micro_batch)
    for key, value in sequences.items():
        if key == _MASK and value.ndim > 2:
            value = value.index_select(-2, positions)
        local[key] = value.index_select(-1 if key == _MASK else 1, positions)
    if not isinstance(micro_batch.get(_POSITIONS), Tensor):
        documents = attention.documents
        position_ids = positions[None] if documents is None else document_positions(documents)[:, positions]
        local[_POSITIONS] = position_ids.expand(rows, len(positions))
    for key, max_length_key in BOUNDARIES.items():
        boundaries = (on_host or micro_batch).get(key)
        if isinstance(boundaries, Tensor):
            ends = torch.searchsorted(host_positions, boundaries.long()).unique()
            local[key] = copy_to_device_of(micro_batch[key], ends.to(boundaries.dtype))
            if max_length_key in local:
                longest, full_longest = ends.diff().max(), local[max_length_key]
                if isinstance(full_longest, Tensor):
                    local[max_length_key] = copy_to_device_of(full_longest, longest.to(full_longest.dtype))
                else:
                    local[max_length_key] = int(longest)
    return local, attention


def check_micro_batch_shardable(micro_batch: Mapping[str, Any], keys: PadValues | None = None) -> None:
    """Check that a micro-batch can be cut, apart from its length, which padding changes."""
    _, length = _get_sequence_rows_and_length(_select_sequence_tensors(micro_batch, keys))
    read_batch_attention(micro_batch, length)


def gather_sequence_without_grad(part: Tensor, group: dist.ProcessGroup, *, balanced: bool = False) -> Tensor:
    """Outputs for whole sequences, on every context rank; no gradients flow through it."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    joined = torch.cat(parts, 1)
    if not balanced:
        return joined
    ranks = range(group.size())
    positions = torch.cat([chunk_positions(rank, group.size(), joined.shape[1], balanced=True) for rank in ranks])
    return joined.index_select(1, positions.argsort().to(joined.device))


def _select_sequence_tensors(micro_batch: Mapping[str, Any], keys: PadValues | None) -> dict[str, Tensor]:
    names = (keys or PadValues()).pad_value_by_key()
    return {key: micro_batch[key] for key in names if isinstance(micro_batch.get(key), Tensor)}


def _get_sequence_rows_and_length(sequences: Mapping[str, Tensor]) -> tuple[int, int]:
    shapes = {key: tuple(value.shape) for key, value in sequences.items()}
    mask = shapes.get(_MASK)
    if mask is not None and len(mask) != 2 and (len(mask) != 4 or mask[2] != mask[3]):
        raise InputError(
            f"the micro-batch's {_MASK!r} has the shape {mask}; expected (rows, length) or (rows or 1, heads or 1,"
            " length, length). Give one of these, since parallel.cp cuts sequences over ranks"
        )
    lengths = {key: shape[-1] if key == _MASK else shape[1] for key, shape in shapes.items()}
    if len(set(lengths.values())) != 1:
        raise InputError(
            f"the micro-batch's sequences have the lengths {lengths}; expected one length for all keys that are cut"
            " over context ranks, and at least one key. Name other keys in batching.pad_values"
        )
    # A mask or positions may have one row for all rows.
    return max(shape[0] for shape in shapes.values()), next(iter(lengths.values()))


def read_batch_attention(
    micro_batch: Mapping[str, Any], length: int, on_host: Mapping[str, Any] | None = None
) -> AttentionPattern:
    """Attention pattern that a micro-batch describes, read from its values on the host if they are given."""
    values = micro_batch if on_host is None else on_host
    mask, positions = values.get(_MASK), values.get(_POSITIONS)
    keys = [key for key in BOUNDARIES if isinstance(values.get(key), Tensor)]
    ends = [values[key] for key in keys]
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return AttentionPattern(mask=micro_batch[_MASK])
    real = mask != 0 if isinstance(mask, Tensor) else None
    if real is not None and ends:
        raise InputError(
            f"the micro-batch has both a {_MASK!r} of (rows, length) and the documents of a packed row"
            " (cu_seq_lens); expected one, since models differ in which one they use. Leave the mask out"
        )
    documents = None
    if ends:
        if not torch.equal(ends[0], ends[-1]):
            raise InputError(
                f"the micro-batch's cu_seq_lens_q are {ends[0].tolist()} and its cu_seq_lens_k {ends[-1].tolist()};"
                " expected equal boundaries. Use the same for both, since tokens of one sequence attend to each other"
            )
        tokens = torch.arange(length, device=ends[0].device)
        # The last document extends to the end of the row, as in padding.
        documents = torch.bucketize(tokens, ends[0][1:-1].to(tokens.dtype), right=True)[None]
    elif isinstance(positions, Tensor):
        jumps = positions.diff(dim=1) != 1
        if real is not None:
            # Positions of padding are arbitrary.
            jumps = jumps & real[:, 1:] & real[:, :-1]
        documents = torch.nn.functional.pad(jumps.cumsum(1), (1, 0))
    if documents is not None and not (documents != documents[:, :1]).any():
        documents = None  # one document a row: causal attention without a mask
    return AttentionPattern(
        real=None if real is None or real.all() else copy_to_device_of(micro_batch[_MASK], real),
        documents=copy_to_device_of(micro_batch.get(keys[0] if keys else _POSITIONS), documents),
    )


def document_positions(documents: Tensor) -> Tensor:
    """Position of each token in its document, from 0: (rows or 1, length), int64."""
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
    return places - torch.where(begins, places, 0).cummax(1).values
