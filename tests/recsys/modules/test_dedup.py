"""Ids that are sent once: the same lookups to the bit, sums of gradients within rounding, and smaller messages.

A rank that sends an id once adds up its n gradients itself. A sum of n terms in 32 bits is off by at most n - 1 half
last places of the sum of their absolute values, in any order; two sums differ by at most twice that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.traffic import recorded_traffic
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys import TrainPipeline
from lightning_pipe.recsys.modules.dedup import deduplicate_ids
from lightning_pipe.recsys.modules.dynamic_modules import DynamicEmbeddingCollection, DynamicTable
from lightning_pipe.recsys.sharding.sharders import default_sharders
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import (
    Case,
    Mixed,
    Paired,
    adam,
    difference,
    mixed_batches,
    same_outputs,
    sharded,
    train,
    values_of,
)
from tests.recsys.rewrite_cases import Bags, Managed, Sequences, variable_batches
from tests.recsys.sharding_cases import CPU, ROW_WISE_ADAGRAD, SGD, shard
from tests.tiers import sampled

KINDS = ("table_wise", "row_wise", "column_wise")
PLANS = ("base", "prefetch", "fused_sparse_dist")
RATE = 0.5  # SGD's
LAST_PLACE = torch.finfo(torch.float32).eps
WIDTH, ROWS, SAMPLES = 8, 500, 32


# ---------------------------------------------------------------------- what is sent


def test_each_table_sends_its_ids_once_and_knows_their_places() -> None:
    ids = [7, 3, 7, 3, 3, 9, 3, 8]  # six of two features of a table, and two of another table
    features = KeyedJaggedTensor(["a", "b", "c"], torch.tensor(ids), lengths=torch.tensor([2, 1, 0, 3, 0, 2]))
    sent, places = deduplicate_ids(features, [(10, 2), (10, 1)])
    assert sent.values().tolist() == [3, 7, 9, 3, 8]
    assert sent.values()[places].tolist() == ids
    assert sent.keys() == features.keys()
    assert sum(sent.length_per_key()[:2]) == 3
    assert sent.length_per_key()[2] == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_keep_their_type_and_features_may_be_empty(dtype: torch.dtype) -> None:
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([], dtype=dtype), lengths=torch.zeros(4, dtype=dtype))
    sent, places = deduplicate_ids(features, [(10, 1), (10, 1)])
    assert (sent.values().dtype, sent.lengths().dtype) == (dtype, dtype)
    assert (sent.lengths().tolist(), places.tolist()) == ([0, 0, 0, 0], [])


def test_an_id_outside_of_its_table_is_no_row_of_another_table() -> None:
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([12, -5, 1, 2]), lengths=torch.tensor([3, 1]))
    sent, places = deduplicate_ids(features, [(10, 1), (10, 1)])
    assert sent.values()[places].tolist() == [10, -1, 1, 2]
    assert sent.length_per_key() == [3, 1]


# ---------------------------------------------------------------------- several ranks


def repeated_batches(count: int) -> list[Any]:
    """Few ids, each of them often; every third batch has none at all."""
    data = mixed_batches(count)
    for batch in data:
        batch.sparse.values().remainder_(4)
    return data


def case_of(kind: str) -> Case:
    others = {"people": "column_wise", "things": "row_wise", "tags": "data_parallel"}
    return Case(Mixed, repeated_batches, {**others, "past": kind})


CASES = {
    **{kind: case_of(kind) for kind in KINDS},
    "a batch size per feature": Case(lambda: Paired(Sequences()), variable_batches, "table_wise", ROW_WISE_ADAGRAD),
}


def trained(case: Case, plan: str) -> tuple[list[Any], list[Any], dict[str, Tensor]]:
    """Outputs of an evaluation and of the training after it, and what that left."""
    model = sharded(case, dedup=True)
    optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    # Ids that are sent once do not need those of the batch afterwards.
    options = {"memory": {"free_features_early": plan == "prefetch"}}
    pipeline = TrainPipeline(model, optimizer, CPU, plan, options=options)
    evaluated = list(pipeline.evaluate(iter(case.data(2))))
    outputs, _ = train(pipeline, case.data(6))
    pipeline.close()
    return evaluated, outputs, values_of(model, optimizer)


def differs_from_serial(case: Case) -> dict[str, list[str]]:
    *outputs, values = trained(case, "serial")
    found = {}
    for plan in PLANS:
        *others, after = trained(case, plan)
        same = [same_outputs(one, other) for one, other in zip(outputs, others, strict=True)]
        found[plan] = difference(values, after) + ([] if all(same) else ["outputs"])
    return found


class History(nn.Module):
    """Two tables of sequences that share a feature, one of them with two features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tables = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=features)
                for name, features in (("a", ["f0", "f1"]), ("b", ["f1"]))
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return [one.values() for one in self.tables(features).values()]


def zipf_features(rank: int, samples: int = SAMPLES) -> KeyedJaggedTensor:
    """Ids by Zipf's law: the k-th most frequent one has a share in proportion to k ** -1.1."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 21, (2 * samples,), generator=generator)
    shares = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.1
    ids = torch.multinomial(shares, int(lengths.sum()), replacement=True, generator=generator)
    return KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)


def step(kind: str, dedup: bool) -> tuple[list[Tensor], dict[str, Tensor], list[int]]:
    """Outputs, tables after a step of SGD, and the bytes of the all-to-alls of ids, rows and gradients."""
    rank = dist.get_rank()
    model = History()
    constraints = {name: {"sharding_types": [kind], "min_partition": 4} for name in ("a", "b")}
    sharded_model = shard(model, sparse_optimizer=SGD, constraints=constraints, dedup=dedup)
    with torch.no_grad():
        model(zipf_features(rank))  # the first input dist asks more of the ranks
    with recorded_traffic() as sent:
        outputs = model(zipf_features(rank))
        forward = len(sent)
        gradients = [torch.randn(one.shape, generator=torch.Generator().manual_seed(rank)) for one in outputs]
        torch.autograd.backward(outputs, gradients)
    messages = sent[forward - 2 : forward + 1] if kind == "table_wise" else sent
    tables = {name: sharded_model.full_table(f"tables.embeddings.{name}.weight") for name in ("a", "b")}
    return [one.detach() for one in outputs], tables, [one.bytes for one in messages]


def within_rounding(tables: dict[str, Tensor], others: dict[str, Tensor]) -> tuple[bool, bool]:
    """Whether tables are as near to each other as they must be after a step, and whether they differ."""
    world, sums, total = dist.get_world_size(), History(), 0
    for rank in range(world):
        outputs = sums(zipf_features(rank))
        total += sum(len(one) for one in outputs)
        gradients = [torch.randn(one.shape, generator=torch.Generator().manual_seed(rank)) for one in outputs]
        torch.autograd.backward(outputs, [one.abs() / world for one in gradients])
    near, differs = [], []
    for name, table in tables.items():
        magnitude = sums.tables.embeddings[name].weight.grad
        # Of the sums of at most so many terms; and of the rate, the difference of table and update, and the quotient.
        limit = RATE * total * LAST_PLACE * magnitude + LAST_PLACE * (table.abs() + RATE * magnitude)
        near.append(bool(((table - others[name]).abs() <= limit).all()))
        differs.append(not torch.equal(table, others[name]))
    return all(near), any(differs)


def against_without(kind: str) -> dict[str, Any]:
    (outputs, tables, sent), (plain, others, full) = step(kind, True), step(kind, False)
    near, differs = within_rounding(tables, others)
    same = all(map(torch.equal, outputs, plain))
    return {"same outputs": same, "near": near, "differs": differs, "bytes": (sent, full)}


def refused_dedup(model: nn.Module, dedup: Any, **arguments: Any) -> str:
    with pytest.raises(SetupError) as caught:
        shard(model, dedup=dedup, **arguments)
    return str(caught.value)


def on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "plans": {name: differs_from_serial(case) for name, case in CASES.items()},
        "against": {kind: against_without(kind) for kind in KINDS},
        "ranks": refused_dedup(Sequences(), rank == 0) if world_size > 1 else "",
    }


@pytest.fixture(scope="module", params=sampled((1, 2, 3), lambda ranks: ranks == 2))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, request.param)


@pytest.mark.parametrize("name", CASES)
def test_every_plan_trains_and_evaluates_to_the_bit_as_the_serial_one(ranks: list[dict[str, Any]], name: str) -> None:
    for of_rank in ranks:
        assert of_rank["plans"][name] == {plan: [] for plan in PLANS}


@pytest.mark.parametrize("kind", KINDS)
def test_lookups_are_the_same_and_gradients_are_those_without_up_to_rounding(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    for of_rank in ranks:
        found = of_rank["against"][kind]
        assert found["same outputs"]
        assert found["near"]
        # Otherwise the bound would show nothing. A single rank may add up in the order of the kernel.
        assert found["differs"] or len(ranks) == 1


def rows_sent(rank: int, world_size: int, once: bool) -> tuple[int, int]:
    """Ids that a rank sends of both tables, and rows that it sends of its table, to all ranks together."""
    ids, rows = 0, 0
    for source in range(world_size):
        f0, f1 = zipf_features(source).to_dict().values()
        of_a, of_b = torch.cat([f0.values(), f1.values()]), f1.values()
        counts = [len(of_a.unique()), len(of_b.unique())] if once else [len(of_a), len(of_b)]
        ids += sum(counts) if source == rank else 0
        rows += counts[rank]
    return ids, rows


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_messages_have_each_id_row_and_gradient_once(ranks: list[dict[str, Any]]) -> None:
    # The planner gives each rank one of the two tables; which one, its bytes say.
    for once in (True, False):
        sent = [of_rank["against"]["table_wise"]["bytes"][0 if once else 1] for of_rank in ranks]
        assert [of_rank[0] for of_rank in sent] == [8 * rows_sent(rank, 2, once)[0] for rank in range(2)]
        rows = sorted(4 * WIDTH * rows_sent(rank, 2, once)[1] for rank in range(2))
        assert sorted(of_rank[1] for of_rank in sent) == rows
        # Gradients go to the ranks that the rows came from.
        assert [of_rank[2] for of_rank in sent] == [4 * WIDTH * rows_sent(rank, 2, once)[0] for rank in range(2)]


@pytest.mark.parametrize("ranks", sampled((2, 3), lambda ranks: ranks == 2), indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_less_is_sent_of_ids_that_repeat(ranks: list[dict[str, Any]], kind: str) -> None:
    for of_rank in ranks:
        sent, full = of_rank["against"][kind]["bytes"]
        print(f"{kind}: {sum(sent)} bytes, {sum(full)} without: {sum(sent) / sum(full):.2f}")
        assert sum(sent) < 0.6 * sum(full)


# ---------------------------------------------------------------------- what cannot be


def test_ranks_that_were_asked_otherwise_are_an_error(ranks: list[dict[str, Any]]) -> None:
    for of_rank in ranks[len(ranks) == 1 :]:
        assert "ids of a sent once" in of_rank["ranks"]


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = DynamicEmbeddingCollection(
            [DynamicTable(name="t", embedding_dim=WIDTH, feature_names=["f0"], cache_rows=8)], store="unused"
        )


@pytest.mark.parametrize(
    ("model", "dedup", "message"),
    [
        (Sequences, ["c"], "dedup names 'c', which is no embedding module of the model; .* Name some of a instead"),
        (
            Sequences,
            ["a", "b"],
            "dedup names 'b' of class EmbeddingBagCollection, which needs every occurrence of an id",
        ),
        (Sequences, "a", "dedup is 'a'; expected True, False, or a list"),
        (Bags, True, "dedup is True, but the model has no EmbeddingCollection.* Remove dedup"),
        (
            lambda: Managed(pooled=False),
            ["a"],
            "dedup names 'a' of class ManagedCollisionEmbeddingCollection, which maps",
        ),
        (Dynamic, ["a"], "dedup names 'a' of class DynamicEmbeddingCollection, which maps ids to rows"),
    ],
)
def test_a_module_that_cannot_is_named(one_rank: Any, model: Any, dedup: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        shard(model(), dedup=dedup)


def test_sharders_of_ones_own_decide_themselves(one_rank: Any) -> None:
    assert "both sharders and dedup=True are set" in refused_dedup(Sequences(), True, sharders=default_sharders())
