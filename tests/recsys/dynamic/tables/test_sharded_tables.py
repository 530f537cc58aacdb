"""Dynamic modules train as if all rows were in one dictionary, under every plan, with a cache that is too small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.recsys import TrainPipeline
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.recsys.modules.dynamic_modules import DynamicEmbeddingBagCollection, DynamicTable
from tests.distributed import run_ranks
from tests.recsys.dynamic.dynamic_cases import (
    ADAGRAD,
    ADAM,
    CPU,
    ROW_WISE_ADAGRAD,
    SGD,
    Batch,
    Model,
    Whole,
    batch,
    merged,
    outcome,
    rows_of,
    same,
    shard,
    tables,
    train,
)
from tests.rounding import Reference
from tests.tiers import sampled, sampled_rows

STEPS = 12
PLANS = ("serial", "base", "prefetch", "early_prefetch", "fused_sparse_dist")


def under(plan: str, store: Path, optimizer: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Scores, and everything that is there after training."""
    sharded = shard(Model(store, **options), optimizer)
    scores = train(sharded, range(STEPS), plan)
    evicted = sum(cache.stats.evicted for rows in sharded.dynamic_rows.values() for cache in rows.caches.values())
    found = {"scores": scores, "outcome": outcome(sharded), "evicted": evicted}
    for rows in sharded.dynamic_rows.values():
        rows.close()
    return found


def trained(rank: int, world_size: int, path: Path, optimizer: dict[str, Any]) -> dict[str, Any]:
    results = {plan: under(plan, path / plan, optimizer) for plan in PLANS}
    small = under("prefetch", path / "small", optimizer, cache_rows=50 * world_size)
    options = {"cache_rows": 50 * world_size, "host_rows": 9, "id_map_device": "device"}
    device = under("prefetch", path / "device", optimizer, **options)
    large = under("serial", path / "large", optimizer, cache_rows=4000)
    return {**results, "small": small, "device": device, "large": large}


TRAINED = [(2, SGD), (2, ADAGRAD), (1, ROW_WISE_ADAGRAD), (3, ROW_WISE_ADAGRAD), (2, ADAM)]
# What `make test` runs.
OFTEN = [(1, ROW_WISE_ADAGRAD), (2, ADAM)]


def named(case: tuple[Any, ...]) -> str:
    world_size, optimizer = case
    return f"{world_size}-{optimizer['class_path'].rpartition('.')[2]}"


@pytest.mark.parametrize(("world_size", "optimizer"), sampled_rows(TRAINED, OFTEN.__contains__, named))
def test_every_plan_trains_alike_to_the_bit_whatever_leaves_the_cache(
    world_size: int, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run_ranks(trained, world_size, tmp_path, optimizer)
    for results in ranks:
        for way in (*PLANS[1:], "small", "device", "large"):
            assert same(results[way]["scores"], results["serial"]["scores"]), way
            assert same(results[way]["outcome"], results["serial"]["outcome"]), way
    assert sum(results["small"]["evicted"] for results in ranks) > 0
    assert all(results["large"]["evicted"] == 0 for results in ranks)


@pytest.mark.usefixtures("one_rank")
def test_kernels_round_rows_to_the_nearest_number_whose_slots_differ_between_plans(tmp_path: Path) -> None:
    kernels = find_fused_kernels(shard(Model(tmp_path, data_type=DataType.FP16), ROW_WISE_ADAGRAD).dmp)
    assert kernels
    assert not any(kernel.optimizer_args.stochastic_rounding for kernel in kernels)


def together(world_size: int) -> Callable[[int], Batch]:
    """All ranks' batches of a step as one."""

    def make(step: int) -> Batch:
        parts = [batch(step, rank) for rank in range(world_size)]
        rows = [part.sparse.to_dict() for part in parts]
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        keys = parts[0].sparse.keys()
        values = torch.cat([row[key].values() for key in keys for row in rows])
        lengths = torch.cat([row[key].lengths() for key in keys for row in rows])
        return Batch(
            torch.cat([part.dense for part in parts]),
            KeyedJaggedTensor(keys, values, lengths=lengths),
            torch.cat([part.label for part in parts]),
        )

    return make


def whole_run(world_size: int, optimizer: type[torch.optim.Optimizer], **options: Any) -> tuple[Whole, list[float]]:
    """The same training without any table; only rows of the batch are stepped, as sparse optimizers do."""
    model = Whole()
    dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
    steppers: dict[int, torch.optim.Optimizer] = {}
    losses = []
    for step in range(STEPS):
        dense.zero_grad()
        loss = model(together(world_size)(step))
        loss.backward()
        losses.append(loss.item())
        for rows in model.tables.values():
            for row in rows.values():
                if row.grad is not None:
                    stepper = steppers.setdefault(id(row), optimizer([row], **options))
                    stepper.step()
                    row.grad = None
        dense.step()
    return model, losses


def trained_rows(rank: int, world_size: int, path: Path, optimizer: dict[str, Any]) -> Any:
    sharded = shard(Model(path), optimizer)
    train(sharded, range(STEPS), "prefetch")
    return outcome(sharded)


@pytest.mark.parametrize(
    ("world_size", "optimizer", "plain", "options"),
    sampled_rows(
        [
            (world_size, *optimizer)
            for world_size in (1, 2)
            for optimizer in (
                (SGD, torch.optim.SGD, {"lr": 0.5}),
                (ADAGRAD, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-10}),
            )
        ],
        lambda case: (case[0] == 1) == (case[1] is SGD),
        lambda case: f"{case[2].__name__}-{case[0]}",
    ),
)
def test_it_trains_what_a_dictionary_of_rows_would(
    world_size: int, optimizer: dict[str, Any], plain: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    found = merged(run_ranks(trained_rows, world_size, tmp_path, optimizer))
    models: list[Whole] = []

    def whole() -> dict[str, Any]:
        models.append(whole_run(world_size, plain, **options)[0])
        return in_order(models[-1])

    assert Reference.of(whole).differences(by_table(found)) == []
    for table, rows in models[0].tables.items():
        assert found[table].keys() == rows.keys()
        assert len(rows) > 20


def in_order(model: Whole) -> dict[str, Any]:
    """Rows of each table in the order of their ids, and dense values."""
    rows = {table: {id: [row.detach()] for id, row in rows.items()} for table, rows in model.tables.items()}
    return by_table({"dense": {f"over.{name}": one for name, one in model.over.named_parameters()}, **rows})


def by_table(found: dict[str, Any]) -> dict[str, Any]:
    """Of an ``outcome``."""
    results = dict(found["dense"])
    for table in ("people", "things", "past"):
        results[table] = torch.stack([found[table][id][0] for id in sorted(found[table])])
    return results


class Summed(Model):
    """Pools both tables of bags by sum, so that one kernel has them."""

    def __init__(self, store: Path) -> None:
        super().__init__(store)
        summed = [replace(table, pooling="sum") for table in tables()]
        self.bags = DynamicEmbeddingBagCollection(summed, store / "summed")


class WholeSummed(Whole):
    def pooled(self, table: str, ids: torch.Tensor, mean: bool = False) -> torch.Tensor:
        return super().pooled(table, ids)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("kind", "whole_kind", "of_sgd"),
    [(Model, Whole, ()), (Summed, WholeSummed, ("things",))],
    ids=["alone", "with SGD"],
)
def test_adam_is_pytorchs_for_rows_of_every_batch(
    kind: type[Model], whole_kind: type[Whole], of_sgd: tuple[str, ...], tmp_path: Path
) -> None:
    def whole() -> dict[str, Any]:
        model = whole_kind()
        data = batch(5, 0)
        model(data)
        rows: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for name, table in model.tables.items():
            rows[name in of_sgd] += table.values()
        steppers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(model.over.parameters(), lr=0.1),
            torch.optim.Adam(rows[False], lr=0.05, betas=(0.9, 0.99), eps=1e-6),
            *([torch.optim.SGD(rows[True], lr=0.05)] if of_sgd else []),
        ]
        for _ in range(STEPS):
            for stepper in steppers:
                stepper.zero_grad()
            model(data).backward()
            for stepper in steppers:
                stepper.step()
        return in_order(model)

    model = kind(tmp_path)
    for name in of_sgd:
        # With another learning rate, another kernel would have the table.
        apply_optimizer_in_backward(torch.optim.SGD, model.bags.embedding_bags[name].parameters(), {"lr": 0.05})
    sharded = shard(model, ADAM)
    # Every batch has the same ids, so that lazy and usual Adam are the same.
    train(sharded, range(STEPS), "prefetch", make=lambda step, rank: batch(5, rank))
    assert Reference.of(whole).differences(by_table(outcome(sharded))) == []


# ---------------------------------------------------------------------- what depends on the order of training


COUNTED: list[dict[str, Any]] = [{"admission_threshold": 3}, {"ttl": 2}, {"eviction": "lfu"}]


def counted(rank: int, world_size: int, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    return {plan: under(plan, path / plan, ROW_WISE_ADAGRAD, cache_rows=50 * world_size, **options) for plan in PLANS}


@pytest.mark.parametrize(
    "options",
    sampled(COUNTED, lambda options: "ttl" not in options, str),
)
def test_admission_and_expiry_go_by_trained_batches_and_not_by_the_plan(
    options: dict[str, Any], tmp_path: Path
) -> None:
    for results in run_ranks(counted, 2, tmp_path, options):
        for plan in PLANS[1:]:
            assert same(results[plan]["scores"], results["serial"]["scores"])
            assert same(results[plan]["outcome"], results["serial"]["outcome"])


@pytest.mark.usefixtures("one_rank")
def test_what_an_evaluation_beside_training_sees_does_not_depend_on_the_plan(tmp_path: Path) -> None:
    """An evaluation after every fourth batch, with the next ones in flight; rows expire soon."""
    results: dict[str, Any] = {}
    for plan in PLANS:
        sharded = shard(Model(tmp_path / plan, ttl=2), ROW_WISE_ADAGRAD)
        dense = torch.optim.SGD([parameter for _, parameter in sharded.dense_parameters()], lr=0.1)
        pipeline = TrainPipeline(sharded, dense, CPU, plan)
        data = (batch(step, 0) for step in range(STEPS))
        scores: list[Any] = []
        seen: list[Any] = []
        for step in range(STEPS):
            scores.append(pipeline.progress(data))
            if step % 4 == 3:
                seen += pipeline.evaluate(batch(100 + number, 0) for number in range(2))
        pipeline.close()
        results[plan] = {"trained": [scores, outcome(sharded)], "seen": seen}
    for plan in PLANS[1:]:
        assert same(results[plan]["trained"], results["serial"]["trained"]), plan
        # The next batch has begun where it is looked up ahead: rows that start anew in it have done so.
        assert same(results[plan]["seen"], results["serial"]["seen"]) == (plan != "fused_sparse_dist"), plan


@pytest.mark.usefixtures("one_rank")
def test_the_seed_of_new_rows_is_that_of_the_run_that_began(tmp_path: Path) -> None:
    normal = {"normal": [0.0, 1.0]}
    whole = shard(Model(tmp_path / "whole", initial=normal), SGD, seed=1)
    train(whole, range(STEPS))
    first = shard(Model(tmp_path / "first", initial=normal), SGD, seed=1)
    train(first, range(4))
    committed = first.commit_rows()
    first.write_rows_to_folder(tmp_path / "rows")
    first.close()
    for store, existing in (("first", "keep"), ("second", "refuse")):
        second = shard(Model(tmp_path / store, initial=normal, existing_rows=existing), SGD, seed=2)
        with torch.no_grad():
            for (_, to), (_, value) in zip(second.dense_parameters(), first.dense_parameters(), strict=True):
                to.copy_(value)
        if store == "second":
            second.read_rows_from_folder(tmp_path / "rows", committed, with_optimizers=True)
        train(second, range(4, STEPS))
        assert same(outcome(second), outcome(whole)), store


@pytest.mark.usefixtures("one_rank")
def test_damage_in_what_a_checkpoint_says_of_rows_is_an_error_in_words(tmp_path: Path) -> None:
    sharded = shard(Model(tmp_path / "tables"), SGD)
    train(sharded, range(1))
    committed = sharded.commit_rows()
    sharded.write_rows_to_folder(tmp_path / "rows")
    name, found = next(iter(committed.items()))
    of_module: list[Any] = [None, [], {}, {**found, "progress": 3}, {**found, "version": 3}]
    of_module += [{key: value for key, value in found.items() if key != left} for left in ("tables", "progress")]
    of_module += [{**found, "progress": {"step": "a"}}]
    damaged: list[Any] = [3, [], *({**committed, name: one} for one in of_module)]
    for damage in damaged:
        with pytest.raises(SetupError, match=r"is damaged|were written with the progress"):
            sharded.read_rows_from_folder(tmp_path / "rows", damage, with_optimizers=False)
    sharded.read_rows_from_folder(tmp_path / "rows", committed, with_optimizers=True)


@pytest.mark.usefixtures("one_rank")
def test_a_purge_erases_expired_rows_from_the_disk_and_no_others(tmp_path: Path) -> None:
    sharded = shard(Model(tmp_path, ttl=3, cache_rows=50), SGD)
    train(sharded, range(STEPS))
    before = rows_of(sharded)
    expired = {
        (table, id)
        for table, rows in before.items()
        for id, columns in rows.items()
        if int(columns[-1][1]) < STEPS - 3  # the step in which it was last seen
    }
    assert sum(rows.purge() for rows in sharded.dynamic_rows.values()) == len(expired) > 0
    sharded.commit_rows()
    after = rows_of(sharded)
    sharded.close()
    assert same(
        after, {t: {id: row for id, row in rows.items() if (t, id) not in expired} for t, rows in before.items()}
    )
    assert same(after, rows_of(shard(Model(tmp_path, existing_rows="keep", ttl=3), SGD)))


class Twice(Model):
    """Its bags are looked up twice in a step."""

    def forward(self, batch: Batch) -> Any:
        loss, scores = super().forward(batch)
        return loss + self.bags(batch.sparse).values().square().mean(), scores


@pytest.mark.usefixtures("one_rank")
def test_a_commit_comes_between_steps_and_not_between_calls_of_a_module(tmp_path: Path) -> None:
    sharded = shard(Twice(tmp_path, commit_every=2), SGD)
    train(sharded, range(4))
    after = rows_of(sharded)
    train(sharded, range(4, 5))
    assert not same(after, rows_of(sharded))
    sharded.close()
    assert same(after, rows_of(shard(Twice(tmp_path, existing_rows="keep"), SGD)))


@pytest.mark.usefixtures("one_rank")
def test_users_functions_and_messages_have_users_ids(tmp_path: Path) -> None:
    ids: set[int] = set()

    def score(keys: Any, counts: Any, last_seen: Any) -> Any:
        ids.update(keys.tolist())
        return counts

    sharded = shard(Model(tmp_path / "scored", cache_rows=50, eviction=score), SGD)
    train(sharded, range(STEPS))
    trained = {id for table in rows_of(sharded).values() for id in table}
    assert ids <= trained
    assert len(ids) > 10
    nan = lambda ids: torch.full((len(ids), 4), torch.nan)  # noqa: E731
    broken = shard(Model(tmp_path / "nan", initial=nan, check_nan=True), SGD)
    train(broken, range(1))
    with pytest.raises(InputError, match="with ids ") as raised:
        broken.commit_rows()
    named = str(raised.value).partition("with ids ")[2].partition(",")[0].partition(";")[0]
    assert int(named) in trained


# ---------------------------------------------------------------------- bad input


def too_small(rank: int, world_size: int, path: Path) -> list[str]:
    messages = []
    for plan in PLANS:
        sharded = shard(Model(path / plan, cache_rows=12), SGD)
        try:
            # One rank's ids alone are too many.
            train(sharded, range(STEPS), plan)
        except (InputError, SetupError) as error:
            messages.append(str(error))
        trained = train(sharded, range(STEPS), plan, make=lambda step, rank: batch(step, rank, rows=1, longest=1))
        assert len(trained) == STEPS
    return messages


def test_a_cache_smaller_than_a_batch_is_an_error_on_every_rank_that_says_how_many_rows(tmp_path: Path) -> None:
    for messages in run_ranks(too_small, 2, tmp_path):
        assert len(messages) == len(PLANS)
        for message in messages:
            assert "at least" in message
            assert "rows" in message


def test_an_unsharded_module_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="must be sharded before it is called"):
        Model(tmp_path).bags(batch(0, 0).sparse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_rows": 0}, "is 0; expected a whole number"),
        ({"host_rows": -1}, "host_rows of dynamic table .t. is -1; expected a whole number, 0 or more"),
        ({"embedding_dim": True}, "is True; expected a whole number"),
        ({"admission_threshold": -1}, "is -1; expected a whole number"),
        ({"feature_names": "user"}, "feature_names of .* got 'user'"),
        ({"pooling": "max"}, "pooling of .* is 'max'; expected one of 'sum', 'mean'"),
        ({"eviction": "random"}, "eviction of .* is 'random'; expected one of 'lru', 'lfu'"),
    ],
)
def test_a_table_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"name": "t", "embedding_dim": 4, "feature_names": ["f"], "cache_rows": 10}
    with pytest.raises(SetupError, match=message):
        DynamicTable(**{**right, **changes})


def test_ids_are_on_the_host_or_on_the_device(tmp_path: Path) -> None:
    table = DynamicTable(name="t", embedding_dim=4, feature_names=["f"], cache_rows=10)
    with pytest.raises(SetupError, match=r"id_map_device of .* is 'gpu'; expected one of 'host', 'device'"):
        DynamicEmbeddingBagCollection([table], tmp_path, id_map_device="gpu")  # type: ignore[arg-type]
