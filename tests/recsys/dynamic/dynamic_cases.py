"""A small model over dynamic tables, data with ids from all of int64, and the same model without any table for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys import ShardedModel, TrainPipeline, shard_model
from lightning_pipe.recsys.modules.dynamic_modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    DynamicTable,
)
from tests.recsys.pipeline_cases import grouped

CPU = torch.device("cpu")
WIDTH = 4
KEYS = ["friend", "item", "past", "user"]
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
# As the classes have it: an eps that is left out is the kernel's where the optimizer is given in TorchRec's way.
ADAGRAD = {"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.1, "eps": 1e-10}}
ROW_WISE_ADAGRAD = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": 0.1, "eps": 1e-10}}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.05, "betas": [0.9, 0.99], "eps": 1e-6}}


def initial(ids: Tensor) -> Tensor:
    """A row for each id, of the id alone: what tests can say without the table."""
    numbers = torch.arange(1, WIDTH + 1, dtype=torch.float64)
    return torch.sin((ids % 10007).double()[:, None] * numbers).float() / 2


@dataclass
class Batch:
    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor


def batch(step: int, rank: int, rows: int = 4, ids: int = 300, longest: int = 3) -> Batch:
    """Ids as hashes are: scattered over all of int64; some are frequent."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, longest + 1, (len(KEYS) * rows,), generator=generator)
    drawn = torch.rand(int(lengths.sum()), generator=generator)
    values = ((drawn**2 * ids).long() + 1) * 0x5851F42D4C957F2D
    return Batch(
        torch.rand(rows, 2, generator=generator),
        KeyedJaggedTensor(KEYS, values, lengths=lengths),
        torch.randint(0, 2, (rows,), generator=generator).float(),
    )


def tables(**options: Any) -> list[DynamicTable]:
    """Two for bags, one of them for two features, and one pooled by mean."""
    options = {"cache_rows": 1000, "initial": initial, **options}
    return [
        DynamicTable(name="people", embedding_dim=WIDTH, feature_names=["user", "friend"], **options),
        DynamicTable(name="things", embedding_dim=WIDTH, feature_names=["item"], pooling="mean", **options),
    ]


class Model(nn.Module):
    """Bags and sequences."""

    def __init__(self, store: Path, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        of_module = ("commit_every", "check_nan", "existing_rows", "id_map_device")
        module_options = {key: options.pop(key) for key in of_module if key in options}
        self.bags = DynamicEmbeddingBagCollection(tables(**options), store / "bags", **module_options)
        options = {"cache_rows": 1000, "initial": initial, **options}
        self.history = DynamicEmbeddingCollection(
            [DynamicTable(name="past", embedding_dim=WIDTH, feature_names=["past"], **options)],
            store / "history",
            **module_options,
        )
        self.over = nn.Linear(2 + 4 * WIDTH, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        recent = torch.stack([row.sum(0) for row in self.history(batch.sparse)["past"].to_dense()])
        scores = self.over(torch.cat([batch.dense, self.bags(batch.sparse).values(), recent], dim=1))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.label)
        return loss, scores.detach()


class Whole(nn.Module):
    """The same with all rows in one dictionary: what dynamic tables must be equal to, on the batches of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.over = nn.Linear(2 + 4 * WIDTH, 1)
        self.tables: dict[str, dict[int, Tensor]] = {"people": {}, "things": {}, "past": {}}

    def row(self, table: str, id: int) -> Tensor:
        rows = self.tables[table]
        if id not in rows:
            rows[id] = initial(torch.tensor([id]))[0].requires_grad_()
        return rows[id]

    def pooled(self, table: str, ids: Tensor, mean: bool = False) -> Tensor:
        rows = [self.row(table, id) for id in ids.tolist()]
        if not rows:
            return torch.zeros(WIDTH)
        return torch.stack(rows).mean(0) if mean else torch.stack(rows).sum(0)

    def forward(self, batch: Batch) -> Tensor:
        features = {key: batch.sparse[key].to_dense() for key in KEYS}
        scores = []
        for row, dense in enumerate(batch.dense):
            parts = [
                self.pooled("people", features["user"][row]),
                self.pooled("people", features["friend"][row]),
                self.pooled("things", features["item"][row], mean=True),
                self.pooled("past", features["past"][row]),
            ]
            scores.append(self.over(torch.cat([dense, *parts])))
        return nn.functional.binary_cross_entropy_with_logits(torch.cat(scores), batch.label)


def shard(model: nn.Module, optimizer: dict[str, Any] = SGD, seed: int = 7) -> ShardedModel:
    world = dist.group.WORLD
    assert world is not None
    return shard_model(model, device=CPU, group=world, sparse_optimizer=optimizer, seed=seed)


def train(
    sharded: ShardedModel,
    steps: Iterable[int],
    plan: str = "serial",
    make: Callable[[int, int], Batch] = batch,
    **options: Any,
) -> list[Tensor]:
    """Scores of every batch on this rank."""
    dense = torch.optim.SGD([parameter for _, parameter in sharded.dense_parameters()], lr=0.1)
    pipeline = TrainPipeline(sharded, dense, CPU, plan, **grouped(options))
    data = (make(step, dist.get_rank()) for step in steps)
    scores = []
    try:
        while True:
            try:
                scores.append(pipeline.progress(data))
            except StopIteration:
                return scores
    finally:
        pipeline.close()


def rows_of(sharded: ShardedModel) -> dict[str, dict[int, list[Tensor]]]:
    """All rows of this rank: by table and id, its columns, its count and when it was last seen."""
    found: dict[str, dict[int, list[Tensor]]] = {}
    for tables in sharded.dynamic_rows.values():
        for table in tables.caches:
            found[table] = {}
            for rows in tables.rows(table):
                for index, id in enumerate(rows.ids.tolist()):
                    counted = torch.stack([rows.counts[index], rows.last_seen[index]])
                    found[table][id] = [*(column[index].clone() for column in rows.columns), counted]
    return found


def outcome(sharded: ShardedModel) -> dict[str, Any]:
    """Everything that training has changed, but for where it is."""
    dense = {name: parameter.detach().clone() for name, parameter in sharded.dense_parameters()}
    return {"dense": dense, **rows_of(sharded)}


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, at any depth."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def merged(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks' outcomes; each id is on one rank."""
    result = dict(outcomes[0])
    for one in outcomes[1:]:
        for table in ("people", "things", "past"):
            assert not result[table].keys() & one[table].keys()
            result[table] = {**result[table], **one[table]}
    return result
