"""Conversion of a batch's samples to bytes, and of received bytes to a batch.

    batch ── dense tensors, lengths ──► rows:    R bytes per sample                      ┐ in the requested
          ── ids, weights ────────────► streams: for each sample the bytes of its ids    ┘ order of samples

A *sample* is one row of every dense and every jagged tensor. Rows after the real samples are padding, which stays at
the end of its rank's batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.batches.traversal import LEAF_TYPES, BatchPath, field_names, format_path, iterate_children

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass
class _Jagged:
    """View of a jagged tensor as lists, samples x keys."""

    piece: KeyedJaggedTensor | JaggedTensor
    lengths: Tensor  # rows x keys
    streams: list[Tensor]  # the values, and the weights if the tensor has any; one entry per id
    totals: Tensor  # number of ids of each row


class Samples:
    """Samples of a batch, made by :func:`locate_sample_tensors`."""

    def __init__(
        self,
        batch: Any,
        rows: int,
        real: int,
        dense: list[Tensor | KeyedTensor],
        jagged: list[_Jagged],
        description: list[tuple[str, str]],
    ) -> None:
        self._batch = batch
        self.num_rows, self.num_samples = rows, real
        self._dense = dense
        self._jagged = jagged
        self.description = description

    @property
    def device(self) -> torch.device:
        """Device of the samples."""
        tensors = [_get_keyed_tensor_values(piece) for piece in self._dense] + [piece.lengths for piece in self._jagged]
        return tensors[0].device

    @property
    def id_counts_per_sample(self) -> list[Tensor]:
        """Number of ids of each real sample, for each jagged tensor."""
        return [jagged.totals[: self.num_samples] for jagged in self._jagged]

    def count_ids_per_sample(self) -> Tensor:
        """Number of ids of each real sample, summed over all KeyedJaggedTensors."""
        totals = [
            jagged.totals[: self.num_samples] for jagged in self._jagged if isinstance(jagged.piece, KeyedJaggedTensor)
        ]
        if not totals:
            raise InputError(
                "the batch has no KeyedJaggedTensor, whose ids are the default workload of a sample. Give the balancer"
                " a workload function that returns the cost of each sample"
            )
        return torch.stack(totals).sum(0)

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        dense = (_get_keyed_tensor_values(piece) for piece in self._dense)
        lengths = (jagged.lengths for jagged in self._jagged)
        return sum(_count_bytes_per_row(tensor) for tensor in (*dense, *lengths))

    @property
    def bytes_per_jagged_entry(self) -> list[tuple[int, int]]:
        """For each stream, the index of its jagged tensor and the number of bytes of an entry."""
        return [
            (place, _count_bytes_per_row(stream))
            for place, jagged in enumerate(self._jagged)
            for stream in jagged.streams
        ]

    # ------------------------------------------------------------------ to bytes

    def pack_rows(self, order: Tensor) -> Tensor:
        """Return the rows of the real samples in *order*, as concatenated bytes."""
        columns = [_as_bytes(_get_keyed_tensor_values(piece).detach().index_select(0, order)) for piece in self._dense]
        columns += [_as_bytes(jagged.lengths.index_select(0, order)) for jagged in self._jagged]
        return torch.cat(columns, dim=1).reshape(-1)

    def pack_streams(self, order: Tensor, totals: Sequence[int]) -> list[Tensor]:
        """Return the streams of the real samples in *order*, as bytes."""
        packed: list[Tensor] = []
        for jagged, total in zip(self._jagged, totals, strict=True):
            picks = _compute_value_indices_of_samples(jagged, order, total)
            packed += [_as_bytes(stream.detach().index_select(0, picks)).reshape(-1) for stream in jagged.streams]
        return packed

    # ------------------------------------------------------------------ from bytes

    def rebuild_batch(self, rows: Tensor, streams: Sequence[Tensor]) -> Any:
        """Return the batch with its real samples replaced by the same number of others. All other parts stay."""
        replacements: dict[int, Any] = {}
        table, begin = rows.view(self.num_samples, self.row_bytes), 0

        def unpack_next_column(like: Tensor) -> Tensor:
            nonlocal begin
            width = _count_bytes_per_row(like)
            column_bytes = table[:, begin : begin + width].clone(memory_format=torch.contiguous_format)
            begin += width
            real = column_bytes.view(-1).view(like.dtype).view(self.num_samples, *like.shape[1:])
            return real if self.num_samples == self.num_rows else torch.cat([real, like.detach()[self.num_samples :]])

        for piece in self._dense:
            column = unpack_next_column(_get_keyed_tensor_values(piece))
            replacements[id(piece)] = (
                column if isinstance(piece, Tensor) else KeyedTensor(piece.keys(), piece.length_per_key(), column)
            )
        remaining_streams = iter(streams)
        for jagged in self._jagged:
            lengths = unpack_next_column(jagged.lengths)
            values = [next(remaining_streams).view(like.dtype).view(-1, *like.shape[1:]) for like in jagged.streams]
            replacements[id(jagged.piece)] = self._rebuild_jagged(jagged, lengths, values)
        return _replace_leaves_in_batch(self._batch, replacements, {})

    def _rebuild_jagged(self, jagged: _Jagged, lengths: Tensor, by_sample: list[Tensor]) -> Any:
        if self.num_samples < self.num_rows:
            padding = torch.arange(self.num_samples, self.num_rows, device=lengths.device)
            picks = _compute_value_indices_of_samples(jagged, padding, int(jagged.totals[self.num_samples :].sum()))
            by_sample = [
                torch.cat([stream, original[picks]]) for stream, original in zip(by_sample, jagged.streams, strict=True)
            ]
        starts = _offsets(lengths.reshape(-1)).view_as(lengths).t().reshape(-1)
        by_key = lengths.t().reshape(-1)
        if lengths.shape[1] != 1:
            picks = _concatenate_ranges(starts, by_key, len(by_sample[0]))
            by_sample = [stream.index_select(0, picks) for stream in by_sample]
        values, weights = (*by_sample, None)[:2]
        piece = jagged.piece
        if isinstance(piece, KeyedJaggedTensor):
            return KeyedJaggedTensor(piece.keys(), values, weights, lengths=by_key, stride=self.num_rows)
        return JaggedTensor(values, weights, lengths=by_key)


def locate_sample_tensors(batch: Any, real: int | None = None, keep: Collection[str] = ()) -> Samples:
    """Find the samples of *batch*."""
    pieces: dict[int, tuple[str, Any]] = {}
    other_parts: list[tuple[str, Any]] = []
    kept_names: set[str] = set()
    for path, value in _iterate_batch_parts(batch, (), (), keep):
        name = format_path(path)
        if name in keep:
            kept_names.add(name)
            continue
        if not isinstance(value, LEAF_TYPES):
            other_parts.append((name, value))
        elif not isinstance(value, Tensor) or value.dim():
            pieces.setdefault(id(value), (name, value))
    named_pieces = list(pieces.values())
    if missing := [name for name in keep if name not in kept_names]:
        raise InputError(
            f"the balancer's local_parts names {', '.join(missing)}, which the batch, a {type(batch).__name__}, does"
            " not have; expected names of its parts, such as 'batch.class_weights' or \"batch['weights'][0]\""
        )
    if not named_pieces:
        raise InputError(
            f"the batch, a {type(batch).__name__}, has no tensor with a row for each sample, so it cannot be balanced."
            " Put the samples into tensors or train without a balancer"
        )
    first, first_piece = next(
        ((name, piece) for name, piece in named_pieces if isinstance(piece, (KeyedJaggedTensor, JaggedTensor))),
        named_pieces[0],
    )
    rows = _count_rows_of_tensor_or_kjt(first, first_piece)
    for name, piece in named_pieces:
        if (piece_rows := _count_rows_of_tensor_or_kjt(name, piece)) != rows:
            raise InputError(
                f"{name} has {piece_rows} row(s), but {first} has {rows}; expected a row for each sample in every part"
                f" of a balanced batch. If {name} belongs to the batch as a whole, name it in the"
                " balancer's local_parts"
            )
    for name, value in other_parts:
        if _has_entry_per_sample(value, rows):
            raise InputError(
                f"{name} is a {type(value).__name__} with one entry for each of {rows} samples, and only tensors can be"
                f" exchanged. Make it a tensor or, if it belongs to the batch as a whole, name it in the balancer's"
                " local_parts"
            )
    real = rows if real is None else real
    if not 0 <= real <= rows:
        raise InputError(
            f"the balancer's argument num_samples gave {real} samples for the batch, but {first} has {rows} row(s);"
            f" expected 0 to {rows}"
        )
    jagged = [
        _make_jagged_view(name, piece, rows)
        for name, piece in named_pieces
        if isinstance(piece, (KeyedJaggedTensor, JaggedTensor))
    ]
    dense = [piece for _, piece in named_pieces if isinstance(piece, (Tensor, KeyedTensor))]
    return Samples(
        batch, rows, real, dense, jagged, [(name, _describe_tensor_or_kjt(piece)) for name, piece in named_pieces]
    )


# ---------------------------------------------------------------------- the parts of a batch


def _iterate_batch_parts(
    value: Any, path: BatchPath, parents: tuple[int, ...], keep: Collection[str]
) -> Iterator[tuple[BatchPath, Any]]:
    yield path, value
    if isinstance(value, LEAF_TYPES) or id(value) in parents or format_path(path) in keep:
        return
    for step, child in iterate_children(value):
        yield from _iterate_batch_parts(child, (*path, step), (*parents, id(value)), keep)


def _count_rows_of_tensor_or_kjt(name: str, piece: Any) -> int:
    if isinstance(piece, KeyedJaggedTensor):
        if piece.variable_stride_per_key():
            raise InputError(
                f"{name} has a batch size per feature, so its lists cannot be assigned to samples. Use one batch size"
                " for all features, or train without a balancer"
            )
        return piece.stride()
    if isinstance(piece, JaggedTensor):
        return len(piece.lengths())
    tensor = _get_keyed_tensor_values(piece)
    if tensor.is_nested or tensor.layout != torch.strided:
        raise InputError(
            f"{name} is a nested or sparse tensor; expected a dense tensor or one of TorchRec's jagged tensors"
        )
    return len(tensor)


def _has_entry_per_sample(value: Any, rows: int) -> bool:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return rows > 0 and len(value) == rows and all(isinstance(entry, _PLAIN) for entry in value)
    shape = getattr(value, "shape", None)  # arrays of NumPy and similar libraries
    return isinstance(shape, tuple) and len(shape) > 0 and shape[0] == rows


def _make_jagged_view(name: str, piece: Any, rows: int) -> _Jagged:
    # Checked on the CPU only: on a GPU the check would synchronize.
    if not piece.lengths().is_cuda:
        total, ids = int(piece.lengths().sum()), len(piece.values())
        if total != ids or bool((piece.lengths() < 0).any()):
            raise InputError(
                f"{name} has {ids} ids, but its lengths add up to {total} and their minimum is"
                f" {int(piece.lengths().min())}; expected lengths >= 0 that add up to the number of ids. Fix the code"
                " that makes the batch"
            )
    weights = piece.weights_or_none()
    streams = [piece.values()] if weights is None else [piece.values(), weights]
    lengths = piece.lengths().view(-1, rows) if rows else piece.lengths().view(_count_feature_keys(piece), 0)
    return _Jagged(piece, lengths.t(), streams, lengths.sum(0, dtype=torch.int64))


def _count_feature_keys(piece: Any) -> int:
    return len(piece.keys()) if isinstance(piece, KeyedJaggedTensor) else 1


def _describe_tensor_or_kjt(piece: Any) -> str:
    if isinstance(piece, Tensor):
        return f"tensor of {piece.dtype}, rows of {list(piece.shape[1:])}"
    if isinstance(piece, KeyedTensor):
        return f"keyed tensor of {piece.values().dtype}, {dict(zip(piece.keys(), piece.length_per_key(), strict=True))}"
    weights, values = piece.weights_or_none(), piece.values()
    weights_form = "no weights" if weights is None else f"weights of {weights.dtype}{list(weights.shape[1:])}"
    keys = piece.keys() if isinstance(piece, KeyedJaggedTensor) else "no keys"
    return (
        f"jagged, {keys}, values of {values.dtype}{list(values.shape[1:])}, {weights_form},"
        f" lengths of {piece.lengths().dtype}"
    )


def _get_keyed_tensor_values(piece: Tensor | KeyedTensor) -> Tensor:
    return piece.values() if isinstance(piece, KeyedTensor) else piece


def _replace_leaves_in_batch(value: Any, replacements: Mapping[int, Any], seen: dict[int, Any]) -> Any:
    """Return *value* with its pieces replaced by *replacements*; objects without such pieces are not copied."""
    if id(value) in replacements:
        return replacements[id(value)]
    if isinstance(value, LEAF_TYPES) or id(value) in seen:
        return seen.get(id(value), value)
    seen[id(value)] = value  # also ends a cycle
    parts = [
        (step, child, _replace_leaves_in_batch(child, replacements, seen)) for step, child in iterate_children(value)
    ]
    if any(child is not rebuilt for _, child, rebuilt in parts):
        seen[id(value)] = _copy_with_parts(value, [rebuilt for _, _, rebuilt in parts])
    return seen[id(value)]


def _copy_with_parts(value: Any, parts: list[Any]) -> Any:
    build: Callable[..., Any] = type(value)
    if isinstance(value, Mapping):
        entries = dict(zip(value, parts, strict=True))
        if not isinstance(value, MutableMapping):
            return build(entries)
        mapping = copy.copy(value)
        mapping.update(entries)
        return mapping
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return build(*parts)
    if isinstance(value, Sequence):
        return build(parts)
    copied = copy.copy(value)  # not constructed: some fields may not be arguments of the constructor
    for name, part in zip((name for name in field_names(value) if hasattr(value, name)), parts, strict=True):
        object.__setattr__(copied, name, part)
    return copied


# ---------------------------------------------------------------------- segments and bytes


def _compute_value_indices_of_samples(jagged: _Jagged, order: Tensor, total: int) -> Tensor:
    """Indices of the samples' ids in the streams, ordered by sample and then by key."""
    keys_first = jagged.lengths.t().reshape(-1)
    starts = _offsets(keys_first).view(jagged.lengths.shape[1], -1).t()
    picked = jagged.lengths.index_select(0, order)
    return _concatenate_ranges(starts.index_select(0, order).reshape(-1), picked.reshape(-1), total)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cumsum(lengths, 0, dtype=torch.int64) - lengths


def _concatenate_ranges(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Concatenated ranges ``start .. start + length - 1``; *total* is the sum of the lengths."""
    shifts = torch.repeat_interleave(starts - _offsets(lengths), lengths, output_size=total)
    return shifts + torch.arange(total, device=starts.device)


def _count_bytes_per_row(tensor: Tensor) -> int:
    return tensor.element_size() * tensor[:0].flatten(1).shape[1] if tensor.dim() > 1 else tensor.element_size()


def _as_bytes(tensor: Tensor) -> Tensor:
    """View of a tensor as bytes, rows x bytes of a row."""
    return (
        tensor.contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .view(len(tensor), -1 if tensor.numel() else _count_bytes_per_row(tensor))
    )
