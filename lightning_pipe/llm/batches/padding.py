"""One sequence length for all micro-batches of a step, chosen and padded to.

Stages hand each other tensors of a shape fixed before the step, so its micro-batches must be equally long. Padding
comes at the end of the sequence, has ignored labels, and becomes part of the last document of a packed row: a
document of its own made of padding is what variable-length attention kernels handle badly, while a causal model's
real tokens never see what follows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError, SetupError

__all__ = [
    "SequenceKeys",
    "block_diagonal_mask",
    "pad_microbatch",
    "target_length",
]

_MASK = "attention_mask"
_DOCUMENTS = {"cu_seq_lens_q": "max_length_q", "cu_seq_lens_k": "max_length_k"}


@dataclass(frozen=True)
class SequenceKeys:
    """The entries of a micro-batch that are (rows, length, ...), and the value each is padded with.

    Attributes:
        input_ids: any token that the embedding has.
        labels: the label that the loss ignores.
        attention_mask: what a (rows, length) mask says of padding; masks of (..., length, length) have rules of their
            own, see :func:`pad_microbatch`.
        position_ids: any position that the model has.
        others: further keys and their values, such as ``{"token_type_ids": 0}``.
    """

    input_ids: int = 0
    labels: int = -100
    attention_mask: int = 0
    position_ids: int = 0
    others: Mapping[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """The value that each key is padded with."""
        own: dict[str, float] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            _MASK: self.attention_mask,
            "position_ids": self.position_ids,
        }
        return own | dict(self.others)


def target_length(
    length: int, pad_to_multiple_of: int = 1, maximum: int | None = None, buckets: Sequence[int] | None = None
) -> int:
    """The length to pad to.

    Args:
        length: the longest sequence, in tokens.
        pad_to_multiple_of: the result is a multiple of this.
        maximum: the longest sequence that the model takes.
        buckets: the lengths to choose from, each then rounded up to the multiple; any length where there are none.

    Raises:
        SetupError: a multiple or a bucket below 1.
        InputError: a sequence longer than the longest bucket, or that is longer than the maximum once padded.
    """
    if pad_to_multiple_of < 1 or (buckets is not None and min(buckets, default=0) < 1):
        raise SetupError(
            f"pad_to_multiple_of is {pad_to_multiple_of} and the buckets are {buckets}; needed are whole numbers of at"
            " least 1, and at least one bucket where there are any"
        )
    chosen = length
    if buckets is not None:
        fitting = [bucket for bucket in buckets if bucket >= length]
        if not fitting:
            raise InputError(
                f"a sequence has {length} tokens, and the longest bucket has {max(buckets)}; needed is a bucket of at"
                f" least {length}: add one, or cut the sequences"
            )
        chosen = min(fitting)
    chosen = -(-chosen // pad_to_multiple_of) * pad_to_multiple_of
    if maximum is not None and chosen > maximum:
        padded = "" if chosen == length else f", {chosen} once padded to a multiple of {pad_to_multiple_of}"
        raise InputError(
            f"a sequence has {length} tokens{padded}; the model's maximum is {maximum}: cut the sequences to fit, pad"
            " less, or raise the maximum in the model's configuration"
        )
    return chosen


def pad_microbatch(micro_batch: Mapping[str, Any], length: int, keys: SequenceKeys | None = None) -> dict[str, Any]:
    """Pad one micro-batch at the end of its sequences; what fits already stays the same object.

    - An ``attention_mask`` of (..., length, length) is padded on both dimensions: no real token attends to padding,
      and a padding token only to itself, so that no row of the softmax is empty. Floating masks are taken as additive.
    - ``cu_seq_lens_q/k`` (1-d, of one packed row): the last document grows to the end, in a copy;
      ``max_length_q/k`` are then the longest document's length again.
    - What is missing is not added: a causal model without a mask does not look ahead.

    Args:
        micro_batch: tensors (rows, length now, ...) under the keys of ``keys``, and anything else.
        length: the length to pad to.
        keys: what is padded and with what.

    Raises:
        InputError: a tensor without dimension 1, tensors of different lengths, one longer than ``length``, a mask that
            is not square, or ``cu_seq_lens`` that are not those of one row.
    """
    padded = dict(micro_batch)
    values = (keys or SequenceKeys()).values()
    sequences = {key: padded[key] for key in values if isinstance(padded.get(key), Tensor)}
    present = _length(sequences, length)
    if present is not None and present < length:
        for key, value in sequences.items():
            if key == _MASK and value.ndim > 2:
                padded[key] = _pad_square(value, length)
            else:
                # F.pad counts dimensions from the last one, two numbers each.
                padded[key] = F.pad(value, (0, 0) * (value.ndim - 2) + (0, length - present), value=values[key])
    _extend_last_document(padded, length, max((len(value) for value in sequences.values()), default=1))
    return padded


def block_diagonal_mask(cu_seq_lens: Tensor, length: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """The mask that keeps the documents of a packed row apart in ``scaled_dot_product_attention``; causal in each.

    Args:
        cu_seq_lens: (documents + 1), the positions where documents begin, and the last one's end. Positions beyond
            that are one document more.
        length: tokens of the row.
        dtype: bool (True attends), or a floating type (added to the scores: 0 or minus infinity).

    Returns:
        (1, 1, length, length): query by key. Every token attends to itself.
    """
    positions = torch.arange(length, device=cu_seq_lens.device)
    document = torch.bucketize(positions, cu_seq_lens[1:].to(positions.dtype), right=True)
    attends = (document[:, None] == document) & (positions[:, None] >= positions)
    return _as_mask(attends, dtype)[None, None]


def _as_mask(attends: Tensor, dtype: torch.dtype) -> Tensor:
    """True where a query attends, in the form that masks of this type have."""
    if dtype.is_floating_point:
        return torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill_(~attends, float("-inf"))
    return attends.to(dtype)


def _length(sequences: Mapping[str, Tensor], length: int) -> int | None:
    """The length that all sequences have now, None where there are none."""
    shapes = {key: tuple(value.shape) for key, value in sequences.items()}
    flat = [key for key, shape in shapes.items() if len(shape) < 2]
    if flat:
        raise InputError(
            f"the micro-batch's {flat[0]!r} has the shape {shapes[flat[0]]}; needed is (rows, length): give it a"
            " dimension of rows"
        )
    lengths = {key: shape[-1] if key == _MASK and len(shape) > 2 else shape[1] for key, shape in shapes.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(
            f"the micro-batch's sequences have the lengths {lengths}; needed is one length for all of them: padding"
            " would hide which tokens belong together"
        )
    present = next(iter(lengths.values()), None)
    if present is not None and present > length:
        raise InputError(
            f"the micro-batch has {present} tokens a row, and the step's length is {length}; needed is at most that:"
            " cut the sequences"
        )
    return present


def _pad_square(mask: Tensor, length: int) -> Tensor:
    present = mask.shape[-1]
    if mask.shape[-2] != present:
        raise InputError(
            f"the micro-batch's {_MASK!r} has the shape {tuple(mask.shape)}; needed is (..., {present}, {present}),"
            " queries by keys, or (rows, length)"
        )
    itself = torch.eye(length, dtype=torch.bool, device=mask.device)
    padded = _as_mask(itself, mask.dtype).expand(*mask.shape[:-2], length, length).clone()
    padded[..., :present, :present] = mask
    return padded


def _extend_last_document(micro_batch: dict[str, Any], length: int, rows: int) -> None:
    for key, longest in _DOCUMENTS.items():
        ends = micro_batch.get(key)
        if not isinstance(ends, Tensor):
            continue
        if rows > 1 or ends.ndim != 1 or len(ends) < 2 or ends[-1] > length:
            raise InputError(
                f"the micro-batch's {key!r} has the shape {tuple(ends.shape)} and ends at"
                f" {ends.flatten()[-1:].tolist()}, for {rows} row(s) of {length} tokens; needed is (documents + 1),"
                f" from 0 to at most {length}, of one packed row: hand over one row a micro-batch"
            )
        if ends[-1] == length:
            continue
        ends = ends.clone()
        ends[-1] = length
        micro_batch[key] = ends
        if longest in micro_batch:
            found = ends.diff().max()
            before = micro_batch[longest]
            micro_batch[longest] = found.to(before) if isinstance(before, Tensor) else int(found)
