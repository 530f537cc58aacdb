"""Ranks with uneven numbers of batches evaluate every row once, and find what one process finds over all rows."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import BinaryAUROC

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.scenarios.recommenders.test_dynamic_embeddings import Dynamic
from tests.strategies.cases import (
    Batch,
    Clicks,
    Pooled,
    Processed,
    Rows,
    Sequenced,
    collate,
    fit,
    loader,
    recsys,
    state_of,
    trainer,
)

BATCH = 3
KINDS = {"people": "row_wise", "things": "table_wise"}
# Rows of each rank, and what they are read from.
CASES: dict[int, list[tuple[tuple[int, ...], str]]] = {
    2: [((7, 0), "files"), ((0, 7), "streams")],
    4: [((0, 1, 7, 10), "streams")],
}
# Rows of all ranks together, which Lightning's sampler shares out.
TOTALS = (1, 10)


class Scored(Clicks):
    """Logs in every way that all ranks must know of: sums, means and extremes, and metrics that keep all they see."""

    def __init__(self, network: Any = Pooled) -> None:
        super().__init__(network)
        self.auroc, self.of_epoch = BinaryAUROC(), BinaryAUROC()
        self.seen: list[float] = []
        self.hooks: list[str] = []

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits, size = self.network(batch), len(batch.label)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        self.seen += batch.dense[:, 0].tolist()
        self.auroc(torch.sigmoid(logits), batch.label.int())
        self.of_epoch.update(torch.sigmoid(logits), batch.label.int())
        self.log("val_loss", loss, batch_size=size, sync_dist=True)
        self.log("of_step", loss, batch_size=size, sync_dist=True, on_step=True)
        self.log("rows", float(size), reduce_fx="sum", sync_dist=True)
        self.log("worst", logits.max(), reduce_fx="max", sync_dist=True)
        self.log("best", logits.min(), reduce_fx="min", sync_dist=True)
        self.log("auroc", self.auroc, batch_size=size)

    def on_validation_start(self) -> None:
        self.hooks.append("start")

    def on_validation_epoch_end(self) -> None:
        self.hooks.append("end")
        self.log("auroc_of_epoch", self.of_epoch.compute())
        self.of_epoch.reset()

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch.dense[:, 0], self.network(batch), batch.label.int()


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def rows_of(first: int, count: int, form: str = "files") -> DataLoader[Any]:
    rows: Any = [Rows()[first + index] for index in range(count)]
    return DataLoader(rows if form == "files" else Stream(rows), BATCH, collate_fn=collate)


def shard(counts: tuple[int, ...], form: str = "files", first: int = 0) -> DataLoader[Any]:
    rank = dist.get_rank()
    return rows_of(first + sum(counts[:rank]), counts[rank], form)


def kinds_of(network: Any) -> dict[str, str] | None:
    """How the network's tables are sharded; dynamic ones have one way alone."""
    if isinstance(network, partial):
        return None
    return {"people": "row_wise"} if network is Sequenced else KINDS


def evaluated(loaders: Any, network: Any = Pooled, own_loaders: bool = True, **options: Any) -> dict[str, Any]:
    used = trainer(recsys(kinds=kinds_of(network), **options), use_distributed_sampler=not own_loaders)
    module = Scored(network)
    found = used.validate(module, loaders, verbose=False)
    predicted = used.predict(module, loaders)
    return {"metrics": found, "seen": module.seen, "hooks": module.hooks, "predicted": predicted}


def alone(loaders: Any, network: Any = Pooled) -> dict[str, Any]:
    """Lightning's own loop over the unsharded module."""
    used, module = trainer("auto", devices=1), Scored(network)
    found = used.validate(module, loaders, verbose=False)
    return {"metrics": found, "seen": module.seen, "predicted": used.predict(module, loaders)}


@cache
def expected_of(network: Any, *loaders: tuple[int, int]) -> tuple[Reference, list[float]]:
    """What one process finds, and the rows that it sees; of loaders that have so many rows from a first one on."""
    seen: list[list[float]] = []

    def run() -> dict[str, torch.Tensor]:
        made = [rows_of(first, count) for first, count in loaders]
        found = alone(made if len(made) > 1 else made[0], network)
        seen.append(found["seen"])
        return numbers(found)

    return Reference.of(run), sorted(seen[0])


def check(ranks: list[dict[str, Any]], *loaders: tuple[int, int], network: Any = Pooled) -> None:
    reference, rows = expected_of(network, *loaders)
    for found in ranks:
        assert reference.differences(numbers({**found, "predicted": joined(ranks)})) == []
        assert found["hooks"] == ["start", "end"]
        if len(found["metrics"]) == 1:
            _, logits, labels = rows_in(joined(ranks))
            expected = BinaryAUROC()(torch.sigmoid(logits), labels).item()
            for name in ("auroc", "auroc_of_epoch"):
                assert found["metrics"][0][name] == pytest.approx(expected, abs=1e-6)
    assert sorted(value for found in ranks for value in found["seen"]) == rows


def numbers(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Metrics of all dataloaders but an AUROC, and predictions by the order of what was read.

    An AUROC jumps where rounding exchanges two rows: it is compared with that of the predictions.
    """
    metrics = {name: torch.tensor(value) for of_loader in found["metrics"] for name, value in of_loader.items()}
    keys, logits, _ = rows_in(found["predicted"])
    return {
        **{name: value for name, value in metrics.items() if not name.startswith("auroc")},
        "predicted": logits[keys.argsort()],
    }


def rows_in(predicted: Any) -> list[torch.Tensor]:
    """Keys, logits and labels of all rows."""
    batches = [batch for of_loader in _by_loader(predicted) for batch in of_loader]
    return [torch.cat([batch[index] for batch in batches]) for index in range(3)]


def _by_loader(predicted: Any) -> list[Any]:
    return [predicted] if predicted and isinstance(predicted[0], tuple) else list(predicted)


def joined(ranks: list[dict[str, Any]]) -> list[Any]:
    return [pair for found in ranks for of_loader in _by_loader(found["predicted"]) for pair in of_loader]


# ---------------------------------------------------------------------- cases


def run_cases(rank: int, world_size: int) -> dict[str, Any]:
    results = {f"{counts}, {form}": evaluated(shard(counts, form)) for counts, form in CASES[world_size]}
    for total in TOTALS if world_size == 2 else ():
        results[f"{total} in all"] = evaluated(rows_of(0, total), own_loaders=False)
    return results


# Other ways to hold rows and to send them, which the unsharded module does not have.
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "bf16 on the wire": {"quantized_comms": {"forward": "bf16"}},
    "a balancer": {"balancer": True},
    "dynamic tables": {},
}
EVEN, UNEVEN = (5, 6), (0, 11)


def run_other_ways(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, counts in product(OTHER_WAYS, (EVEN, UNEVEN)):
        network: Any = Pooled
        if name == "dynamic tables":
            network = partial(Dynamic, folder / str(counts))
        results[f"{name}, {counts}"] = evaluated(shard(counts), network, **OTHER_WAYS[name])
    return results


def run_more_cases(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for network in (Sequenced, Processed):
        results[network.__name__] = evaluated(shard((1, 10)), network)
    results["batch by batch"] = evaluated(shard((1, 10)), rewrite={"evaluation": False})
    loaders = [shard((7, 0)), shard((0, 1), first=7), shard((4, 9), "streams", first=8)]
    results["several loaders"] = evaluated(loaders)
    results["no rows"] = evaluated(shard((0, 0)), own_loaders=True)["metrics"]
    for name, module in (("twice", Twice()), ("other", Other()), ("fails", Fails())):
        used = trainer(recsys(kinds=KINDS), use_distributed_sampler=False)
        try:
            results[name] = used.validate(module, shard((1, 10)), verbose=False)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    states = []
    for counts in ((4, 4), (1, 10), (0, 11)):
        trained = Scored()
        strategy = recsys(kinds=KINDS)
        stopping = EarlyStopping("val_loss", patience=100)
        options: Any = {"val_check_interval": 2, "use_distributed_sampler": False, "callbacks": [stopping]}
        used = fit(trained, strategy, loader(48, in_order=True), shard(counts), **options)
        states.append(
            (trained.losses, state_of(used), {name: float(one) for name, one in used.callback_metrics.items()})
        )
    results["training"] = states
    return results


class Twice(Scored):
    """Calls the sharded module once more than ranks know of ahead."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.network(batch)
        super().validation_step(batch, batch_idx)


class Other(Clicks):
    """Calls it only where the rank is another."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.trainer.strategy._coordinator is not None:  # type: ignore[attr-defined]
            raise LookupError("no such column")


class Fails(Scored):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 2:
            raise LookupError("no such column")


@cache
def ranks(world_size: int) -> list[dict[str, Any]]:
    return run_ranks(run_cases, world_size)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(run_more_cases, 2)


def named(results: list[dict[str, Any]], name: str) -> list[Any]:
    return [of_rank[name] for of_rank in results]


@pytest.mark.parametrize(("world_size", "counts", "form"), [(size, *case) for size in CASES for case in CASES[size]])
def test_metrics_are_those_of_one_process_over_all_rows(world_size: int, counts: tuple[int, ...], form: str) -> None:
    check(named(ranks(world_size), f"{counts}, {form}"), (0, sum(counts)))


@pytest.mark.parametrize("total", TOTALS)
def test_lightnings_sampler_repeats_no_row(total: int) -> None:
    check(named(ranks(2), f"{total} in all"), (0, total))


@pytest.mark.parametrize("network", [Sequenced, Processed])
def test_every_kind_of_sharded_module_is_joined(two: list[dict[str, Any]], network: Any) -> None:
    check(named(two, network.__name__), (0, 11), network=network)


@pytest.fixture(scope="module")
def other_ways(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_other_ways, 2, tmp_path_factory.mktemp("stores"))


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_uneven_ranks_find_what_even_ones_find(other_ways: list[dict[str, Any]], name: str) -> None:
    even, uneven = (
        [numbers({**of_rank, "predicted": joined(ranks)}) for of_rank in ranks]
        for ranks in (named(other_ways, f"{name}, {split}") for split in (EVEN, UNEVEN))
    )
    for expected, found in zip(even, uneven, strict=True):
        for metric, value in expected.items():
            # Rows meet in other batches, whose sums of at most 30 terms are in another order.
            within = 30 * torch.finfo(torch.float32).eps * float(value.abs().max())
            assert float((found[metric] - value).abs().max()) <= within, metric


def test_uneven_ranks_are_evaluated_batch_by_batch_too(two: list[dict[str, Any]]) -> None:
    check(named(two, "batch by batch"), (0, 11))


def test_each_loader_may_be_uneven(two: list[dict[str, Any]]) -> None:
    check(named(two, "several loaders"), (0, 7), (7, 1), (8, 13))


def test_ranks_without_any_row_evaluate_nothing(two: list[dict[str, Any]]) -> None:
    assert named(two, "no rows") == [[], []]


def test_calls_that_are_not_known_ahead_are_joined(two: list[dict[str, Any]]) -> None:
    def found() -> dict[str, Any]:
        (metrics,) = trainer("auto", devices=1).validate(Twice(), rows_of(0, 11), verbose=False)
        return {name: torch.tensor(value) for name, value in metrics.items()}

    reference = Reference.of(found)
    for (metrics,) in named(two, "twice"):
        assert reference.differences({name: torch.tensor(value) for name, value in metrics.items()}) == []


@pytest.mark.parametrize(
    ("name", "own", "on_others"),
    [
        (
            "other",
            "LookupError: no such column",
            "in validation failed on another rank. rank 1: LookupError",
        ),
        (
            "fails",
            "LookupError: no such column",
            "in validation failed on another rank. rank 1: LookupError",
        ),
    ],
)
def test_what_fails_in_a_batch_of_some_ranks_is_an_error_on_all(
    two: list[dict[str, Any]], name: str, own: str, on_others: str
) -> None:
    other, failing = named(two, name)
    assert own in failing
    assert "InputError" in other
    assert on_others in other


def test_training_is_the_same_whatever_is_validated_between(two: list[dict[str, Any]]) -> None:
    for (losses, state, _), *uneven in named(two, "training"):
        for others, other_state, metrics in uneven:
            assert losses == others
            assert all(torch.equal(state[name], value) for name, value in other_state.items())
            assert metrics["rows"] == 11


def test_an_unknown_choice_is_refused_when_the_strategy_is_made() -> None:
    with pytest.raises(SetupError, match="uneven_evaluation is 'drop'; expected one of 'join', 'error'"):
        recsys(uneven_evaluation="drop")
