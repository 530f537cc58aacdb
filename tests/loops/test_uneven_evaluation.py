"""Ranks that do not have a batch take part in what the others do for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MeanMetric, Metric, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC
from torchmetrics.retrieval import RetrievalNormalizedDCG

from lightning_pipe.engine import InputError
from lightning_pipe.loops.uneven_evaluation import UnevenBatchCoordinator
from lightning_pipe.strategies.pipeline import PipelineStrategy
from tests.distributed import run_ranks
from tests.rounding import Reference

BATCH = 3
# Rows of each rank.
SHARDS: dict[int, list[tuple[int, ...]]] = {2: [(7, 0), (1, 10)], 4: [(0, 1, 7, 10), (10, 0, 0, 1)]}
TOTALS = (1, 10)


def rows(first: int, count: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(64, 4, generator=generator)[first : first + count]


class Stream(IterableDataset[Any]):
    def __init__(self, values: Any) -> None:
        self.values = values

    def __iter__(self) -> Any:
        return iter(self.values)


class Scored(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.net = torch.nn.Linear(4, 1)
        self.auroc, self.mean = BinaryAUROC(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def _score(self, batch: Any) -> None:
        scores = torch.sigmoid(self.net(batch)[:, 0])
        self.auroc(scores, (batch[:, 0] > 0.5).int())
        self.mean.update(scores)
        self.log("loss", scores.square().mean(), batch_size=len(batch), sync_dist=True, on_step=True)
        self.log("auroc", self.auroc)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._score(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._score(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)[:, 0]

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar"), False)
    quiet["enable_checkpointing"] = bool(options.get("callbacks"))
    devices = dist.get_world_size() if dist.is_initialized() else 1
    options = {"accelerator": "cpu", "devices": devices, "max_epochs": 1, "enable_model_summary": False, **options}
    return pl.Trainer(strategy=strategy, **quiet, **options)


def evaluated(data: Any, own: bool = True, strategy: Any = None) -> dict[str, Any]:
    used = trainer(PipelineStrategy() if strategy is None else strategy, use_distributed_sampler=not own)
    module = Scored()
    (validated,) = used.validate(module, DataLoader(data, BATCH), verbose=False)
    (tested,) = used.test(module, DataLoader(data, BATCH), verbose=False)
    predicted = used.predict(module, DataLoader(data, BATCH)) or []
    return {**validated, "tested": tested["loss_epoch"], "predicted": torch.cat([torch.zeros(0), *predicted])}


# Form of the data of each of the shards.
FORMS = ("files", "streams")


def run_cases(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for case, form in enumerate(FORMS):
        counts = SHARDS[world_size][case]
        mine = rows(sum(counts[:rank]), counts[rank])
        found[case] = evaluated(Stream(mine) if form == "streams" else mine)
    for total in TOTALS:
        found[f"of {total}"] = evaluated(rows(0, total), own=False)
    return found


@pytest.fixture(scope="module", params=[2, 4], ids="{}_ranks".format)
def ranks(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_ranks(run_cases, request.param)


@cache
def alone(total: int) -> Reference:
    return Reference.of(lambda: evaluated(rows(0, total), strategy="auto"))


def check(ranks: list[dict[str, Any]], total: int, in_turn: bool = False) -> None:
    reference = alone(total)
    parts = [found["predicted"] for found in ranks]
    predicted = torch.cat(parts)
    if in_turn:
        # Row i is of rank i modulo the number of ranks.
        predicted = torch.stack([parts[row % len(parts)][row // len(parts)] for row in range(total)])
    for found in ranks:
        assert reference.differences({**found, "predicted": predicted}) == []


@pytest.mark.parametrize("case", range(len(FORMS)), ids=FORMS)
def test_metrics_and_predictions_are_those_of_one_process(ranks: list[Any], case: int) -> None:
    check([found[case] for found in ranks], sum(SHARDS[len(ranks)][case]))


@pytest.mark.parametrize("total", TOTALS)
def test_each_row_is_read_once_where_lightning_shares_them_out(ranks: list[Any], total: int) -> None:
    check([found[f"of {total}"] for found in ranks], total, in_turn=True)


# ---------------------------------------------------------------------- what is logged

# Rows of two ranks: none, one batch and several on a rank, in which metrics' states differ in form.
LOGGED = [(7, 0), (2, 10)]


class Logs(Scored):
    """Logs numbers and weights of all types, and metrics whose states are lists, of tensors or of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking, self.correlation, self.numbers = RetrievalNormalizedDCG(), PearsonCorrCoef(), CatMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores, weights = torch.sigmoid(self.net(batch)[:, 0]), batch[:, 1]
        mean = (scores * weights).sum() / weights.sum()
        self.log("precise", scores.mean().double(), batch_size=len(batch), sync_dist=True)
        self.log("precise_sum", scores.sum().double(), reduce_fx="sum", sync_dist=True)
        self.log("weighted", mean, batch_size=weights.sum(), sync_dist=True)
        self.log("rows", torch.tensor(len(batch)), reduce_fx="sum", sync_dist=True)
        self.ranking.update(scores, (batch[:, 0] > 0.5).int(), indexes=(4 * batch[:, 2]).long())
        self.correlation.update(scores.double(), batch[:, 0].double())
        self.log("ranking", self.ranking)
        self.log("correlation", self.correlation)
        self.numbers.update(scores.sum())

    def on_validation_epoch_end(self) -> None:
        self.log("sum", self.numbers.compute().sum())
        self.numbers.reset()


class Listed(Metric):
    """Keeps a number of each batch, in a list that torchmetrics does not concatenate."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=None)

    def update(self, value: torch.Tensor) -> None:
        self.values.append(value)  # type: ignore[union-attr,operator]

    def compute(self) -> Any:
        return torch.stack(self.values).mean()  # type: ignore[arg-type]


class Refused(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.listed = Listed()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.listed.update(self.net(batch).sum())
        self.log("listed", self.listed)

    def on_validation_epoch_end(self) -> None:
        pass


class Unsynced(Scored):
    """Logs values of this rank alone, by which a callback would choose."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = torch.sigmoid(self.net(batch)[:, 0])
        self.log("sum", scores.sum(), reduce_fx="sum")
        self.log("max", scores.max(), reduce_fx="max")
        self.log("min", scores.min(), reduce_fx="min")

    def on_validation_epoch_end(self) -> None:
        pass


def logged(data: Any, strategy: Any, kind: type[Scored] = Logs) -> dict[str, torch.Tensor]:
    used = trainer(strategy, use_distributed_sampler=False)
    (metrics,) = used.validate(kind(), DataLoader(data, BATCH), verbose=False)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def run_logs(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for counts in LOGGED:
        found[counts] = logged(rows(sum(counts[:rank]), counts[rank]), PipelineStrategy())
    try:
        trainer(PipelineStrategy(), use_distributed_sampler=False).validate(
            Refused(), DataLoader(rows(0, 10 * rank), BATCH), verbose=False
        )
    except InputError as error:
        found["refused"] = str(error)
    found["unsynced"] = logged(rows(0, 0 if rank else 7), PipelineStrategy(), Unsynced)
    return found


@pytest.fixture(scope="module")
def logs() -> list[dict[Any, Any]]:
    return run_ranks(run_logs, 2)


@cache
def logged_alone(total: int, kind: type[Scored] = Logs) -> Reference:
    return Reference.of(lambda: logged(rows(0, total), "auto", kind))


@pytest.mark.parametrize("counts", LOGGED, ids=str)
def test_numbers_of_all_types_and_metrics_of_all_states_are_those_of_one_process(logs: Any, counts: Any) -> None:
    reference = logged_alone(sum(counts))
    for found in logs:
        assert reference.differences(found[counts]) == []


def test_a_metric_with_a_list_of_numbers_that_ranks_cannot_gather_is_refused_on_all(logs: Any) -> None:
    for found in logs:
        assert "metric state 'listed.values' has 0 and 4 numbers" in found["refused"]


# ---------------------------------------------------------------------- loaders


FIT: dict[str, Any] = {"val_check_interval": 2, "limit_train_batches": 4, "use_distributed_sampler": False}


def fitted(data: Any, folder: str) -> dict[str, Any]:
    """A training whose checkpoints depend on validations, in the middle of epochs."""
    saved = ModelCheckpoint(folder, monitor="loss_epoch", save_top_k=-1)
    used, module = trainer(PipelineStrategy(), callbacks=[saved], **FIT), Scored()
    used.fit(module, DataLoader(rows(0, 32), BATCH), data)
    saves = {"step": used.global_step, "best": saved.best_model_path, "validations": len(saved.best_k_models)}
    # Of the last validation.
    return {"saves": saves, "metrics": {name: float(one) for name, one in used.callback_metrics.items()}}


def run_loaders(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"fit": fitted(DataLoader(rows(0, 7 * rank), BATCH), folder)}
    loaders: dict[str, tuple[Any, dict[str, Any]]] = {
        "file or stream": (rows(0, 4) if rank else Stream(rows(4, 7)), {}),
        "nothing or stream": ([] if rank == 0 else Stream(rows(0, 11)), {}),
        "limited": (rows(0, 3 if rank == 0 else 21), {"limit_val_batches": 0.5}),
    }
    for name, (data, options) in loaders.items():
        used = trainer(PipelineStrategy(), use_distributed_sampler=False, **options)
        try:
            (found[name],) = used.validate(Scored(), DataLoader(data, BATCH), verbose=False)
        except Exception as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def loaders(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_loaders, 2, str(tmp_path_factory.mktemp("checkpoints")))


def test_a_checkpoint_is_written_after_a_validation_of_which_a_rank_has_no_batch(loaders: Any) -> None:
    first, second = [found["fit"]["saves"] for found in loaders]
    assert first == second
    assert (first["step"], first["validations"]) == (4, 2)


def test_each_validation_of_a_training_has_metrics_of_its_own_on_a_rank_without_a_batch(
    loaders: Any, tmp_path: Path
) -> None:
    reference = Reference.of(lambda: fitted(DataLoader(rows(0, 7), BATCH), str(tmp_path))["metrics"])
    for found in loaders:
        metrics = {name: value for name, value in found["fit"]["metrics"].items() if name in reference.values}
        assert reference.differences(metrics) == []


@pytest.mark.parametrize("name", ["file or stream", "nothing or stream"])
def test_ranks_may_have_loaders_of_known_and_unknown_length(loaders: Any, name: str) -> None:
    def alone() -> dict[str, Any]:
        (metrics,) = trainer("auto").validate(Scored(), DataLoader(rows(0, 11), BATCH), verbose=False)
        return dict(metrics)

    reference = Reference.of(alone)
    for found in loaders:
        assert reference.differences(found[name]) == []


def test_a_limit_that_leaves_one_rank_no_batch_is_an_error_on_all(loaders: Any) -> None:
    own, others = [found["limited"] for found in loaders]
    assert "0.5 * 1 < 1" in own
    assert "rank 0: loaders of validation cannot be used: MisconfigurationException" in others


def test_a_rank_without_a_batch_has_the_unsynced_values_of_the_rank_that_has_them(logs: Any) -> None:
    for found in logs:
        assert logged_alone(7, Unsynced).differences(found["unsynced"]) == []


# ---------------------------------------------------------------------- a batch that some ranks lack


def take_turns(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    have = [rank > 0 for rank in range(world_size)]
    found: dict[str, Any] = {}
    done: list[Any] = []
    for operation in ("mean", "sum", "max", "min", dist.ReduceOp.SUM):
        turn = UnevenBatchCoordinator(group, have, "a batch")
        if turn.rank_has_batch:
            turn.announce_collective("something", rank)
            found[str(operation)] = turn.reduce_tensor(torch.tensor([float(rank), 1.0]), operation).tolist()
            found[f"{operation} of integers"] = float(turn.reduce_tensor(torch.tensor(rank), operation))
            turn.announce_batch_end()
        else:
            turn.join_collectives_of_other_ranks(lambda what, detail: done.append((what, detail)))
    found["joined"] = done

    def failing(name: str, step: Any) -> None:
        turn = UnevenBatchCoordinator(group, have, "a batch")
        try:
            step(turn) if turn.rank_has_batch else turn.join_collectives_of_other_ranks(lambda what, detail: None)
            turn.announce_batch_end() if turn.rank_has_batch else None
        except InputError as error:
            if turn.rank_has_batch:
                turn.fail(error)
            found[name] = str(error)

    failing("do not agree", lambda turn: turn.announce_collective("one" if rank == 1 else "other"))
    failing("ends early", lambda turn: turn.announce_collective("one") if rank == 1 else None)
    failing("no such sum", lambda turn: turn.reduce_tensor(torch.ones(()), "product"))
    return found


@pytest.fixture(scope="module")
def turns() -> list[dict[str, Any]]:
    return run_ranks(take_turns, 3)


def test_a_rank_without_the_batch_does_its_part_of_each_thing_that_is_announced(turns: list[dict[str, Any]]) -> None:
    assert turns[0]["joined"] == [("something", 1)] * 5


def test_sums_are_of_the_ranks_that_have_the_batch(turns: list[dict[str, Any]]) -> None:
    wanted = {"mean": [1.5, 1.0], "sum": [3.0, 2.0], "max": [2.0, 1.0], "min": [1.0, 1.0]}
    for found in turns[1:]:
        sums = {name.rsplit(".", 1)[-1].lower(): value for name, value in found.items() if isinstance(value, list)}
        assert {name: value for name, value in sums.items() if name in wanted} == wanted


@pytest.mark.parametrize("name", ["do not agree", "ends early"])
def test_ranks_that_do_different_things_are_told_on_every_rank(turns: list[dict[str, Any]], name: str) -> None:
    for found in turns:
        assert "ranks start different collectives in a batch" in found[name]


def test_what_fails_on_one_rank_is_an_error_on_all(turns: list[dict[str, Any]]) -> None:
    assert "expected one of mean" in turns[1]["no such sum"]
    assert "a batch failed on another rank. rank 1: InputError: reduce_op is 'product'" in turns[0]["no such sum"]
