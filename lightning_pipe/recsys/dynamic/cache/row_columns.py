"""Rows of someone else's tensors as bytes: what a table's weights and its optimiser's states hold of a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.store.row_store import Records

__all__ = ["Mark", "RowColumns"]

# A stream's handle, and an event on it.
Mark = tuple[int, torch.cuda.Event]


class RowColumns:
    """The columns of a table's rows: weights first, then the states of the optimiser.

    On a CUDA device what is read and written is in order with the current stream, behind whatever used the rows of
    batches that have ended.

    Args:
        table: its name.
        columns: contiguous, slots x numbers or slots alone, of any types, all on one device.
        state_fill: with what a new row's states begin, one number for each column but the first.

    Attributes:
        capacity: slots.
        kinds: shape of a row in each column, and the column's type.
        width: bytes of a row.

    Raises:
        SetupError: columns that do not fit each other.
    """

    def __init__(self, table: str, columns: Sequence[Tensor], state_fill: Sequence[float]) -> None:
        if not columns:
            raise SetupError(f"table {table!r} has no column, needed are its weights: pass columns=[weights, *states]")
        if len(state_fill) != len(columns) - 1:
            raise SetupError(
                f"table {table!r} has {len(columns) - 1} columns of optimiser states and {len(state_fill)} values in"
                " state_fill, needed is one for each: give as many"
            )
        # Not detach(): what is written here must not look like a change of what autograd has saved.
        self._columns = [column.data for column in columns]
        self.capacity, self.device = len(columns[0]), columns[0].device
        for index, column in enumerate(self._columns):
            if column.dim() not in (1, 2):
                raise SetupError(
                    f"column {index} of table {table!r} has shape {tuple(column.shape)}, needed is slots x numbers, or"
                    " slots alone: reshape it"
                )
            if len(column) != self.capacity or column.device != self.device or not column.is_contiguous():
                raise SetupError(
                    f"column {index} of table {table!r} has {len(column)} rows on {column.device}"
                    f"{'' if column.is_contiguous() else ' and is not contiguous'}, needed are {self.capacity},"
                    f" contiguous, on {self.device}: pass columns of one table"
                )
        self.kinds = [(tuple(column.shape[1:]), column.dtype) for column in self._columns]
        self._fill = list(state_fill)
        self._widths = [column[:1].numel() * column.element_size() for column in self._columns]
        self.width = sum(self._widths)
        # The last mark on each stream.
        self._marks: dict[int, torch.cuda.Event] = {}

    def read(self, rows: Slots) -> Tensor:
        """Bytes of *rows*: uint8 on the CPU, rows x width."""
        self._wait()
        at = torch.from_numpy(rows).to(self.device)
        parts = [column.index_select(0, at).cpu() for column in self._columns]
        return torch.cat([_matrix(part).view(torch.uint8) for part in parts], dim=1)

    def write(self, rows: Slots, records: Records) -> None:
        """Make *rows*, distinct, what ``read`` returned."""
        self._wait()
        at = torch.from_numpy(rows).to(self.device)
        for column, values in zip(self._columns, self.typed(records), strict=True):
            column.index_copy_(0, at, values.to(self.device))

    def start(self, rows: Slots, weights: Tensor) -> None:
        """Make *rows*, distinct, new ones: with these weights, and states as they begin."""
        self._wait()
        at = torch.from_numpy(rows).to(self.device)
        first, *states = self._columns
        first.index_copy_(0, at, weights.to(self.device, first.dtype).reshape(len(rows), *first.shape[1:]))
        for column, value in zip(states, self._fill, strict=True):
            column.index_fill_(0, at, value)

    def with_nan(self, rows: Slots) -> npt.NDArray[np.bool_]:
        """Which of *rows* have a number that is none."""
        self._wait()
        at = torch.from_numpy(rows).to(self.device)
        found = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        for column in self._columns:
            if column.is_floating_point():
                found |= _matrix(column.index_select(0, at)).isnan().any(dim=1)
        result: npt.NDArray[np.bool_] = found.cpu().numpy()
        return result

    def typed(self, records: Records) -> list[Tensor]:
        """Bytes as ``read`` returned them, column by column."""
        parts = np.split(records, np.cumsum(self._widths)[:-1], axis=1)
        return [
            # A copy: what a store returns may be read-only, and numbers need aligned addresses.
            torch.from_numpy(np.array(part, order="C")).view(column.dtype).view(len(records), *column.shape[1:])
            for column, part in zip(self._columns, parts, strict=True)
        ]

    def mark(self) -> Mark | None:
        """Behind what the current stream has been given so far; None where there are no streams."""
        if self.device.type != "cuda":
            return None
        stream, event = torch.cuda.current_stream(self.device), torch.cuda.Event()
        event.record(stream)
        return stream.cuda_stream, event

    def behind(self, mark: Mark | None) -> None:
        """Rows are read and written from now on behind *mark*; where it is None, behind all that the device has."""
        if mark is not None:
            stream, event = mark
            self._marks[stream] = event
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wait(self) -> None:
        for event in list(self._marks.values()):
            torch.cuda.current_stream(self.device).wait_event(event)


def _matrix(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 2 else rows.unsqueeze(1)
