"""Padding of all micro-batches of a step to one sequence length.

Stages exchange tensors of a shape fixed before the step, so its micro-batches must have the same length. Padding is
added at the end of the sequence, with ignored labels, and extends the last document of a packed row: variable-length
attention kernels handle a separate document of padding badly, and the real tokens of a causal model never attend to
later positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.host_values import copy_to_device_of

_MASK = "attention_mask"
# Document boundaries of a packed row, and the lengths of the longest documents.
BOUNDARIES = {"cu_seq_lens_q": "max_length_q", "cu_seq_lens_k": "max_length_k"}


@dataclass(frozen=True)
class PadValues:
    """Pad values of the entries of a micro-batch with the shape (rows, length, ...).

    Attributes:
        input_ids: any valid token (default 0).
        labels: label that the loss ignores (default -100).
        attention_mask: value of a (rows, length) mask at padding (default 0). For masks of (..., length, length), see
            :func:`pad_microbatch`.
        position_ids: any valid position (default 0).
        extra_pad_values: pad values of further keys, such as ``{"token_type_ids": 0}`` (default: none).
        chunk_dims: dimension of the rows by key, which the length follows (default: 0 for all keys).
    """

    input_ids: int = 0
    labels: int = -100
    attention_mask: int = 0
    position_ids: int = 0
    extra_pad_values: Mapping[str, float] = field(default_factory=dict)
    chunk_dims: Mapping[str, int | None] = field(default_factory=dict)

    def get_row_dim(self, key: str) -> int:
        """Dimension of the rows; the next one is the length."""
        return self.chunk_dims.get(key, 0) or 0

    def get_microbatch_rows_and_length(self, micro_batch: Mapping[str, Any]) -> tuple[int, int]:
        """Rows and length of a micro-batch; (0, 0) if it has no sequences."""
        sequences = {
            key: micro_batch[key] for key in self.pad_value_by_key() if isinstance(micro_batch.get(key), Tensor)
        }
        shape = next((tuple(value.shape[self.get_row_dim(key) :]) for key, value in sequences.items()), ())
        return (shape[0], shape[1]) if len(shape) > 1 else (0, 0)

    def pad_value_by_key(self) -> dict[str, float]:
        """Pad value of each key."""
        defaults: dict[str, float] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            _MASK: self.attention_mask,
            "position_ids": self.position_ids,
            "routed_experts": 0,
        }
        return defaults | dict(self.extra_pad_values)


def pad_microbatch(
    micro_batch: Mapping[str, Any],
    length: int,
    padding: PadValues | None = None,
    padded_on_host: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Pad one micro-batch at the end of its sequences. Tensors that already fit are returned without a copy.

    - An ``attention_mask`` of (..., length, length) is padded on both dimensions: no real token attends to padding,
      and a padding token only to itself, so that no row of the softmax is empty. Floating masks are taken as additive.
    - ``cu_seq_lens_q/k`` (1-d, of one packed row): the last document is extended to the end, in a copy, and
      ``max_length_q/k`` are updated to the length of the longest document. If the micro-batch is given as padded on the
      host, all four are copied from there.
    - Missing entries are not added: a causal model without a mask does not attend to later positions.
    """
    padded = dict(micro_batch)
    padding = padding or PadValues()
    values = padding.pad_value_by_key()
    sequences = {key: padded[key] for key in values if isinstance(padded.get(key), Tensor)}
    present = _get_common_sequence_length(sequences, padding)
    if present is not None and present < length:
        for key, value in sequences.items():
            if key == _MASK and value.ndim > 2:
                padded[key] = _pad_square(value, length)
            else:
                # F.pad counts dimensions from the last one, two numbers each.
                after = value.ndim - 2 - padding.get_row_dim(key)
                padded[key] = F.pad(value, (0, 0) * after + (0, length - present), value=values[key])
    rows = max((value.shape[padding.get_row_dim(key)] for key, value in sequences.items()), default=1)
    if padded_on_host is None:
        extend_last_document(padded, length, rows)
    else:
        names = [name for name in (*BOUNDARIES, *BOUNDARIES.values()) if name in padded]
        padded |= {name: copy_to_device_of(padded[name], padded_on_host[name]) for name in names}
    for key, mask in padded.items():
        if isinstance(mask, BlockMask) and (mask.shape[-2:] != (length, length) or mask.shape[0] not in (1, rows)):
            raise InputError(
                f"the micro-batch's {key!r} is a BlockMask of {tuple(mask.shape)}, and its tokens are {rows} rows of"
                f" {length} after padding; expected ({rows} or 1, heads or 1, {length}, {length}). Build the mask in"
                " model_inputs, which gets each padded micro-batch"
            )
    return padded


def _convert_bool_mask_to_dtype(attends: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask (True attends) to a mask of the given dtype."""
    if dtype.is_floating_point:
        return torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill_(~attends, float("-inf"))
    return attends.to(dtype)


def _get_common_sequence_length(sequences: Mapping[str, Tensor], keys: PadValues) -> int | None:
    """Current length of all sequences; None if the micro-batch has no sequences."""
    shapes = {key: tuple(value.shape) for key, value in sequences.items()}
    dims = {key: keys.get_row_dim(key) + 1 for key in shapes}
    flat = [key for key, shape in shapes.items() if len(shape) <= dims[key]]
    if flat:
        raise InputError(
            f"the micro-batch's {flat[0]!r} has the shape {shapes[flat[0]]}; expected (rows, length). Add a"
            " dimension of rows"
        )
    lengths = {key: shape[-1] if key == _MASK and len(shape) > 2 else shape[dims[key]] for key, shape in shapes.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(
            f"the micro-batch's sequences have the lengths {lengths}; expected one length for all, since padding"
            " would hide which tokens belong together. Correct the collate function"
        )
    present = next(iter(lengths.values()), None)
    return present


def _pad_square(mask: Tensor, length: int) -> Tensor:
    present = mask.shape[-1]
    if mask.shape[-2] != present:
        raise InputError(
            f"the micro-batch's {_MASK!r} has the shape {tuple(mask.shape)}; expected (..., {present}, {present}),"
            " queries by keys, or (rows, length)"
        )
    itself = torch.eye(length, dtype=torch.bool, device=mask.device)
    padded = _convert_bool_mask_to_dtype(itself, mask.dtype).expand(*mask.shape[:-2], length, length).clone()
    padded[..., :present, :present] = mask
    return padded


def _check_documents(micro_batch: Mapping[str, Any], rows: int, length: int) -> None:
    """Check that ``cu_seq_lens_q/k``, if present, are the document boundaries of one packed row."""
    for key in BOUNDARIES:
        ends = micro_batch.get(key)
        if ends is None:
            continue
        shown, positions = f"is a {type(ends).__name__}", []
        if isinstance(ends, Tensor):
            positions = ends.flatten().tolist()
            shown = f"has the shape {tuple(ends.shape)}, begins at {positions[:1]} and ends at {positions[-1:]}"
        is_row = rows == 1 and len(positions) > 1 and ends.ndim == 1
        if not is_row or positions[0] != 0 or positions[-1] > length or positions != sorted(positions):
            raise InputError(
                f"the micro-batch's {key!r} {shown}, for {rows} row(s) of {length} tokens; expected a tensor of"
                f" (documents + 1) positions, ascending from 0 to at most {length}, of one packed row. Use one row for"
                " each micro-batch"
            )


def extend_last_document(micro_batch: dict[str, Any], length: int, rows: int) -> None:
    """Check document boundaries, and extend the last document to the end of its row."""
    _check_documents(micro_batch, rows, length)
    for key, longest in BOUNDARIES.items():
        ends = micro_batch.get(key)
        if ends is None or ends[-1] == length:
            continue
        ends = ends.clone()
        ends[-1] = length
        micro_batch[key] = ends
        if longest in micro_batch:
            max_length = ends.diff().max()
            before = micro_batch[longest]
            micro_batch[longest] = max_length.to(before) if isinstance(before, Tensor) else int(max_length)
