"""A function of initial values that fails where a batch ends fails the next one, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.recsys.dynamic.dynamic_cases import SGD, Batch, Model, rows_of, shard, train
from tests.recsys.dynamic.dynamic_cases import initial as row_values
from tests.recsys.dynamic.small_table import Table, first_values

PLANS = ("serial", "threaded_input", "prefetch", "fused_sparse_dist")


class Values:
    """First values of rows, but for times when there are none."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self, ids: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("no values today")
        return first_values(ids)


@pytest.mark.parametrize("way", ["a batch that is trained", "a batch that is given up"])
def test_rows_that_could_not_start_anew_are_not_read_before_they_have(way: str) -> None:
    values = Values()
    table = Table(initial=values, admission_threshold=2)
    ticket = table.prefetch(7)
    table.cache.begin_batch_and_count_ids(ticket, 1)
    table.backward(ticket)
    values.fails = True
    if way == "a batch that is trained":
        table.cache.end_trained(ticket)
    else:
        table.cache.end_untrained(ticket)
    other = [
        table.cache.flush,
        lambda: table.prefetch(7),
        lambda: table.look(8),
        lambda: list(table.cache.flush_and_scan_rows()),
    ]
    for read in other:
        with pytest.raises(ValueError, match="no values today"):
            read()
    values.fails = False
    assert table.look(7) == [(7.0, 0.5)]
    table.cache.flush()
    assert table.stored() == ({7: (1, 1)} if way == "a batch that is trained" else {})


def test_rows_that_are_forgotten_are_owed_nothing() -> None:
    values = Values()
    table = Table(initial=values, admission_threshold=2)
    ticket = table.prefetch(7)
    table.cache.begin_batch_and_count_ids(ticket, 1)
    values.fails = True
    table.cache.end_trained(ticket)
    table.cache.clear_without_writing()
    values.fails = False
    table.train(1, 1, 2, 3, 4)
    table.train(2, 1, 2, 3, 4)
    assert table.look(1) == [(2.0, 1.5)]


class Failing(Model):
    """On rank 1 the function of initial values fails from the forward pass of the fourth batch on."""

    def __init__(self, store: Path, fails: list[bool], **options: Any) -> None:
        super().__init__(store, **options)
        self.fails, self.calls = fails, 0

    def forward(self, batch: Batch) -> Any:
        found = super().forward(batch)
        self.calls += 1
        self.fails[0] = dist.get_rank() == 1 and self.calls >= 4
        return found


def failing(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """Of each plan what is raised, whether rows that are not admitted are as they begin, and how many there are."""
    found = {}
    for plan in PLANS:
        fails = [False]

        def values(ids: Tensor, fails: list[bool] = fails) -> Tensor:
            if fails[0]:
                raise ValueError("no values today")
            return row_values(ids)

        sharded = shard(Failing(path / plan, fails, initial=values, admission_threshold=3), SGD)
        try:
            train(sharded, range(8), plan)
        except Exception as error:
            message = str(error)
        fails[0] = False
        rows = rows_of(sharded)
        first = all(
            torch.equal(columns[0], row_values(torch.tensor([id]))[0])
            for table in rows.values()
            for id, columns in table.items()
            if columns[-1][0] < 3
        )
        found[plan] = (message, first, sum(map(len, rows.values())))
        sharded.close()
    return found


def test_a_function_that_fails_where_a_batch_ends_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    for found in run_ranks(failing, 2, tmp_path):
        for plan, (message, as_they_begin, rows) in found.items():
            assert "ValueError: no values today" in message, plan
            assert as_they_begin, plan
            assert rows > 20, plan
