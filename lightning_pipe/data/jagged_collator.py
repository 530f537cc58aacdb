"""From columns to batches with one KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.data.columns import Default, JaggedColumn, convert_rows_to_columns, to_jagged_column
from lightning_pipe.engine.common.errors import InputError, SetupError


class JaggedCollator:
    """Collates columns into a batch, without a Python loop over rows for Arrow, NumPy and PyTorch.

    It is a ``collate_fn`` of a ``DataLoader``, or a function for tables that are read in pieces.

    Args:
        sparse: columns of ids, which are the keys of the KeyedJaggedTensor in this order. A row holds an id or a list.
        dense: columns of numbers; a row holds a number, or a list of the same length in each row.
        labels: column of labels, or a sequence of columns.
        weights: for each column of ids, its column of weights, with as many values in each row (default: no weights).
        defaults: by column, the value of missing ones: a number, or a list in place of a missing list, such as ``()``
            (default: nothing may be missing). Missing are None, Arrow's nulls, and NaN.
        make_batch: function that makes the batch of dense features of shape [B, D] (float32), the KeyedJaggedTensor
            (int64 ids, int32 lengths, float32 weights), and labels of shape [B], or [B, L] for a sequence (float32).
            The default is ``torchrec.datasets.utils.Batch``.

    Raises:
        SetupError: there is no column of ids, a column is named twice, or weights or defaults name other columns.
    """

    def __init__(
        self,
        sparse: Sequence[str],
        dense: Sequence[str] = (),
        labels: str | Sequence[str] = "label",
        *,
        weights: Mapping[str, str] | None = None,
        defaults: Mapping[str, Default] | None = None,
        make_batch: Callable[[Tensor, KeyedJaggedTensor, Tensor], Any] = Batch,
    ) -> None:
        self.sparse, self.dense, self.labels = list(sparse), list(dense), labels
        self._labels = [labels] if isinstance(labels, str) else list(labels)
        self._weights, self._defaults, self._batch = dict(weights or {}), dict(defaults or {}), make_batch
        self._named = named = [*self.sparse, *self.dense, *self._labels, *self._weights.values()]
        if isinstance(sparse, str) or isinstance(dense, str) or not self.sparse:
            raise SetupError(f"sparse and dense must be lists of columns, sparse not empty; got {sparse!r}, {dense!r}")
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise SetupError(f"columns are named twice: {', '.join(twice)}. Name each column once")
        if self._weights and self._weights.keys() != set(self.sparse):
            raise SetupError(
                f"weights are given for {', '.join(self._weights)}, expected all columns of ids or none:"
                f" {', '.join(self.sparse)}. Features with and without weights need two KeyedJaggedTensors"
            )
        if unknown := sorted(self._defaults.keys() - set(named)):
            raise SetupError(f"defaults has columns that are not collated: {', '.join(unknown)}. Remove them")
        for name in self.sparse:
            if np.any(np.mod(self._defaults.get(name, 0), 1)):
                raise SetupError(f"defaults[{name!r}] is {self._defaults[name]}, but ids are whole numbers. Use one")

    def __call__(self, rows: Any) -> Any:
        """Collate *rows*."""
        columns = convert_rows_to_columns(rows)
        if absent := [name for name in self._named if name not in columns]:
            raise InputError(f"the data has no column {', '.join(absent)}, only {', '.join(map(str, columns))}")
        columns_by_name = {
            name: to_jagged_column(name, columns[name], self._defaults.get(name)) for name in self._named
        }
        sizes = {name: len(column.lengths) for name, column in columns_by_name.items()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise InputError(f"columns must have the same number of rows, 1 or more, got {sizes}")
        labels = self._make_dense_tensor(self._labels, columns_by_name)
        single_label = isinstance(self.labels, str) and labels.shape[1] == 1
        return self._batch(
            self._make_dense_tensor(self.dense, columns_by_name),
            self._make_kjt(columns_by_name),
            labels[:, 0] if single_label else labels,
        )

    def _make_kjt(self, columns_by_name: Mapping[str, JaggedColumn]) -> KeyedJaggedTensor:
        columns = [columns_by_name[name] for name in self.sparse]
        weights = None
        if self._weights:
            pairs = [(column, columns_by_name[self._weights[column.name]]) for column in columns]
            weights = _concat_arrays_to_tensor([_check_weight_lengths(*pair).values for pair in pairs], np.float32)
        return KeyedJaggedTensor(
            keys=self.sparse,
            values=_concat_arrays_to_tensor([_check_and_cast_ids(column) for column in columns], np.int64),
            lengths=_concat_arrays_to_tensor([column.lengths for column in columns], np.int32),
            weights=weights,
        )

    @staticmethod
    def _make_dense_tensor(names: Sequence[str], columns_by_name: Mapping[str, JaggedColumn]) -> Tensor:
        size = len(next(iter(columns_by_name.values())).lengths)
        parts = []
        for column in (columns_by_name[name] for name in names):
            width = int(column.lengths[0]) if column.width is None else column.width
            mismatched = column.lengths != width
            if mismatched.any():
                row = int(mismatched.argmax())
                raise InputError(
                    f"column {column.name!r}, row {row}: {column.lengths[row]} numbers, but row 0 has {width}. Dense"
                    " features and labels need the same number in each row"
                )
            parts.append(column.values.reshape(size, width))
        return _concat_arrays_to_tensor(parts or [np.empty((size, 0))], np.float32, axis=1)


def _concat_arrays_to_tensor(parts: Sequence[np.ndarray[Any, Any]], dtype: type, axis: int = 0) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, axis, dtype=dtype, casting="unsafe"))


def _check_and_cast_ids(column: JaggedColumn) -> np.ndarray[Any, Any]:
    ids = column.values
    if ids.dtype.kind == "f":  # Arrow, NumPy and pandas give floats if a value is missing
        exact = 2.0 ** (np.finfo(ids.dtype).nmant + 1)  # larger whole numbers are rounded
        column.raise_on_first_wrong_value(
            (ids != np.floor(ids)) | (np.abs(ids) > exact), "{} is no id", "Ids are whole numbers"
        )
        ids = ids.astype(np.int64)
    elif ids.dtype.kind == "u" and ids.dtype.itemsize == 8:
        column.raise_on_first_wrong_value(
            ids > np.iinfo(np.int64).max, "the id {} does not fit into 64 bits with a sign", "Hash or map it"
        )
        ids = ids.astype(np.int64)
    if ids.dtype.kind == "i":
        column.raise_on_first_wrong_value(
            ids < 0, "the id {} is negative", "Map ids to 0 and up; give missing ones a value in defaults"
        )
    return ids


def _check_weight_lengths(ids: JaggedColumn, weights: JaggedColumn) -> JaggedColumn:
    differ = ids.lengths != weights.lengths
    if differ.any():
        row = int(differ.argmax())
        raise InputError(
            f"column {weights.name!r}, row {row}: {weights.lengths[row]} weights for the {ids.lengths[row]} ids of"
            f" {ids.name!r}. Each id needs one weight"
        )
    return weights
