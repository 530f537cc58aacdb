"""The Criteo example: its rows, what the model learns of them, and runs that are killed and continued."""

from __future__ import annotations

import gzip
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_COLUMN_NAMES, DEFAULT_INT_NAMES

from examples.recsys_criteo.baseline import CompareScores, best_possible, dense_only
from examples.recsys_criteo.convert import convert
from examples.recsys_criteo.data import CriteoData, collator
from examples.recsys_criteo.generate import PROBABILITY, Structure, generate
from examples.recsys_criteo.model import CriteoDLRM
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.strategies import RecsysPipelineStrategy, export_checkpoint
from tests.examples.criteo_cases import BATCH, CONFIG, ROWS, Notes, fit, small
from tests.running_in import running_in
from tests.scenarios.faults.forked_ranks import Ended, Nursery, nursery, told

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


def test_ids_follow_zipfs_law_and_labels_their_probabilities() -> None:
    rows = Structure(3).rows(50_000, np.random.default_rng(0))
    ids = rows["cat_0"].fill_null(0).to_numpy()
    counts = np.bincount(ids)
    # The id of rank r is drawn in proportion to r ** -1.1; eight times as often the first as the seventh.
    assert counts[0] / counts[6] == pytest.approx(7**1.1, rel=0.1)
    probability, label = rows[PROBABILITY].to_numpy(), rows["label"].to_numpy()
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
        chosen = (probability >= low) & (probability < high)
        assert chosen.sum() > 1000
        assert label[chosen].mean() == pytest.approx(probability[chosen].mean(), abs=0.03)


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
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            strategy=RecsysPipelineStrategy("prefetch"),
            callbacks=[CompareScores()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Nursery]:
    with nursery(
        ["tests.examples.criteo_cases", "examples.recsys_criteo.baseline", "examples.recsys_criteo.model"]
    ) as made:
        yield made


def trained(folder: Path) -> dict[str, torch.Tensor]:
    """Values of the model after the last step."""
    export_checkpoint(folder / "final.ckpt", folder / "final.pt")
    state: dict[str, torch.Tensor] = torch.load(folder / "final.pt", weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if name.startswith("dlrm.")}


def ended_well(ended: list[Ended]) -> None:
    assert all(one.code == 0 for one in ended), told(ended)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert sum(name.endswith("_table.weight") for name in one) == 26
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


@pytest.mark.parametrize(
    ("size", "workers", "dies"),
    # Within the first epoch, and within the second.
    [(1, 0, 7), pytest.param(2, 2, ROWS // BATCH // 2 + 6, marks=pytest.mark.exhaustive)],
)
def test_a_killed_run_is_continued_by_the_same_command_to_the_bit(
    ranks: Nursery, tmp_path: Path, size: int, workers: int, dies: int
) -> None:
    whole, killed = (small(tmp_path / name, size, workers) for name in ("whole", "killed"))
    ended_well(ranks.run(fit, size, tmp_path / "whole", whole))
    victim = size - 1
    ended = ranks.run(fit, size, tmp_path / "killed", killed, (victim, dies))
    assert ended[victim].code == -signal.SIGKILL, told(ended)
    assert all(one.code not in (0, None) for one in ended), told(ended)
    ended_well(ranks.run(fit, size, tmp_path / "killed", killed))
    saved = dies // 3 * 3
    for rank in range(size):
        expected = Notes.losses(tmp_path / "whole", rank)
        assert [step for step, _ in expected] == list(range(1, 2 * ROWS // BATCH // size + 1))
        found = Notes.losses(tmp_path / "killed", rank)
        begun, continued = found[: saved - len(expected)], found[saved - len(expected) :]
        assert continued == expected[saved:]
        assert begun == expected[: len(begun)]
        assert Notes.scores(tmp_path / "killed", rank) == Notes.scores(tmp_path / "whole", rank)
        assert len(begun) in ((dies,) if rank == victim else (dies - 1, dies))
    same(trained(tmp_path / "whole"), trained(tmp_path / "killed"))


def test_serial_and_prefetch_train_the_same_to_the_bit(ranks: Nursery, tmp_path: Path) -> None:
    for plan in ("serial", "prefetch"):
        ended_well(ranks.run(fit, 2, tmp_path / plan, small(tmp_path / plan, 2, plan=plan)))
    for rank in range(2):
        assert Notes.losses(tmp_path / "serial", rank) == Notes.losses(tmp_path / "prefetch", rank)
    same(trained(tmp_path / "serial"), trained(tmp_path / "prefetch"))
