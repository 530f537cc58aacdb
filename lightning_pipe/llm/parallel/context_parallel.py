"""Sequences cut over the ranks of a mesh's context dimension, so that each holds a part of every sequence.

All those ranks read the same batch, and each keeps its chunk of a padded micro-batch::

    tokens     0 1 2 3 | 4 5 6 7        what belongs to a token is cut: tokens, labels, positions
               rank 0  | rank 1         what says who attends to whom is kept whole, beside it: FullAttention

    balanced   0 1 | 2 3 4 5 | 6 7      where ranks keep their queries, and the first tokens attend to few others
            rank 0 | rank 1  | rank 0

Attention is the one place where tokens meet (``ulysses``, ``ring_attention``). Losses are sums over the rank's own
labels, so they and the gradients add up over context ranks as over data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.padding import SequenceKeys

__all__ = [
    "FullAttention",
    "attention_of",
    "check_sequence",
    "chunk_positions",
    "cut_sequence",
    "join_sequence",
    "positions_of",
]

_MASK, _POSITIONS = "attention_mask", "position_ids"
_DOCUMENTS = {"cu_seq_lens_q": "max_length_q", "cu_seq_lens_k": "max_length_k"}


@dataclass(frozen=True)
class FullAttention:
    """Which tokens of the uncut sequences attend to which: to themselves and those before, but for what is said here.

    It is kept as small as it came, since the micro-batches of a step are made together, and a mask is (length, length).

    Attributes:
        mask: (rows or 1, heads or 1, length, length), query by key, bool or additive: all there is to say, causality
            included.
        real: (rows, length), bool: False for a token that none attends to, padding.
        documents: (rows or 1, length), integers: tokens attend to those of the same number only.
    """

    mask: Tensor | None = None
    real: Tensor | None = None
    documents: Tensor | None = None

    def as_mask(self) -> Tensor | None:
        """For ``scaled_dot_product_attention``: (rows or 1, heads or 1, length, length); None if merely causal."""
        if self.mask is not None:
            return self.mask
        said = self.documents if self.real is None else self.real
        if said is None:
            return None
        positions = torch.arange(said.shape[1], device=said.device)
        attends = (positions[:, None] >= positions)[None]
        if self.documents is not None:
            attends = attends & (self.documents[:, :, None] == self.documents[:, None])
        if self.real is not None:
            attends = attends & self.real[:, None]
        return attends[:, None]


def chunk_positions(rank: int, size: int, length: int, *, balanced: bool = False) -> Tensor:
    """Which tokens of a sequence a rank holds: (length / size), int64, on the CPU, ascending.

    Args:
        rank: in the context dimension.
        size: ranks in that dimension.
        length: tokens of the whole sequence, a multiple of ``size``; of twice that if balanced.
        balanced: of ``2 * size`` pieces the rank holds one counted from the beginning and one from the end, so that
            causal attention of all ranks' queries costs as much. Otherwise it holds one of ``size``.
    """
    pieces = torch.arange(length).chunk(2 * size if balanced else size)
    return torch.cat([pieces[rank], pieces[-1 - rank]]) if balanced else pieces[rank]


def cut_sequence(
    micro_batch: Mapping[str, Any],
    rank: int,
    size: int,
    keys: SequenceKeys | None = None,
    *,
    balanced: bool = False,
) -> tuple[dict[str, Any], FullAttention]:
    """One rank's chunk of a micro-batch, and who attends to whom in the whole of it.

    Of the micro-batch's description of attention, the first of these counts:

    - an ``attention_mask`` of (rows or 1, heads or 1, length, length), as it is;
    - ``cu_seq_lens_q/k``, the documents of a packed row;
    - ``position_ids`` that do not go on by one: where they jump, a document begins, and a (rows, length) mask, whose
      zeros none attends to, and between which and other tokens positions may jump.

    Args:
        micro_batch: padded, on any device.
        rank: in the context dimension.
        size: ranks in that dimension.
        keys: what is (rows, length, ...) and is cut; everything else stays as it is.
        balanced: see :func:`chunk_positions`.

    Returns:
        The micro-batch with chunks of (rows, length / size, ...), and with the chunk's own ``position_ids`` (rows,
        length / size), counted from the beginning of the whole document, where it had none. A model's own masks are
        to have the chunk's shape, so a square mask is cut on both dimensions, and ``cu_seq_lens`` are those of the
        documents' parts in the chunk.

    Raises:
        InputError: a length that the ranks do not divide, sequences of several lengths or none at all, a mask of
            another shape, or masks and documents that may contradict each other.
    """
    sequences = _sequences(micro_batch, keys)
    rows, length = _rows_and_length(sequences)
    multiple = 2 * size if balanced else size
    if length % multiple:
        twice = ", twice, for the ring" if balanced else ""
        raise InputError(
            f"the micro-batch has {length} tokens a row, which parallel.cp={size} does not divide{twice};"
            f" needed is a multiple of {multiple}: pad to one (pad_to_multiple_of)"
        )
    attention = attention_of(micro_batch, length)
    own = chunk_positions(rank, size, length, balanced=balanced)
    own = own.to(next(iter(sequences.values())).device)
    local = dict(micro_batch)
    for key, value in sequences.items():
        if key == _MASK and value.ndim > 2:
            value = value.index_select(-2, own)
        local[key] = value.index_select(-1 if key == _MASK else 1, own)
    if not isinstance(micro_batch.get(_POSITIONS), Tensor):
        documents = attention.documents
        counted = own[None] if documents is None else positions_of(documents)[:, own]
        local[_POSITIONS] = counted.expand(rows, len(own))
    for key, longest in _DOCUMENTS.items():
        ends = micro_batch.get(key)
        if isinstance(ends, Tensor):
            local[key] = torch.searchsorted(own.to(ends.device), ends.long()).unique().to(ends.dtype)
            if longest in local:
                found = local[key].diff().max()
                before = local[longest]
                local[longest] = found.to(before) if isinstance(before, Tensor) else int(found)
    return local, attention


def check_sequence(micro_batch: Mapping[str, Any], keys: SequenceKeys | None = None) -> None:
    """See that a micro-batch can be cut, once it is padded to a length that can.

    Raises:
        InputError: as :func:`cut_sequence`, but for the length.
    """
    _, length = _rows_and_length(_sequences(micro_batch, keys))
    attention_of(micro_batch, length)


def join_sequence(part: Tensor, group: dist.ProcessGroup, *, balanced: bool = False) -> Tensor:
    """Outputs for whole sequences, on every context rank; no gradients flow through it.

    Args:
        part: (rows, length / size, ...), contiguous or not: this rank's; alike on all ranks.
        group: the ranks that hold the chunks, in their order.
        balanced: how they were cut.

    Returns:
        (rows, length, ...).
    """
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    whole = torch.cat(parts, 1)
    if not balanced:
        return whole
    ranks = range(group.size())
    held = torch.cat([chunk_positions(rank, group.size(), whole.shape[1], balanced=True) for rank in ranks])
    return whole.index_select(1, held.argsort().to(whole.device))


def _sequences(micro_batch: Mapping[str, Any], keys: SequenceKeys | None) -> dict[str, Tensor]:
    names = (keys or SequenceKeys()).values()
    return {key: micro_batch[key] for key in names if isinstance(micro_batch.get(key), Tensor)}


def _rows_and_length(sequences: Mapping[str, Tensor]) -> tuple[int, int]:
    shapes = {key: tuple(value.shape) for key, value in sequences.items()}
    mask = shapes.get(_MASK)
    if mask is not None and len(mask) != 2 and (len(mask) != 4 or mask[2] != mask[3]):
        raise InputError(
            f"the micro-batch's {_MASK!r} has the shape {mask}; needed is (rows, length), or (rows or 1, heads or 1,"
            " length, length), for sequences that are cut over context ranks"
        )
    lengths = {key: shape[-1] if key == _MASK else shape[1] for key, shape in shapes.items()}
    if len(set(lengths.values())) != 1:
        raise InputError(
            f"the micro-batch's sequences have the lengths {lengths}; needed is one length, of at least one of the keys"
            " that are cut over context ranks: name others by batching.pad_values"
        )
    # A mask, or positions, may be the same for all rows.
    return max(shape[0] for shape in shapes.values()), next(iter(lengths.values()))


def attention_of(micro_batch: Mapping[str, Any], length: int) -> FullAttention:
    """What a micro-batch says about attention; see :func:`cut_sequence`.

    Args:
        micro_batch: of which sequences have this length.
        length: tokens of a row.

    Raises:
        InputError: masks and documents that may contradict each other.
    """
    mask, positions = micro_batch.get(_MASK), micro_batch.get(_POSITIONS)
    ends = [micro_batch[key] for key in _DOCUMENTS if isinstance(micro_batch.get(key), Tensor)]
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return FullAttention(mask=mask)
    real = mask != 0 if isinstance(mask, Tensor) else None
    if real is not None and ends:
        raise InputError(
            f"the micro-batch has both a {_MASK!r} of (rows, length) and the documents of a packed row"
            " (cu_seq_lens), and models differ in which of them they heed; needed is one: leave the mask out"
        )
    documents = None
    if ends:
        if not torch.equal(ends[0], ends[-1]):
            raise InputError(
                f"the micro-batch's cu_seq_lens_q are {ends[0].tolist()} and its cu_seq_lens_k {ends[-1].tolist()};"
                " needed are the same: tokens of one sequence attend to each other"
            )
        tokens = torch.arange(length, device=ends[0].device)
        documents = torch.bucketize(tokens, ends[0][1:].to(tokens.dtype), right=True)[None]
    elif isinstance(positions, Tensor):
        jumps = positions.diff(dim=1) != 1
        if real is not None:
            # Positions of padding may be anything.
            jumps = jumps & real[:, 1:] & real[:, :-1]
        documents = torch.nn.functional.pad(jumps.cumsum(1), (1, 0))
    if documents is not None and not (documents != documents[:, :1]).any():
        documents = None  # what is merely causal needs no mask
    return FullAttention(real=None if real is None or real.all() else real, documents=documents)


def positions_of(documents: Tensor) -> Tensor:
    """Each token's position in its document, from 0: (rows or 1, length), int64.

    Args:
        documents: as :class:`FullAttention` has them.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
    return places - torch.where(begins, places, 0).cummax(1).values
