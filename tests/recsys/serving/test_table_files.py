"""Rows of a checkpoint's tables as Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_pipe.checkpoints.folder_writing import META
from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.serving.table_files import write_tables_to_parquet
from tests.distributed import run_ranks
from tests.recsys.serving.saved_rows import save
from tests.scenarios.recommenders.test_dynamic_embeddings import clicks
from tests.scenarios.recommenders.test_managed_collision import rows_of_ids
from tests.strategies.cases import ROW_WISE_ADAGRAD, Clicks, Managed, Pooled, fit, loader, recsys


def trained(rank: int, world: int, path: Path, managed: bool) -> dict[str, dict[int, Tensor]]:
    """Rows of the ids of each table."""
    used = fit(Clicks(Managed if managed else Pooled), recsys(), loader(24 * world), max_epochs=1)
    used.save_checkpoint(path)
    sharded: Any = used.strategy.sharded_model  # type: ignore[attr-defined]
    if managed:
        return {
            table: {number: values[0] for number, values in rows.items()}
            for table, rows in rows_of_ids(sharded).items()
        }
    return {table.config.name: dict(enumerate(sharded.full_table(name))) for name, table in sharded.tables.items()}


def read(file: Path) -> dict[int, Tensor]:
    table = pq.read_table(file)
    return dict(zip(table["id"].to_pylist(), torch.tensor(table["vector"].to_pylist()), strict=True))


@pytest.mark.parametrize("managed", [False, True], ids=["of fixed size", "with maps"])
def test_each_table_is_a_file_of_ids_and_rows(managed: bool, tmp_path: Path) -> None:
    expected = run_ranks(trained, 2, tmp_path / "one.ckpt", managed)[0]
    counts = write_tables_to_parquet(tmp_path / "one.ckpt", tmp_path / "tables")
    assert len(counts) == len(expected)
    for name, count in counts.items():
        rows, found = expected[name.split(".")[-3]], read(tmp_path / "tables" / name)
        assert found.keys() == rows.keys()
        assert len(found) == count
        assert all(torch.equal(found[number], row) for number, row in rows.items())


def test_rows_of_dynamic_tables_have_their_ids(tmp_path: Path) -> None:
    module = clicks(tmp_path / "store")
    used = fit(module, recsys(optimizer=ROW_WISE_ADAGRAD), max_epochs=1)
    used.save_checkpoint(tmp_path / "one.ckpt")
    sharded: Any = used.strategy.sharded_model  # type: ignore[attr-defined]
    counts = write_tables_to_parquet(tmp_path / "one.ckpt", tmp_path / "tables")
    for name, rows in sharded.dynamic_rows.items():
        for table in rows.caches:
            found = read(tmp_path / "tables" / f"{name}.{table}.parquet")
            expected = {
                number: part.columns[0][place]
                for part in rows.rows(table)
                for place, number in enumerate(part.ids.tolist())
            }
            assert len(found) == counts[f"{name}.{table}.parquet"] > 0
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[number], row) for number, row in expected.items())
    sharded.close()


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="expected a folder written under a recsys plan"):
        write_tables_to_parquet(tmp_path, tmp_path / "tables")


def test_a_table_is_never_written_to_another_folder(tmp_path: Path) -> None:
    name = "../../elsewhere.embeddings.t.weight"
    dcp.save({"model": {name: torch.ones(2, 2)}}, checkpoint_id=tmp_path / "one.ckpt")
    torch.save({}, tmp_path / "one.ckpt" / META)
    with pytest.raises(SetupError, match=f"'{name}' cannot name a file"):
        write_tables_to_parquet(tmp_path / "one.ckpt", tmp_path / "tables" / "here")
    assert not list(tmp_path.glob("*elsewhere*"))


def test_a_dynamic_table_without_rows_is_a_file_without_rows(tmp_path: Path) -> None:
    counts = write_tables_to_parquet(save(tmp_path / "one.ckpt", {"users": {}}), tmp_path / "tables")
    assert counts == {"bags.users.parquet": 0}
    assert read(tmp_path / "tables" / "bags.users.parquet") == {}
