"""Models, batches and comparisons for the tests of the train pipeline: one training, under each of the plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys import ShardedModel, TrainPipeline, shard_model
from tests.recsys.rewrite_cases import ROWS, Bags, Processed, Sequences, batches, jagged, variable_batches
from tests.recsys.sharding_cases import ADAGRAD, CPU, ROW_WISE_ADAGRAD, SGD

# Those that train the same.
DEPTHS = {"serial": 1, "base": 3, "threaded_input": 2, "prefetch": 3, "fused_sparse_dist": 3, "compute_ahead": 3}
PLANS = tuple(DEPTHS)
STEPS = 7


class Paired(nn.Module):
    """What a train pipeline wants of a model that returns a loss: the loss, and something beside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
        loss = self.model(batch)
        return loss, loss.detach().clone()


class Mixed(nn.Module):
    """A click model of every part at once: shared features and tables, sequences, weights of its own, dense layers that
    draw random numbers and keep statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [
            EmbeddingBagConfig(name="people", embedding_dim=8, num_embeddings=ROWS, feature_names=["user", "friend"]),
            EmbeddingBagConfig(
                name="things",
                embedding_dim=8,
                num_embeddings=ROWS,
                feature_names=["item", "user"],
                pooling=PoolingType.MEAN,
            ),
        ]
        self.pooled = EmbeddingBagCollection(tables=tables)
        self.weighted = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="tags", embedding_dim=8, num_embeddings=ROWS, feature_names=["tag"]),
            ],
            is_weighted=True,
        )
        self.history = EmbeddingCollection(
            tables=[EmbeddingConfig(name="past", embedding_dim=8, num_embeddings=ROWS, feature_names=["past", "item"])]
        )
        self.layers = nn.Sequential(
            nn.Linear(3 + 6 * 8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def forward(self, batch: MixedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, tags, past = self.pooled(batch.sparse), self.weighted(batch.tags), self.history(batch.sparse)
        recent = torch.stack([part.sum(0) for part in past["past"].to_dense()])
        scores = self.layers(torch.cat([batch.dense, pooled.values(), tags["tag"], recent], dim=1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores.detach()


@dataclass
class MixedBatch:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    tags: KeyedJaggedTensor
    label: torch.Tensor


def grouped(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a TrainPipeline, where tests give option groups beside the others."""
    groups = {name: value for name, value in arguments.items() if name in ("rewrite", "wire", "memory", "checks")}
    return {**{name: value for name, value in arguments.items() if name not in groups}, "options": groups}


def mixed_batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    return [
        MixedBatch(
            torch.rand(4, 3, generator=generator),
            # Every third batch has short lists only: features without any id.
            jagged(["friend", "item", "past", "user"], generator, longest=0 if index % 3 == 2 else 3),
            jagged(["tag"], generator, weighted=True),
            torch.randint(0, 2, (4,), generator=generator).float(),
        )
        for index in range(count)
    ]


def dlrm() -> nn.Module:
    """TorchRec's own model, in TorchRec's own wrapper for its pipelines."""
    torch.manual_seed(5)
    tables = [
        EmbeddingBagConfig(name=f"t{index}", embedding_dim=8, num_embeddings=ROWS, feature_names=[f"f{index}"])
        for index in range(3)
    ]
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), 3, [8, 8], [8, 1]))


@dataclass
class DlrmBatch:
    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


def dlrm_batches(count: int) -> list[Any]:
    return [DlrmBatch(batch.dense, batch.sparse, batch.label) for batch in batches(count)]


@dataclass
class Case:
    """One training.

    Attributes:
        build: the model; the same values at each call.
        data: this rank's batches.
        kinds: sharding type of every table, or of each by its short name.
        optimizer: of the tables.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int], list[Any]] = batches
    kinds: str | dict[str, str] = "table_wise"
    optimizer: dict[str, Any] = field(default_factory=lambda: ADAGRAD)


def sharded(case: Case, **arguments: Any) -> ShardedModel:
    module = case.build()
    names = [
        config.name
        for child in module.modules()
        if isinstance(child, (EmbeddingBagCollection, EmbeddingCollection))
        for config in (
            child.embedding_bag_configs() if isinstance(child, EmbeddingBagCollection) else child.embedding_configs()
        )
    ]
    kinds = dict.fromkeys(names, case.kinds) if isinstance(case.kinds, str) else case.kinds
    constraints = {name: {"sharding_types": [kinds[name]], "min_partition": 4} for name in names}
    world = dist.group.WORLD
    assert world is not None
    return shard_model(
        module,
        **{
            "device": CPU,
            "group": world,
            "sparse_optimizer": case.optimizer,
            "constraints": constraints,
            **arguments,
        },
    )


def adam(model: ShardedModel) -> torch.optim.Optimizer:
    """Keeps state for each dense parameter, and its step depends on the order of things."""
    return torch.optim.Adam([parameter for _, parameter in model.dense_parameters()], lr=0.05)


def plain(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state, by place and name."""
    return {
        f"dense optimizer {index} {name}": torch.as_tensor(value).clone()
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def values_of(model: ShardedModel, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """This rank's shards of tables and of their optimizers' states, dense values, the dense optimizer's state."""
    found: dict[str, torch.Tensor] = {}
    states = {
        f"optimizer {name} {key}": value
        for name, state in model.fused_optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    for name, value in {**model.dmp.state_dict(), **states}.items():
        if isinstance(value, ShardedTensor):
            for index, part in enumerate(value.local_shards()):
                found[f"{name}/{index}"] = part.tensor.clone()
        elif isinstance(value, torch.Tensor):
            found[name] = value.detach().clone()
    return found if optimizer is None else {**found, **plain(optimizer)}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same to the bit."""
    names = sorted({*one, *other})
    return [name for name in names if name not in one or name not in other or not torch.equal(one[name], other[name])]


class Feed(Iterator[Any]):
    """Gives batches, and counts how many were in flight, the one it gives included, each time it gave one."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = iter(data)
        self.given = 0
        self.trained = 0
        self.most_in_flight = 0

    def __next__(self) -> Any:
        batch = next(self._data)
        self.given += 1
        self.most_in_flight = max(self.most_in_flight, self.given - self.trained)
        return batch


def train(pipeline: TrainPipeline, data: Iterable[Any]) -> tuple[list[Any], Feed]:
    """Trains every batch; returns what each progress call returned."""
    feed = data if isinstance(data, Feed) else Feed(data)
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(feed))
        except StopIteration:
            return outputs, feed
        feed.trained += 1


def pooled() -> nn.Module:
    return Paired(Bags())


CASES: dict[str, Case] = {
    "pooled, table_wise": Case(pooled),
    "pooled, row_wise": Case(pooled, kinds="row_wise", optimizer=ROW_WISE_ADAGRAD),
    "pooled, column_wise": Case(pooled, kinds="column_wise"),
    "pooled, table_row_wise": Case(pooled, kinds="table_row_wise", optimizer=ROW_WISE_ADAGRAD),
    "pooled, table_column_wise": Case(pooled, kinds="table_column_wise"),
    "pooled, grid_shard": Case(pooled, kinds="grid_shard", optimizer=SGD),
    "pooled, data_parallel": Case(pooled, kinds="data_parallel"),
    **{
        f"sequences, {kind}": Case(lambda: Paired(Sequences()), kinds=kind, optimizer=ROW_WISE_ADAGRAD)
        for kind in ("table_wise", "row_wise", "column_wise")
    },
    **{
        f"processed features, {kind}": Case(lambda: Paired(Processed()), kinds=kind)
        for kind in ("table_wise", "row_wise", "column_wise", "data_parallel")
    },
    "weighted": Case(lambda: Paired(Bags(weighted=True)), lambda count: batches(count, weighted=True), "row_wise"),
    "mean pooling over rows": Case(lambda: Paired(Bags(mean=True)), kinds="row_wise"),
    "batch size per feature": Case(pooled, variable_batches, "table_wise", ROW_WISE_ADAGRAD),
    "TorchRec's DLRM": Case(
        dlrm, dlrm_batches, {"t0": "row_wise", "t1": "data_parallel", "t2": "column_wise"}, ROW_WISE_ADAGRAD
    ),
    "everything": Case(
        Mixed,
        mixed_batches,
        {"people": "column_wise", "things": "row_wise", "tags": "data_parallel", "past": "row_wise"},
    ),
}


@dataclass
class Outcome:
    """What a training left on this rank, and what was seen on the way."""

    outputs: list[Any]
    values: dict[str, torch.Tensor]
    initial: dict[str, torch.Tensor]
    most_in_flight: int
    pipelined: list[str]

    def same(self, other: Outcome) -> bool:
        """Whether every loss and every value is the same to the bit."""
        return not difference(self.values, other.values) and same_outputs(self.outputs, other.outputs)


def same_outputs(one: list[Any], other: list[Any]) -> bool:
    flat, flat_other = _tensors(one), _tensors(other)
    return len(flat) == len(flat_other) and all(map(torch.equal, flat, flat_other))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in _tensors(part)]


def outcome(case: Case, plan: Any, steps: int = STEPS, **arguments: Any) -> Outcome:
    """Trains a case from its beginning; ``arguments`` are more of the pipeline's."""
    model = sharded(case)
    optimizer = adam(model)
    initial = values_of(model)
    torch.manual_seed(13 + dist.get_rank())
    pipeline = TrainPipeline(model, optimizer, CPU, plan, **grouped(arguments))
    outputs, feed = train(pipeline, case.data(steps))
    pipelined = sorted(pipeline.rewrite.pipelined)
    pipeline.close()
    return Outcome(outputs, values_of(model, optimizer), initial, feed.most_in_flight, pipelined)
