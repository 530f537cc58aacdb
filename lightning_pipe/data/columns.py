"""Columns of a table as flat arrays: Arrow, NumPy, PyTorch, lists, and objects that Arrow can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.common.safe_text import short_repr

Array = NDArray[Any]
Default = float | Sequence[float]


@dataclass
class JaggedColumn:
    """Values of a column, row after row.

    Attributes:
        name: name of the column, for errors.
        values: values, of shape [V].
        lengths: number of values of each row, of shape [B].
        width: number of values of every row; None if it can differ between rows.
    """

    name: str
    values: Array
    lengths: Array
    width: int | None

    def raise_on_first_wrong_value(self, wrong: Array, problem: str, fix: str) -> None:
        """Raise an InputError for the first value for which *wrong*, of shape [V], is True."""
        if wrong.any():
            first = int(wrong.argmax())
            row = np.searchsorted(np.cumsum(self.lengths), first, side="right")
            raise InputError(f"column {self.name!r}, row {row}: {problem.format(self.values[first])}. {fix}")


def convert_rows_to_columns(rows: Any) -> Mapping[str, Any]:
    """Columns by name of a table, of a mapping of columns, or of a list of rows, each a mapping."""
    if isinstance(rows, Mapping):
        return rows
    if hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__"):
        import pyarrow as pa

        table = rows if isinstance(rows, pa.Table | pa.RecordBatch) else pa.table(rows)
        return dict(zip(table.schema.names, table.columns, strict=True))
    if isinstance(rows, Sequence) and rows and all(isinstance(row, Mapping) for row in rows):
        try:
            return {name: [row[name] for row in rows] for name in rows[0]}
        except KeyError as error:
            raise InputError(f"not every row has the column {error.args[0]!r}, which the first row has") from None
    raise InputError(
        f"expected a table, a mapping of columns, or a list of rows that are mappings, got"
        f" {short_repr(type(rows).__name__)}{' without rows' if isinstance(rows, Sequence) and not rows else ''}"
    )


def to_jagged_column(name: str, data: Any, default: Default | None) -> JaggedColumn:
    """Read a column. Missing are None, Arrow's nulls, and NaN."""
    values, lengths, width, no_row = _to_values_and_lengths(name, data, default)
    column = JaggedColumn(name, values, lengths, width)
    if no_row is not None and no_row.any():
        if default is None:
            first = int(no_row.argmax())
            raise InputError(f"column {name!r}, row {first}: the list is missing. Give the column an entry in defaults")
        column = _fill_missing_lists_with_default(column, no_row, np.atleast_1d(np.asarray(default, values.dtype)))
    if column.values.dtype.kind == "f" and (missing := np.isnan(column.values)).any():
        if default is None or np.ndim(default) > 0:
            column.raise_on_first_wrong_value(missing, "the value is missing", "Give the column a number in defaults")
        column.values = np.where(missing, np.asarray(default, column.values.dtype), column.values)
    if column.values.dtype.kind not in "biuf":
        raise InputError(f"column {name!r} holds {column.values.dtype}, expected numbers. Map its values to ids first")
    return column


def _fill_missing_lists_with_default(column: JaggedColumn, no_row: Array, filler: Array) -> JaggedColumn:
    """Insert a list into each row without one."""
    places = np.cumsum(column.lengths)[no_row].repeat(len(filler))
    values = np.insert(column.values, places, np.tile(filler, int(no_row.sum())))
    return JaggedColumn(column.name, values, np.where(no_row, len(filler), column.lengths), None)


def _to_values_and_lengths(
    name: str, data: Any, default: Default | None
) -> tuple[Array, Array, int | None, Array | None]:
    """Values, lengths, width, and rows whose list is missing (None: none). Missing values are NaN."""
    if isinstance(data, JaggedTensor):
        return data.values().numpy(), data.lengths().numpy(), None, None
    if isinstance(data, torch.Tensor):
        data = data.detach().float() if data.dtype == torch.bfloat16 else data.detach()
        if data.is_nested:
            nested: Any = data.contiguous()
            if data.layout != torch.jagged:
                raise InputError(f"column {name!r} is a strided nested tensor. Make it with layout=torch.jagged")
            return nested.values().numpy(), nested.offsets().diff().numpy(), None, None
        data = data.numpy()
    if isinstance(data, np.ndarray) and data.dtype != object:
        if data.ndim not in (1, 2):
            raise InputError(f"column {name!r} has the shape {data.shape}, expected one or two dimensions")
        width = 1 if data.ndim == 1 else data.shape[1]
        return data.reshape(-1), np.full(len(data), width), width, None
    import pyarrow as pa

    try:
        if isinstance(data, Sequence | np.ndarray):
            data = pa.array([row.tolist() if hasattr(row, "tolist") else row for row in data])
        return _flatten_arrow(data if isinstance(data, pa.Array | pa.ChunkedArray) else pa.chunked_array(data), default)
    except (TypeError, pa.ArrowException) as error:
        raise InputError(f"column {name!r} cannot be read, expected a number or a list in each row: {error}") from error


def _flatten_arrow(array: Any, default: Default | None) -> tuple[Array, Array, int | None, Array | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):  # Arrow knows no type if all values are missing
        array = array.cast(pa.float64() if default is None or np.ndim(default) == 0 else pa.list_(pa.float64()))
    lengths: Array = np.ones(len(array), int)
    width: int | None = 1
    no_row: Array | None = None
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        no_row = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        width = array.type.list_size if pa.types.is_fixed_size_list(array.type) and no_row is None else None
        array = array.flatten()  # without the values of missing lists
        array = array.cast(pa.float64()) if pa.types.is_null(array.type) else array  # all lists are empty
    if array.null_count and default is not None and np.ndim(default) == 0:
        array = array.fill_null(default)  # NumPy's integers have no missing values
    return array.to_numpy(zero_copy_only=False), lengths, width, no_row
