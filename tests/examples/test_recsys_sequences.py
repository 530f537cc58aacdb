"""The sequence example: what a batch holds, what the layers and the scores are, and that it learns what comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.functional import layer_norm, normalize
from torchmetrics.retrieval import RetrievalHitRate, RetrievalNormalizedDCG

from examples.recsys_movielens import files
from examples.recsys_movielens.files import Ratings
from examples.recsys_sequences.data import EvaluationUsers, HistoryData, TrainingUsers
from examples.recsys_sequences.histories import HELD_OUT, Histories, Part, by_user
from examples.recsys_sequences.hstu import HSTULayer
from examples.recsys_sequences.model import SequenceRanker
from examples.recsys_sequences.popularity import popularity
from examples.recsys_sequences.ranking import AT, gains
from tests.distributed import run_ranks
from tests.examples.sequence_cases import (
    ITEMS,
    USERS,
    command_line,
    dynamic_plans,
    hashes_of,
    write_cycles,
)
from tests.recsys.dynamic.dynamic_cases import same
from tests.running_in import running_in

PARTS: tuple[Part, Part] = ("val", "test")


@pytest.fixture
def cycles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of invented files, which are taken for the right ones."""
    folder = tmp_path / "cycles"
    write_cycles(folder)
    monkeypatch.setattr(files, "SHA256", hashes_of(folder))
    return folder


@pytest.fixture
def ratings(cycles: Path) -> Ratings:
    return files.read(cycles)


@pytest.fixture
def histories(ratings: Ratings) -> Histories:
    return by_user(ratings)


# ---------------------------------------------------------------------- histories and batches


def test_a_users_last_rating_is_the_test_the_one_before_the_validation_and_the_rest_is_trained_on(
    ratings: Ratings, histories: Histories
) -> None:
    assert (histories.users, histories.items) == (USERS, ITEMS)
    for user in range(USERS):
        # Ratings are in order of time, those of one second in the order of the file.
        own = ratings.item[ratings.user == user].tolist()
        assert histories.item[histories.rows(user, "train")].tolist() == own[:-2]
        assert histories.item[histories.rows(user, "val")].tolist() == own[:-2]
        assert histories.target(user, "val") == own[-2]
        assert histories.item[histories.rows(user, "test")].tolist() == own[:-1]
        assert histories.target(user, "test") == own[-1]


def test_a_training_batch_holds_the_latest_ratings_of_each_user_and_negatives_of_each(histories: Histories) -> None:
    users = [3, 0, 17, 60]
    batch = TrainingUsers(histories, max_length=9, negatives=5).__getitems__(users)
    sparse, seconds = batch["sparse"], batch["seconds"]["seconds"].to_dense()
    numbers = {identity: item for item, identity in enumerate(histories.ids.tolist())}
    for row, user in enumerate(users):
        expected = slice(
            max(histories.starts[user], histories.starts[user + 1] - 2 - 9), histories.starts[user + 1] - 2
        )
        assert [numbers[i] for i in sparse["item"].to_dense()[row].tolist()] == histories.item[expected].tolist()
        assert sparse["stars"].to_dense()[row].tolist() == histories.stars[expected].tolist()
        assert seconds[row].tolist() == histories.seconds[expected].tolist()
        assert {numbers[i] for i in sparse["candidate"].to_dense()[row].tolist()} <= set(range(ITEMS))
    assert sparse["candidate"].lengths().tolist() == [5] * len(users)
    assert len(set(sparse["item"].lengths().tolist())) > 1, "histories of one length would show less"


@pytest.mark.parametrize("part", PARTS)
def test_an_evaluation_batch_holds_the_catalog_in_order_and_what_whole_histories_hold(
    histories: Histories, part: Part
) -> None:
    data = EvaluationUsers(histories, part, max_length=3, multiple_of=4)
    assert len(data) == 64
    rows = [2, 60, 61, 63]
    batch = data.__getitems__(rows)
    assert batch["sparse"]["candidate"].values().tolist() == histories.ids.tolist()
    assert batch["weight"].tolist() == [1, 1, 0, 0]
    for row, user in enumerate(row % USERS for row in rows):
        assert batch["target"][row] == histories.target(user, part)
        whole = histories.item[histories.starts[user] : histories.starts[user + 1] - HELD_OUT[part]]
        assert len(whole) > 3
        assert batch["seen"][row].nonzero().flatten().tolist() == sorted(whole.tolist())


# ---------------------------------------------------------------------- scores


def test_hits_and_gains_are_torchmetrics_retrieval_hit_rate_and_ndcg() -> None:
    torch.manual_seed(0)
    scores, target, excluded = torch.randn(50, 40), torch.randint(40, (50,)), torch.rand(50, 40) < 0.3
    excluded[torch.arange(50), target] = False
    hits, gained = gains(scores, target, excluded)
    row, item = (~excluded).nonzero(as_tuple=True)
    arguments = scores[row, item], target[row] == item
    assert 0 < hits.mean() < 1
    assert hits.mean().item() == pytest.approx(RetrievalHitRate(top_k=AT)(*arguments, indexes=row).item())
    assert gained.mean().item() == pytest.approx(RetrievalNormalizedDCG(top_k=AT)(*arguments, indexes=row).item())


# ---------------------------------------------------------------------- layers and loss


def test_a_layer_is_what_the_paper_says() -> None:
    """Position by position, head by head, in plain loops."""
    torch.manual_seed(0)
    batch, length, width, heads, at_most = 2, 5, 8, 2, 7
    layer, x, bias = HSTULayer(width, heads, at_most, 0.0), torch.randn(2, 5, 8), torch.randn(2, 5, 5)
    found = layer(x, bias, torch.ones(length, length).tril())
    u, v, q, k = torch.nn.functional.silu(layer.projection(layer.input_norm(x))).split(width, dim=-1)
    for row in range(batch):
        for i in range(length):
            attended = torch.zeros(width)
            for head in (slice(0, 4), slice(4, 8)):
                for j in range(i + 1):
                    score = q[row, i, head] @ k[row, j, head] + bias[row, i, j]
                    attended[head] += score * torch.sigmoid(score) / at_most * v[row, j, head]
            expected = x[row, i] + layer.output(u[row, i] * layer_norm(attended, (width,)))
            torch.testing.assert_close(found[row, i], expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_cross_entropy_of_what_comes_next_among_the_users_negatives(
    cycles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl.seed_everything(0)
    data = HistoryData(data_dir=str(cycles), negatives=30)
    data.setup()
    model = SequenceRanker(width=8, dropout=0.0, item_rows=4096)
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    batch: Any = model.on_before_batch_transfer(
        TrainingUsers(data.histories, 200, 30).__getitems__([5, 6, 7]), dataloader_idx=0
    )
    found = model.training_step(batch, 0)
    tables = model.tables.embeddings
    losses, same = [], 0
    for row in range(3):
        item, stars, candidate = (batch["sparse"][key].to_dense()[row] for key in ("item", "stars", "candidate"))
        rows = tables["item_table"].weight[item]
        seconds = batch["seconds"]["seconds"].to_dense()[row]
        x = rows + tables["stars_table"].weight[stars]
        knows = model.hstu(x[None], seconds[None], torch.tensor([len(item)]))[0]
        for position in range(len(item) - 1):
            others = candidate[candidate != item[position + 1]]
            same += len(candidate) - len(others)
            among = torch.cat([item[position + 1 : position + 2], others])
            cosines = normalize(tables["item_table"].weight[among], dim=-1) @ normalize(knows[position], dim=-1)
            losses.append(-torch.log_softmax(cosines / model.temperature, 0)[0])
    assert same > 0, "no negative was what comes next"
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


def test_dynamic_tables_and_balanced_batches_train_alike_under_each_plan(cycles: Path, tmp_path: Path) -> None:
    for found in run_ranks(dynamic_plans, 2, str(cycles), str(tmp_path / "rows")):
        serial, prefetch = found["serial"], found["prefetch"]
        assert prefetch["scores"] == serial["scores"]
        assert same(prefetch["rows"], serial["rows"])
        assert serial["rows"]["item_table"]
        assert serial["imbalance"][0] > serial["imbalance"][1] >= 1


# ---------------------------------------------------------------------- training


def test_it_learns_what_comes_next_and_is_compared_with_popularity_which_cannot(
    cycles: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = {
        "trainer.max_epochs": 25,
        "trainer.check_val_every_n_epoch": 25,
        "trainer.callbacks": "[{class_path: examples.recsys_sequences.popularity.CompareWithPopularity}]",
        "model.init_args.learning_rate": 0.01,
        "model.init_args.dropout": 0.0,
        "model.init_args.table_learning_rate": 0.2,
    }
    with running_in(tmp_path):
        cli = command_line(cycles, **options)
        cli.trainer.fit(cli.model, cli.datamodule)
    metrics = {name: value.item() for name, value in cli.trainer.callback_metrics.items()}
    baseline = popularity(cli.datamodule.histories, "test")
    assert baseline.hit_rate < 0.5
    assert metrics["test/hit_rate"] > 0.9
    assert metrics["test/ndcg"] > 2 * baseline.ndcg
    lines = capsys.readouterr().out.splitlines()
    (of_popularity,) = (line.split() for line in lines if line.startswith("popularity"))
    (of_model,) = (line.split() for line in lines if line.startswith("SequenceRanker"))
    assert of_popularity[3:] == [f"{baseline.hit_rate:.4f}", f"{baseline.ndcg:.4f}"]
    expected = [metrics[f"{part}/{name}"] for part in PARTS for name in ("hit_rate", "ndcg")]
    assert of_model[1:] == [f"{value:.4f}" for value in expected]
