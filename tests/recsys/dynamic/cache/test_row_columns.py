"""Rows of columns of any types come back to the bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.recsys.dynamic.cache.row_columns import RowColumns


def _columns() -> list[Tensor]:
    torch.manual_seed(0)
    bits = torch.randint(0, 256, (9, 3, 2), dtype=torch.uint8)
    # Any bits, NaN with a payload too.
    half = bits.view(torch.bfloat16).reshape(9, 3).clone()
    return [half, torch.randn(9), torch.randn(9, 5, dtype=torch.float64), torch.arange(9), torch.ones(9, 1).bool()]


FILL = [0.5, 0.25, 7, 1]


def test_rows_come_back_to_the_bit() -> None:
    columns = _columns()
    before = [column.clone() for column in columns]
    rows = RowColumns(columns, FILL)
    assert rows.width == 6 + 4 + 40 + 8 + 1
    chosen = np.array([4, 0, 8])
    records = rows.read(chosen).numpy()
    rows.initialize(chosen, torch.full((3, 3), 2.0))
    assert columns[0][[4, 0, 8]].tolist() == [[2.0] * 3] * 3
    assert [column[4].flatten().tolist() for column in columns[1:]] == [[0.5], [0.25] * 5, [7], [True]]
    records.flags.writeable = False
    rows.write(chosen, records)
    for column, old in zip(columns, before, strict=True):
        assert torch.equal(column.view(torch.uint8), old.view(torch.uint8))
    for one in chosen:  # each alone: nothing is aligned then
        rows.write(np.array([one]), rows.read(np.array([one])).numpy())
    for column, old, typed in zip(columns, before, rows.decode(records), strict=True):
        assert torch.equal(column.view(torch.uint8), old.view(torch.uint8))
        assert typed.shape == (3, *column.shape[1:])
        assert torch.equal(typed.view(torch.uint8), old[[4, 0, 8]].view(torch.uint8))


def test_what_autograd_has_saved_is_not_said_to_have_changed() -> None:
    weights = torch.ones(4, 2, requires_grad=True)
    looked_up = weights * weights
    RowColumns([weights], []).initialize(np.array([3]), torch.zeros(1, 2))
    looked_up[:3].sum().backward()
    assert weights.grad is not None
    assert weights.grad[:3].tolist() == [[2.0, 2.0]] * 3


def test_nan_is_found_in_every_column_of_floats() -> None:
    columns = [torch.zeros(4, 2), torch.zeros(4), torch.zeros(4, dtype=torch.int64)]
    columns[0][1, 1] = columns[1][3] = float("nan")
    rows = RowColumns(columns, [0, 0])
    assert rows.get_nan_record_mask(rows.read(np.array([3, 2, 1])).numpy()).tolist() == [True, False, True]
