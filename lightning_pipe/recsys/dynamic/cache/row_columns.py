"""Access to the rows of a table as bytes: its weights and optimizer states, in tensors owned by the caller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.recsys.batches.transfer import move_tensor_to_device
from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.store.row_store import Records

# Handle of a stream, and an event recorded on it.
Mark = tuple[int, torch.cuda.Event]


class RowColumns:
    """Columns of a table: weights first, then the optimizer's states.

    On a CUDA device, reads and writes are ordered on the current stream, after all work that used the rows of ended
    batches.
    """

    def __init__(self, columns: Sequence[Tensor], state_fill: Sequence[float]) -> None:
        # .data instead of detach(): writes here must not increment the version of tensors that autograd has saved.
        self._columns = [column.data for column in columns]
        self.capacity, self.device = len(columns[0]), columns[0].device
        self.kinds = [(tuple(column.shape[1:]), column.dtype) for column in self._columns]
        self._fill = list(state_fill)
        self._widths = [column[:1].numel() * column.element_size() for column in self._columns]
        self.width = sum(self._widths)
        # Last mark on each stream.
        self._marks: dict[int, torch.cuda.Event] = {}

    def read(self, rows: Slots) -> Tensor:
        """Read the bytes of *rows*: uint8 on the CPU, [rows, width]."""
        self._make_stream_wait_for_events()
        index = self._copy_slot_indices_to_device(rows)
        parts = [column.index_select(0, index) for column in self._columns]
        return torch.cat([_unsqueeze_to_2d(part).view(torch.uint8) for part in parts], dim=1).cpu()

    def write(self, rows: Slots, records: Records) -> None:
        """Write bytes, in the format of ``read``, to *rows*, which are distinct."""
        self._make_stream_wait_for_events()
        index = self._copy_slot_indices_to_device(rows)
        for column, values in zip(self._columns, self.decode(records), strict=True):
            column.index_copy_(0, index, move_tensor_to_device(values, self.device))

    def initialize(self, rows: Slots, weights: Tensor) -> None:
        """Set *rows*, which are distinct, to new ones, with *weights* and the initial states."""
        self._make_stream_wait_for_events()
        index = self._copy_slot_indices_to_device(rows)
        first, *states = self._columns
        values = move_tensor_to_device(weights.to(first.dtype), self.device)
        first.index_copy_(0, index, values.reshape(len(rows), *first.shape[1:]))
        for column, value in zip(states, self._fill, strict=True):
            column.index_fill_(0, index, value)

    def get_nan_record_mask(self, records: Records) -> npt.NDArray[np.bool_]:
        """Mask of the records, in the format of ``read``, that contain NaN."""
        has_nan = torch.zeros(len(records), dtype=torch.bool)
        for column in self.decode(records):
            if column.is_floating_point():
                has_nan |= _unsqueeze_to_2d(column).isnan().any(dim=1)
        result: npt.NDArray[np.bool_] = has_nan.numpy()
        return result

    def snapshot(self) -> list[Tensor]:
        """Copies of all columns on the host."""
        self._make_stream_wait_for_events()
        return [column.to("cpu", copy=True) for column in self._columns]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Replace all columns by those of a snapshot."""
        self._make_stream_wait_for_events()
        for column, values in zip(self._columns, snapshot, strict=True):
            column.copy_(values)

    def decode(self, records: Records) -> list[Tensor]:
        """Convert bytes, in the format of ``read``, to one tensor for each column."""
        parts = np.split(records, np.cumsum(self._widths)[:-1], axis=1)
        return [
            # Copied, because a store may return read-only memory, and the numbers need aligned addresses.
            torch.from_numpy(np.array(part, order="C")).view(column.dtype).view(len(records), *column.shape[1:])
            for column, part in zip(self._columns, parts, strict=True)
        ]

    def record_event(self) -> Mark | None:
        """Record an event after the work submitted to the current stream so far; None without CUDA."""
        if self.device.type != "cuda":
            return None
        stream, event = torch.cuda.current_stream(self.device), torch.cuda.Event()
        event.record(stream)
        return stream.cuda_stream, event

    def order_after(self, mark: Mark | None) -> None:
        """Order later reads and writes after *mark*; if it is None, synchronize with the device."""
        if mark is not None:
            stream, event = mark
            self._marks[stream] = event
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _copy_slot_indices_to_device(self, rows: Slots) -> Tensor:
        return move_tensor_to_device(torch.from_numpy(rows), self.device)

    def _make_stream_wait_for_events(self) -> None:
        for event in list(self._marks.values()):
            torch.cuda.current_stream(self.device).wait_event(event)


def _unsqueeze_to_2d(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 2 else rows.unsqueeze(1)
