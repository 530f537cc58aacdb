"""Batches without rows, on one rank or on all, and rows without ids: every other row is trained and scored once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_pipe.recsys.modules.dynamic_modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    DynamicTable,
)
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    IDS,
    KEYS,
    SGD,
    WIDTH,
    Batch,
    Clicks,
    Pooled,
    Processed,
    Rows,
    Sequenced,
    collate,
    difference,
    fit,
    is_table,
    recsys,
    state_of,
    trainer,
)
from tests.tiers import wanted

PLANS = ("serial", "prefetch", "compute_ahead", "fused_sparse_dist")

# ---------------------------------------------------------------------- data

# Rows of each rank in each step.
Steps = list[tuple[list[int], list[int]]]
UNEVEN: Steps = [([], [3, 4]), ([5, 6], [1]), ([], []), ([7], []), ([8, 9], [0, 2])]
EVEN: Steps = [([], []), ([3, 5], [4, 6]), ([], []), ([7, 8], [9, 0]), ([1], [2])]


def without_rows(rows: list[dict[str, Any]]) -> Batch:
    """A batch of these rows, which may be none."""
    if rows:
        return collate(rows)
    no_ids, no_lengths = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Batch(
        torch.zeros(0, 3),
        KeyedJaggedTensor(KEYS, no_ids, lengths=no_lengths),
        KeyedJaggedTensor(["tag"], no_ids, weights=torch.zeros(0), lengths=no_lengths),
        torch.zeros(0),
    )


class Stepwise(IterableDataset[Batch]):
    """The batches of a rank, or those of both ranks in one."""

    def __init__(self, steps: Steps, in_one: bool) -> None:
        self.steps, self.in_one = steps, in_one

    def __iter__(self) -> Iterator[Batch]:
        rows = Rows()
        rank = dist.get_rank() if dist.is_initialized() else 0
        for of_ranks in self.steps:
            yield without_rows(
                [rows[index] for index in (of_ranks[0] + of_ranks[1] if self.in_one else of_ranks[rank])]
            )


def data(steps: Steps) -> DataLoader[Any]:
    in_one = not dist.is_initialized() or dist.get_world_size() == 1
    return DataLoader(Stepwise(steps, in_one), batch_size=None)


# ---------------------------------------------------------------------- models


def _sums(sequences: JaggedTensor) -> Tensor:
    """Sum of the rows of each sample, which may be none."""
    lengths = sequences.lengths().long()
    samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.zeros(len(lengths), WIDTH).index_add(0, samples, sequences.values().float())


def _over(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3 + width, 8), nn.ReLU(), nn.Linear(8, 1))


class Summed(Sequenced):
    def forward(self, batch: Batch) -> Tensor:
        parts = [batch.dense, _sums(self.history(batch.sparse)["past"]), self.bags(batch.sparse)["user"]]
        return self.over(torch.cat(parts, dim=1))[:, 0]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="tags", embedding_dim=WIDTH, num_embeddings=IDS, feature_names=["tag"])
        self.bags = EmbeddingBagCollection(tables=[table], is_weighted=True)
        self.over = _over(WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        return self.over(torch.cat([batch.dense, self.bags(batch.tags)["tag"]], dim=1))[:, 0]


def _one(weight: Tensor) -> None:
    nn.init.constant_(weight, 0.1)


class Constant(nn.Module):
    """Pooled tables and sequences, or sequences alone, whose values begin with one number: rows may be any."""

    def __init__(self, bags: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"embedding_dim": WIDTH, "num_embeddings": self.rows, "init_fn": _one}
        people = EmbeddingBagConfig(name="people", feature_names=["user", "friend"], **options)
        past = EmbeddingConfig(name="past", feature_names=["past"], **options)
        self.bags = self.make_bags(people) if bags else None
        self.history = self.make_history(past)
        torch.manual_seed(7)  # tables of other sizes have drawn other numbers
        self.over = nn.Sequential(nn.Linear(3 + (3 if bags else 1) * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    rows = IDS

    def make_bags(self, config: EmbeddingBagConfig) -> nn.Module:
        return EmbeddingBagCollection(tables=[config])

    def make_history(self, config: EmbeddingConfig) -> nn.Module:
        return EmbeddingCollection(tables=[config])

    def forward(self, batch: Batch) -> Tensor:
        parts = [batch.dense, _sums(self.look_up(self.history, batch)["past"])]
        if self.bags is not None:
            parts.append(self.look_up(self.bags, batch).values())
        return self.over(torch.cat(parts, dim=1))[:, 0]

    def look_up(self, module: nn.Module, batch: Batch) -> Any:
        return module(batch.sparse)


class Mapped(Constant):
    """Managed collision that gives ids rows from the second batch on, and has more rows than ids."""

    rows = 4 * IDS

    def _map(self, config: Any) -> ManagedCollisionCollection:
        device = torch.device("cpu")
        id_map = MCHManagedCollisionModule(self.rows, device, LFU_EvictionPolicy(), 1, input_hash_size=IDS)
        return ManagedCollisionCollection({config.name: id_map}, [config])

    def make_bags(self, config: EmbeddingBagConfig) -> nn.Module:
        return ManagedCollisionEmbeddingBagCollection(super().make_bags(config), self._map(config), True)

    def make_history(self, config: EmbeddingConfig) -> nn.Module:
        return ManagedCollisionEmbeddingCollection(super().make_history(config), self._map(config), True)

    def look_up(self, module: nn.Module, batch: Batch) -> Any:
        output, rows = module(batch.sparse)
        assert {feature.lengths().numel() for feature in rows.to_dict().values()} <= {len(batch.label)}
        return output


class Dynamic(Constant):
    """Tables without a size."""

    def make_bags(self, config: EmbeddingBagConfig) -> nn.Module:
        return DynamicEmbeddingBagCollection([_dynamic(config)], FOLDER[-1] / "bags", seed=3)

    def make_history(self, config: EmbeddingConfig) -> nn.Module:
        return DynamicEmbeddingCollection([_dynamic(config)], FOLDER[-1] / "history", seed=3)


FOLDER: list[Path] = []  # of the tables of the next dynamic model


def _dynamic(config: Any) -> DynamicTable:
    initial = {"uniform": [0.1, 0.1]}
    return DynamicTable(
        name=config.name, feature_names=config.feature_names, cache_rows=96, embedding_dim=WIDTH, initial=initial
    )


def _dense(module: Clicks) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.network.get_submodule("over").parameters(), lr=0.1)


class Scored(Clicks):
    """Sums losses, half of them on each of two ranks, and keeps the score of each row in evaluations."""

    def __init__(self, network: Any, **options: Any) -> None:
        super().__init__(network, optimizers=_dense, **options)
        self.scores: list[Tensor] = []

    def loss_of(self, batch: Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.network(batch), batch.label, reduction="sum")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.scores.append(self.network(batch))

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.scores.append(self.network(batch))
        return self.scores[-1]


class Half(Scored):
    """What one process trains with the rows of both ranks, which average their gradients."""

    def loss_of(self, batch: Batch) -> Tensor:
        return super().loss_of(batch) / 2


# ---------------------------------------------------------------------- equal to Lightning's own loop

# Model, sharding, options of the strategy, and steps: Gloo needs as many rows on every rank where rows are sharded.
CASES: dict[str, tuple[Any, dict[str, str] | None, dict[str, Any], Steps]] = {
    "pooled, by table": (Pooled, {"people": "table_wise", "things": "table_wise"}, {}, UNEVEN),
    "pooled, by column": (Pooled, {"people": "column_wise", "things": "column_wise"}, {}, UNEVEN),
    "pooled, replicated": (Pooled, {"people": "data_parallel", "things": "data_parallel"}, {}, UNEVEN),
    "pooled, by row": (Pooled, {"people": "row_wise", "things": "row_wise"}, {}, EVEN),
    "sequences, by table": (Summed, {"past": "table_wise", "people": "table_wise"}, {}, UNEVEN),
    "sequences, by row": (Summed, {"past": "row_wise", "people": "table_wise"}, {}, UNEVEN),
    "sequences, dedup": (Summed, {"past": "row_wise", "people": "table_wise"}, {"dedup": True}, UNEVEN),
    "weighted": (Weighted, {"tags": "table_wise"}, {"validate_ids": True}, UNEVEN),
    "balanced": (Pooled, {"people": "table_wise", "things": "table_wise"}, {"balancer": True}, UNEVEN),
    "mapped": (partial(Mapped, True), None, {}, EVEN),
    "mapped sequences": (
        partial(Mapped, False),
        None,
        {},
        [([], []), ([3, 5], [4, 6]), ([], [7, 8]), ([9, 0], []), ([1], [2])],
    ),
    "dynamic": (partial(Dynamic, True), None, {}, EVEN),
    "dynamic sequences": (partial(Dynamic, False), None, {}, UNEVEN),
    "processed": (Processed, {"people": "table_wise", "things": "table_wise"}, {}, UNEVEN),
}


def plans_of(case: str) -> tuple[str, ...]:
    return PLANS[:-1] if case == "processed" or case.startswith("mapped") else PLANS


def has_maps(case: str) -> bool:
    return case.startswith(("mapped", "dynamic"))


def trained(case: str, plan: str, folder: Path) -> dict[str, Any]:
    """Losses, state, and scores of this rank's rows by four calls of the trainer."""
    network, kinds, options, steps = CASES[case]
    FOLDER.append(folder / case / plan)
    module = Scored(network)
    strategy = recsys(plan, kinds, SGD, **options)
    used = fit(module, strategy, data(steps), data(UNEVEN), max_epochs=1, num_sanity_val_steps=0)
    sharded = strategy.sharded_model
    state = dict(sharded.dense_parameters()) if has_maps(case) else state_of(used)
    result = {"losses": torch.tensor(module.losses), **{name: value.detach().clone() for name, value in state.items()}}
    for evaluate in (used.validate, used.test):
        evaluate(module, data(UNEVEN), verbose=False)
    used.predict(module, data(UNEVEN))
    count = len(UNEVEN)
    calls = [torch.cat(module.scores[first : first + count]) for first in range(0, 4 * count, count)]
    assert all(torch.equal(calls[0], scores) for scores in calls)
    # One rank may also have fewer batches than the other.
    used.validate(module, data(UNEVEN[: len(UNEVEN) - used.global_rank]), verbose=False)
    fewer = torch.cat(module.scores[4 * count :])
    assert torch.equal(fewer, calls[0][: len(fewer)])
    sharded.close()
    return {**result, "scores": calls[0]}


def on_rank(rank: int, world_size: int, folder: Path, cases: list[str], plans: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for case in cases:
        plain = found[case] = trained(case, "serial", folder)
        for plan in [plan for plan in plans_of(case)[1:] if plan in plans]:
            assert difference(plain, trained(case, plan, folder)) == [], (case, plan)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_row_is_trained_and_scored_once_as_by_lightnings_own_loop(
    world_size: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    often = ("pooled, by row", "pooled, replicated", "sequences, dedup", "processed", "mapped", "dynamic sequences")
    cases = wanted(pytestconfig, CASES, lambda case: case in often)
    plans = wanted(pytestconfig, PLANS, lambda plan: plan == "compute_ahead")
    ranks = run_ranks(on_rank, world_size, tmp_path, cases, plans)
    for case in cases:
        network, _, _, steps = CASES[case]
        if has_maps(case):
            network = partial(Constant, *network.args)

        def unsharded(network: Any = network, steps: Steps = steps) -> dict[str, Any]:
            module = (Scored if world_size == 1 else Half)(network, in_backward=SGD)
            used = fit(module, "auto", data(steps), max_epochs=1)
            result = {"losses": torch.tensor(module.losses) * world_size, **state_of(used)}
            trainer("auto").predict(module, data([([*first], [*second]) for first, second in UNEVEN]))
            result["scores"] = torch.cat(module.scores)
            # Rows of a map have other numbers.
            return {name: value for name, value in result.items() if not (has_maps(case) and is_table(name))}  # noqa: B023

        found = ranks[0][case]
        losses = sum(result[case]["losses"] for result in ranks)
        # One process scores the rows of a step together, the first rank's first.
        counts = [[len(step[rank]) for step in UNEVEN] for rank in range(2)]
        if world_size == 2:
            parts = [result[case]["scores"].split(counts[rank]) for rank, result in enumerate(ranks)]
            scores = torch.cat([torch.cat(step) for step in zip(*parts, strict=True)])
        else:
            scores = found["scores"]
        assert len(scores) == sum(map(sum, counts))
        assert Reference.of(unsharded).differences({**found, "losses": losses, "scores": scores}) == [], case
