"""The Criteo example: its rows, and what the model learns of them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lightning.pytorch.cli import LightningCLI
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_COLUMN_NAMES, DEFAULT_INT_NAMES

from examples.recsys_criteo.baseline import CompareScores, best_possible, dense_only
from examples.recsys_criteo.convert import convert
from examples.recsys_criteo.data import CriteoData, collator
from examples.recsys_criteo.generate import PROBABILITY, generate
from examples.recsys_criteo.model import CriteoDLRM
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.strategies import RecsysPipelineStrategy
from tests.loops.models import trainer as quiet_trainer
from tests.running_in import running_in

CONFIG = Path(__file__).parents[2] / "examples" / "recsys_criteo" / "prefetch.yaml"

# ---------------------------------------------------------------------- rows


def test_generated_files_depend_on_their_arguments_only_and_have_criteos_columns(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        generate(tmp_path / name, 256, 128, 64, seed)
    read = {name: pq.read_table(tmp_path / name / "train.parquet") for name in ("one", "same", "other")}
    assert read["one"].equals(read["same"])
    assert not read["one"].equals(read["other"])
    assert read["one"].column_names == [*DEFAULT_COLUMN_NAMES, PROBABILITY]
    assert pq.ParquetFile(tmp_path / "one" / "train.parquet").num_row_groups == 4
    assert len(pq.read_table(tmp_path / "one" / "val.parquet")) == 128
    assert set(read["one"]["label"].to_pylist()) == {0, 1}
    with pytest.raises(SetupError, match="positive multiple of 64 rows, got 100"):
        generate(tmp_path / "wrong", 100, 128, 64)


def test_converted_days_hold_the_numbers_of_the_text_in_order(tmp_path: Path) -> None:
    first = ["1", "1", "", "-1", *map(str, range(10)), "ff", "", *["0000000a"] * 23, "ffffffff"]
    second = ["0", *map(str, range(13)), *["1"] * 26]
    (tmp_path / "day_0").write_text("\t".join(first) + "\n" + "\t".join(second) + "\n")
    with gzip.open(tmp_path / "day_1.gz", "wt") as file:
        file.write("\t".join(first) + "\n")
    target = tmp_path / "train.parquet"
    assert convert([tmp_path / "day_0", tmp_path / "day_1.gz"], target, rows_per_group=2) == 3
    table = pq.read_table(target)
    assert table.column_names == DEFAULT_COLUMN_NAMES
    assert [pq.ParquetFile(target).metadata.row_group(group).num_rows for group in (0, 1)] == [2, 1]
    one, other, again = table.to_pylist()
    assert one == again
    assert [one[name] for name in DEFAULT_INT_NAMES] == [1, None, -1, *range(10)]
    assert [one[name] for name in DEFAULT_CAT_NAMES] == [0xFF, None, *[10] * 23, 2**32 - 1]
    assert list(other.values()) == [0, *range(13), *[1] * 26]


def test_a_batch_has_logarithms_of_counts_and_ids_within_the_tables() -> None:
    values = {name: [0, 7, None] for name in DEFAULT_COLUMN_NAMES}
    table = pa.table({**values, "label": [0, 1, 1], "int_0": [-1, 3, 1], "cat_25": [None, 2**32 - 1, 10]})
    batch = collator(10)(table)
    assert batch.dense_features.shape == (3, 13)
    assert batch.dense_features[:, 0].tolist() == pytest.approx([0, np.log(4), np.log(2)])
    assert batch.dense_features[2, 1] == 0
    assert batch.sparse_features.keys() == DEFAULT_CAT_NAMES
    assert batch.sparse_features["cat_0"].values().tolist() == [0, 7, 0]
    assert batch.sparse_features["cat_25"].values().tolist() == [0, (2**32 - 1) % 10, 0]
    assert batch.labels.tolist() == [0, 1, 1]


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("interaction", ["dlrm", pytest.param("dcn", marks=pytest.mark.exhaustive)])
def test_it_learns_the_planted_effects_of_ids(
    interaction: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_in(tmp_path):
        pl.seed_everything(1)
        data = CriteoData(rows=65_536, validation_rows=16_384)
        strategy = RecsysPipelineStrategy("prefetch")
        trainer = quiet_trainer(max_epochs=1, strategy=strategy, callbacks=[CompareScores()])
        trainer.fit(CriteoDLRM(interaction), data)
        auc = trainer.callback_metrics["val/auroc"].item()
        without_ids, best = dense_only(data.files("train"), data.files("val")), best_possible(data.files("val"))
    assert best is not None
    # The ids add more than 0.4 of their possible gain; no model is better than the probabilities themselves.
    assert without_ids + 0.4 * (best - without_ids) < auc < best
    out = capsys.readouterr().out
    for score in (auc, without_ids, best):
        assert f"{score:8.4f}\n" in out


def test_the_configuration_builds_model_data_and_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-pipe"])  # LightningCLI warns of arguments beside its own
    cli = LightningCLI(subclass_mode_model=True, subclass_mode_data=True, run=False, args=["--config", str(CONFIG)])
    assert isinstance(cli.model, CriteoDLRM)
    assert isinstance(cli.datamodule, CriteoData)
    assert cli.trainer.world_size == 2
