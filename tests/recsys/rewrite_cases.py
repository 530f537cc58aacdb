"""Small models and batches for the tests of the rewrite, sharded by TorchRec alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite

FEATURES = ["f0", "f1", "f2"]
ROWS = 24
WIDTH = 8


@dataclass
class Batch:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor


def bags(
    prefix: str, features: list[str], weighted: bool = False, mean: bool = False, width: int = WIDTH
) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        is_weighted=weighted,
        tables=[
            EmbeddingBagConfig(
                name=f"{prefix}{feature}",
                embedding_dim=width,
                num_embeddings=ROWS,
                feature_names=[feature],
                pooling=PoolingType.MEAN if mean else PoolingType.SUM,
            )
            for feature in features
        ],
    )


def sequences(prefix: str, features: list[str]) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=f"{prefix}{feature}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[feature]
            )
            for feature in features
        ]
    )


def jagged(
    keys: list[str], generator: torch.Generator, size: int = 4, weighted: bool = False, longest: int = 3
) -> KeyedJaggedTensor:
    lengths = torch.randint(0, longest + 1, (len(keys) * size,), generator=generator)
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.randint(0, ROWS, (count,), generator=generator),
        lengths=lengths,
        weights=torch.rand(count, generator=generator) if weighted else None,
    )


def batches(count: int, size: int = 4, weighted: bool = False, keys: list[str] | None = None) -> list[Batch]:
    """Different batches on each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    return [
        Batch(
            dense=torch.rand(size, 3, generator=generator),
            sparse=jagged(keys or FEATURES, generator, size, weighted),
            label=torch.randint(0, 2, (size,), generator=generator).float(),
        )
        for _ in range(count)
    ]


SHARDERS: list[Any] = [
    EmbeddingBagCollectionSharder(),
    EmbeddingCollectionSharder(),
    FeatureProcessedEmbeddingBagCollectionSharder(),
    ManagedCollisionEmbeddingBagCollectionSharder(),
    ManagedCollisionEmbeddingCollectionSharder(),
]


def shard(
    model: nn.Module,
    kinds: dict[str, str] | str = "table_wise",
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    group: dist.ProcessGroup | None = None,
    local_size: int | None = None,
    **hyper_parameters: Any,
) -> DistributedModelParallel:
    """``model`` with its embedding modules sharded by a plan made by hand; tables get values of their own.

    Args:
        kinds: sharding type of each table by name, or of all.
        group: the sharding environment's; None for the world.
        local_size: ranks of one host; None for all.
    """
    group = group or dist.group.WORLD
    world = dist.get_world_size(group)
    local_size = local_size or world
    plans: dict[str, Any] = {}
    for path, module in model.named_modules():
        sharder = next((one for one in SHARDERS if type(module) is one.module_type), None)
        if sharder is None or any(path.startswith(f"{outer}.") for outer in plans):
            continue
        tables = sharder.shardable_parameters(module)
        for parameter in tables.values():
            apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.1, **hyper_parameters})
        generators = {
            table: _sharding(kinds if isinstance(kinds, str) else kinds[table], index, world, local_size)
            for index, table in enumerate(tables)
        }
        plans[path] = construct_module_sharding_plan(module, generators, sharder, local_size, world, "cpu")
    sharded = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(group),
        plan=ShardingPlan(plans),
        sharders=SHARDERS,
        device=torch.device("cpu"),
        init_data_parallel=False,
    )
    fill_tables(sharded)
    torch.manual_seed(2)  # managed collision draws values for rows that it evicts
    return sharded


def _sharding(kind: str, index: int, world: int, local_size: int) -> Any:
    hosts = world // local_size
    return {
        "table_wise": lambda: table_wise(rank=index % world),
        "row_wise": row_wise,
        "column_wise": lambda: column_wise(ranks=[index % world, (index + 1) % world]),
        "table_row_wise": lambda: table_row_wise(host_index=index % hosts),
        "grid_shard": lambda: grid_shard(host_indexes=[index % hosts, (index + 1) % hosts]),
        "data_parallel": data_parallel,
    }[kind]()


def fill_tables(model: nn.Module) -> None:
    """Gives every shard of every table values that depend on their place in the table, not on the sharding."""
    with torch.no_grad():
        for name, value in sorted(model.state_dict().items()):
            if isinstance(value, ShardedTensor) and name.endswith(".weight"):
                for part in value.local_shards():
                    rows, columns = part.metadata.shard_offsets[0], part.metadata.shard_offsets[1]
                    height, width = part.tensor.shape
                    row = torch.arange(rows, rows + height)[:, None]
                    column = torch.arange(columns, columns + width)[None, :]
                    part.tensor.copy_(torch.sin(row * 1.3 + column * 0.7 + len(name)))


def table_values(model: Any) -> dict[str, torch.Tensor]:
    """This rank's shards of all tables and fused optimizer states, and the dense values."""
    values: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for index, part in enumerate(value.local_shards()):
                values[f"{name}/{index}"] = part.tensor.clone()
        elif isinstance(value, torch.Tensor):
            values[name] = value.clone()
    for name, state in model.fused_optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, ShardedTensor):
                for index, part in enumerate(value.local_shards()):
                    values[f"optimizer {name} {key}/{index}"] = part.tensor.clone()
            elif isinstance(value, torch.Tensor):
                values[f"optimizer {name} {key}"] = value.clone()
    return values


def same_values(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Seeded(nn.Module):
    """Two of a kind have the same dense values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)


class Bags(Seeded):
    """Two modules fed by one jagged tensor that share a feature."""

    def __init__(self, width: int = WIDTH, **options: Any) -> None:
        super().__init__()
        self.a = bags("a", ["f0", "f1"], width=width, **options)
        self.b = bags("b", ["f2", "f1"], width=width, **options)
        self.over = nn.Linear(3 + 4 * width, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        a, b = self.a(batch.sparse), self.b(batch.sparse)
        return self.head(batch, a["f0"], a["f1"], b["f2"], b["f1"])

    def head(self, batch: Batch, *embeddings: torch.Tensor) -> torch.Tensor:
        logits = self.over(torch.cat([batch.dense, *embeddings], dim=1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label)


class Sequences(Seeded):
    """A sequence module beside a pooled one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = sequences("a", FEATURES)
        self.b = bags("b", ["f2", "f1"])
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        items, pooled = self.a(batch.sparse), self.b(batch.sparse)
        loss: torch.Tensor = sum(self.over(items[name].values()).sin().sum() for name in FEATURES)
        return loss + pooled["f2"].pow(2).sum() + pooled["f1"].sum()


class Processed(Seeded):
    """Position weights that are trained, beside a module that is not weighted and uses the same features."""

    def __init__(self) -> None:
        super().__init__()
        self.b = bags("b", ["f2", "f1"])
        self.a = FeatureProcessedEmbeddingBagCollection(
            bags("a", FEATURES, weighted=True),
            {name: PositionWeightedModule(max_feature_length=5) for name in FEATURES},
        )
        for index, name in enumerate(FEATURES):
            with torch.no_grad():
                self.a._feature_processors[name].position_weight.copy_(torch.arange(5.0) / 5 + index)

    def forward(self, batch: Batch) -> torch.Tensor:
        pooled, weighted = self.b(batch.sparse), self.a(batch.sparse)
        return sum(weighted[name].sin().mean() for name in FEATURES) + pooled["f2"].pow(2).mean()


class Managed(Seeded):
    """Managed collision: ids are remapped on their tables' ranks, and rows are evicted."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        collection = bags("a", FEATURES) if pooled else sequences("a", FEATURES)
        configs = collection.embedding_bag_configs() if pooled else collection.embedding_configs()
        maps = {
            config.name: MCHManagedCollisionModule(
                zch_size=config.num_embeddings,
                device=torch.device("cpu"),
                input_hash_size=1000,
                eviction_interval=2,
                eviction_policy=DistanceLFU_EvictionPolicy(),
            )
            for config in configs
        }
        kind = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
        self.a = kind(collection, ManagedCollisionCollection(maps, configs), return_remapped_features=True)

    def forward(self, batch: Batch) -> torch.Tensor:
        embeddings, remapped = self.a(batch.sparse)
        parts = [embeddings[name] if self.pooled else embeddings[name].values() for name in FEATURES]
        scores = [remapped[name].values().float().mean().nan_to_num() for name in FEATURES]
        return sum((index + 1) * part.sin().sum() for index, part in enumerate(parts)) * (1 + sum(scores) / 100)


def variable_batches(count: int, size: int = 4) -> list[Batch]:
    """A batch size per feature, other on each rank and from batch to batch."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(7 + rank)
    data = []
    for index in range(count):
        sizes = [2 + index % 2, 3, 1 + rank]
        lengths = torch.randint(0, 4, (sum(sizes),), generator=generator)
        inverse = torch.stack([torch.randint(0, rows, (size,), generator=generator) for rows in sizes])
        sparse = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator),
            lengths=lengths,
            stride_per_key_per_rank=[[rows] for rows in sizes],
            inverse_indices=(list(FEATURES), inverse),
        )
        dense = torch.rand(size, 3, generator=generator)
        data.append(Batch(dense, sparse, torch.randint(0, 2, (size,), generator=generator).float()))
    return data


def call(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


def reference_losses(model: nn.Module, data: list[Any], step: Callable[..., torch.Tensor] = call) -> list[float]:
    """Trains the plainly sharded model and returns the losses."""
    losses = []
    for batch in data:
        loss = step(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def pipelined_losses(
    rewrite: ModelRewrite, model: nn.Module, data: list[Any], step: Callable[..., torch.Tensor] = call
) -> list[float]:
    """Trains over the rewrite, with the input dist of the next batch submitted before the step of this one."""
    losses = []
    ahead: Any = None
    for index, batch in enumerate(data):
        splits = ahead or rewrite.start_input_dist(batch)
        features = rewrite.wait_inputs(rewrite.wait_splits(splits))
        ahead = rewrite.start_input_dist(data[index + 1]) if rewrite.is_resolved and index + 1 < len(data) else None
        embeddings = rewrite.look_up_embeddings(features)
        with rewrite.using_looked_up_embeddings(embeddings, batch):
            loss = step(model, batch)
        loss.backward()
        rewrite.run_embedding_backward(embeddings)
        losses.append(float(loss.detach()))
    return losses


def trained_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tables, optimizer states and dense values of this rank, with the dense gradients that have added up."""
    gradients = {f"gradient {name}": value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {**table_values(model), **gradients}


def groups() -> dict[str, Any]:
    """The rewrite's groups, each over all ranks."""
    return {"input_group": dist.new_group(), "agree_group": dist.new_group()}
