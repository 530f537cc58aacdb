"""Filling tables by blocks of rows, and cutting blocks to a rank's pieces."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.modules.tables import Table
from lightning_pipe.recsys.sharding import table_values
from lightning_pipe.recsys.sharding.table_values import LocalShard, copy_table_to_shards, fill_with_init_fn

ROWS, COLUMNS = 10, 4


def table(name: str = "users", **config: object) -> Table:
    described = EmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS,
        embedding_dim=COLUMNS,
        **config,
    )
    return Table(f"ebc.embedding_bags.{name}.weight", "ebc", EmbeddingBagCollection, described)


def piece(row: int, column: int, rows: int, columns: int) -> LocalShard:
    return LocalShard((row, column), torch.full((rows, columns), torch.nan))


PIECES = [(0, 0, ROWS, COLUMNS), (7, 1, 3, 2), (5, 0, 0, COLUMNS)]


@pytest.mark.parametrize("rows_a_block", [3, 100])
@pytest.mark.parametrize(("row", "column", "rows", "columns"), PIECES)
def test_a_piece_gets_its_part_of_the_table_whatever_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
    one_rank: dist.ProcessGroup,
    rows_a_block: int,
    row: int,
    column: int,
    rows: int,
    columns: int,
) -> None:
    monkeypatch.setattr(table_values, "BLOCK_BYTES", rows_a_block * COLUMNS * 4)
    source = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    part = piece(row, column, rows, columns)
    copy_table_to_shards(source, (ROWS, COLUMNS), source.dtype, [part], torch.device("cpu"), one_rank)
    assert torch.equal(part.values, source[row : row + rows, column : column + columns])


@pytest.mark.parametrize("rows_a_block", [3, 100])
@pytest.mark.parametrize(("row", "column", "rows", "columns"), PIECES)
def test_a_piece_is_filled_with_its_part_of_what_the_whole_table_gets(
    monkeypatch: pytest.MonkeyPatch, rows_a_block: int, row: int, column: int, rows: int, columns: int
) -> None:
    monkeypatch.setattr(table_values, "BLOCK_BYTES", rows_a_block * COLUMNS * 4)
    whole, part = piece(0, 0, ROWS, COLUMNS), piece(row, column, rows, columns)
    fill_with_init_fn(table(), torch.float32, [whole], seed=3)
    fill_with_init_fn(table(), torch.float32, [part], seed=3)
    assert torch.equal(part.values, whole.values[row : row + rows, column : column + columns])


def test_only_blocks_that_a_rank_holds_a_part_of_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_values, "BLOCK_BYTES", 2 * COLUMNS * 4)
    drawn: list[torch.Size] = []

    def init(values: torch.Tensor) -> torch.Tensor:
        drawn.append(values.shape)
        return values.fill_(1.0)

    fill_with_init_fn(table(init_fn=init), torch.float32, [piece(3, 0, 2, COLUMNS)], seed=0)
    assert drawn == [(2, COLUMNS)] * 2  # rows 2-3 and 4-5


def test_the_configured_init_fn_and_torchrec_s_default_range_are_used() -> None:
    whole = piece(0, 0, ROWS, COLUMNS)
    fill_with_init_fn(table(init_fn=partial(torch.nn.init.constant_, val=7.0)), torch.float32, [whole], seed=0)
    assert torch.equal(whole.values, torch.full((ROWS, COLUMNS), 7.0))
    without = table(weight_init_min=2.0, weight_init_max=3.0)
    without.config.init_fn = None
    fill_with_init_fn(without, torch.float32, [whole], seed=0)
    assert whole.values.min() >= 2.0
    assert whole.values.max() <= 3.0


def test_an_init_fn_of_another_shape_is_an_error_that_names_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_values, "BLOCK_BYTES", 4 * COLUMNS * 4)
    matrix = torch.rand(ROWS, COLUMNS)
    with pytest.raises(SetupError, match=r"init_fn of table ebc\.embedding_bags\.users\.weight.*\[4, 4\]"):
        fill_with_init_fn(table(init_fn=lambda block: block.copy_(matrix)), torch.float32, [piece(0, 0, 2, 4)], 1)
