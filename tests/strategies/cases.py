"""LightningModules with TorchRec tables, their data, and ``fit``, for one process and for the ranks of ``run_ranks``.

Everything is seeded and small: two calls with the same arguments train the same numbers, and a row of the data is the
same whoever reads it. Lightning gives a rank its rows, which it shuffles; with ``in_order`` it does not, and step *k*
of all ranks together has the rows of step *k* of one process with a batch as large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec.models.dlrm import DLRM
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
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    probabilistic_threshold_filter,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.kernels.table_optimizer import SparseOptimizerConfig
from lightning_pipe.strategies.recommender.strategy import RecsysPipelineStrategy
from tests.loops.models import trainer as quiet_trainer

# Those that train the same.
PLANS = (
    "serial",
    "base",
    "threaded_input",
    "prefetch",
    "fused_sparse_dist",
    "compute_ahead",
)
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
# As the classes have it: an eps that is left out is the kernel's where the optimizer is given in TorchRec's way.
ADAGRAD = {"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.1, "eps": 1e-10}}
ROW_WISE_ADAGRAD = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": 0.1, "eps": 1e-10}}

IDS = 24  # rows of each table
WIDTH = 8
KEYS = ["friend", "item", "past", "user"]


# ---------------------------------------------------------------------- data


@dataclass
class Batch:
    """``dense`` is batch x 3, ``label`` batch; ``sparse`` has the KEYS, ``tags`` the key ``tag`` with weights."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    tags: KeyedJaggedTensor
    label: Tensor


class Rows(Dataset[Any]):
    """Row *i* draws from a generator seeded with *i*: 0 to 3 of so many ids for each key."""

    def __init__(self, length: int = 24, ids: int = IDS) -> None:
        self.length, self.ids = length, ids

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(_row(index, self.ids))


@cache
def _row(index: int, number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 + index)

    def ids() -> Tensor:
        count = int(torch.randint(0, 4, (1,), generator=generator))
        return torch.randint(0, number, (count,), generator=generator)

    sparse = {key: ids() for key in KEYS}
    tags = ids()
    return {
        "dense": torch.rand(3, generator=generator),
        "sparse": sparse,
        "tags": tags,
        "weights": torch.rand(len(tags), generator=generator),
        "label": torch.randint(0, 2, (), generator=generator).float(),
    }


def jagged(keys: list[str], lists: list[list[Tensor]], weights: Tensor | None = None) -> KeyedJaggedTensor:
    """One list of ids for each key and row: ``lists[key][row]``."""
    flat = [ids for of_key in lists for ids in of_key]
    lengths = torch.tensor([len(ids) for ids in flat])
    return KeyedJaggedTensor(keys=list(keys), values=torch.cat(flat), lengths=lengths, weights=weights)


def collate(rows: list[dict[str, Any]]) -> Batch:
    return Batch(
        torch.stack([row["dense"] for row in rows]),
        jagged(KEYS, [[row["sparse"][key] for row in rows] for key in KEYS]),
        jagged(["tag"], [[row["tags"] for row in rows]], torch.cat([row["weights"] for row in rows])),
        torch.stack([row["label"] for row in rows]),
    )


def loader(
    length: int = 24, batch_size: int = 4, in_order: bool = False, ids: int = IDS, **options: Any
) -> DataLoader[Any]:
    """Batches of this rank's rows. ``length`` counts the rows of all ranks, ``batch_size`` those of one."""
    if in_order and dist.is_initialized():
        options["sampler"] = DistributedSampler(Rows(length), shuffle=False)
    options.setdefault("dataset", Rows(length, ids))
    options.setdefault("collate_fn", collate)
    return DataLoader(batch_size=batch_size, **options)


# ---------------------------------------------------------------------- models


def _bags(name: str, features: list[str], pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=WIDTH, num_embeddings=IDS, feature_names=features, pooling=pooling
    )


def _tower(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3 + width, 8), nn.ReLU(), nn.Linear(8, 1))


class Pooled(nn.Module):
    """Two tables, one of them for two features, and one of small size."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[_bags("people", ["user", "friend"]), _bags("things", ["item"], PoolingType.MEAN)],
            device=torch.device(device),
        )
        self.over = _tower(3 * WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        return self.over(torch.cat([batch.dense, self.bags(batch.sparse).values()], dim=1))[:, 0]


class Sequenced(nn.Module):
    """A table of sequences, beside a pooled one."""

    def __init__(self) -> None:
        super().__init__()
        self.history = EmbeddingCollection(
            tables=[EmbeddingConfig(name="past", embedding_dim=WIDTH, num_embeddings=IDS, feature_names=["past"])]
        )
        self.bags = EmbeddingBagCollection(tables=[_bags("people", ["user"])])
        self.over = _tower(2 * WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        recent = torch.stack([row.sum(0) for row in self.history(batch.sparse)["past"].to_dense()])
        return self.over(torch.cat([batch.dense, recent, self.bags(batch.sparse)["user"]], dim=1))[:, 0]


class Mixed(nn.Module):
    """Two pooled modules, one of them weighted; dense layers that draw random numbers and keep statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=[_bags("people", ["user"]), _bags("things", ["item", "past"])])
        self.weighted = EmbeddingBagCollection(tables=[_bags("tags", ["tag"])], is_weighted=True)
        self.normalize = nn.BatchNorm1d(3 + 4 * WIDTH)
        self.drop = nn.Dropout(0.3)
        self.over = _tower(4 * WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        parts = [batch.dense, self.bags(batch.sparse).values(), self.weighted(batch.tags)["tag"]]
        return self.over(self.drop(self.normalize(torch.cat(parts, dim=1))))[:, 0]


class Processed(nn.Module):
    """A table whose features are weighted by their position, weights that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=[_bags("people", ["user"]), _bags("things", ["item"])], is_weighted=True),
            {name: PositionWeightedModule(max_feature_length=4) for name in ("user", "item")},
        )
        self.over = _tower(2 * WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        return self.over(torch.cat([batch.dense, self.bags(batch.sparse).values()], dim=1))[:, 0]


SLOTS = 12  # rows of a table that ids are mapped to: fewer than ids, so that rows are evicted


def mapped(configs: Any, policy: Callable[[], Any], slots: int = SLOTS) -> ManagedCollisionCollection:
    """Maps for tables of *slots* rows, which evict every other batch."""
    maps = {
        config.name: MCHManagedCollisionModule(slots, torch.device("cpu"), policy(), 2, input_hash_size=IDS)
        for config in configs
    }
    return ManagedCollisionCollection(maps, configs)


def _by_chance(counts: Tensor) -> Any:
    return probabilistic_threshold_filter(counts, 0.6)


class Managed(nn.Module):
    """Ids are mapped to the rows of smaller tables; pooled and sequences, with three ways to evict, one with draws."""

    def __init__(self, slots: int = SLOTS) -> None:
        super().__init__()
        pooled = [_bags("people", ["user", "friend"]), _bags("things", ["item"], PoolingType.MEAN)]
        for config in pooled:
            config.num_embeddings = slots
        past = EmbeddingConfig(name="past", embedding_dim=WIDTH, num_embeddings=slots, feature_names=["past"])
        maps = {
            "people": mapped(pooled[:1], DistanceLFU_EvictionPolicy, slots),
            "things": mapped(pooled[1:], lambda: LFU_EvictionPolicy(threshold_filtering_func=_by_chance), slots),
        }
        both = ManagedCollisionCollection(
            {name: one._managed_collision_modules[name] for name, one in maps.items()}, pooled
        )
        self.bags = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=pooled), both)
        self.history = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=[past]), mapped([past], LRU_EvictionPolicy, slots), return_remapped_features=True
        )
        self.drop = nn.Dropout(0.2)
        self.over = _tower(4 * WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        sequences, slots = self.history(batch.sparse)
        assert slots is not None
        assert slots["past"].values().numel() == sequences["past"].values().shape[0]
        recent = torch.stack([row.sum(0) for row in sequences["past"].to_dense()])
        parts = [batch.dense, self.drop(recent), self.bags(batch.sparse)[0].values()]  # draws between the lookups
        return self.over(self.drop(torch.cat(parts, dim=1)))[:, 0]


class Dlrm(nn.Module):
    """TorchRec's own model."""

    def __init__(self) -> None:
        super().__init__()
        bags = EmbeddingBagCollection(tables=[_bags("people", ["user"]), _bags("things", ["item"])])
        self.dlrm = DLRM(bags, 3, [8, WIDTH], [8, 1])

    def forward(self, batch: Batch) -> Tensor:
        return self.dlrm(batch.dense, batch.sparse)[:, 0]


def plans_of(network: Any) -> tuple[str, ...]:
    """Those that a model can be trained under: feature processors are read in the lookup, which may also evict rows."""
    return tuple(plan for plan in PLANS if network not in (Processed, Managed) or plan != "fused_sparse_dist")


def is_table(name: str) -> bool:
    """Whether a parameter of one of these models is a table."""
    return ".embedding_bags." in name or ".embeddings." in name


def is_trained(name: str, buffer: Tensor) -> bool:
    """Whether training changes a buffer: statistics, and maps from ids to rows."""
    return buffer.is_floating_point() or "._mch_" in name


def adam(module: Clicks) -> Any:
    """Keeps state for each dense parameter, and its step depends on the order of things."""
    return torch.optim.Adam(module.dense_parameters(), lr=0.05)


class Clicks(pl.LightningModule):
    """An ordinary LightningModule; *in_backward* is the optimizer of its tables, said in TorchRec's way."""

    def __init__(
        self,
        network: Callable[[], nn.Module] = Pooled,
        *,
        in_backward: dict[str, Any] | None = None,
        optimizers: Callable[[Any], Any] = adam,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.network = network()
        self.optimizers_of = optimizers
        self.losses: list[float] = []
        if in_backward is not None:
            chosen = SparseOptimizerConfig.from_config(in_backward)
            for parameter in self.table_parameters():
                apply_optimizer_in_backward(chosen.optimizer_class, [parameter], dict(chosen.arguments))

    def dense_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if not is_table(name)]

    def table_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if is_table(name)]

    def loss_of(self, batch: Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.network(batch), batch.label)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch.label))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), batch_size=len(batch.label), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss_of(batch), batch_size=len(batch.label), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.sigmoid(self.network(batch))

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)


# ---------------------------------------------------------------------- training


class Memory(Logger):
    """A logger that keeps what it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


# Fields of the strategy's option groups, by the keywords of recsys() that stand for them.
FIELDS = {
    **{name: ("sharding", name) for name in ("constraints", "topology", "replicas", "sync_every")},
    **{name: ("checks", name) for name in ("validate_ids", "detect_nan")},
    **{name: ("auto", name) for name in ("exploration", "max_in_flight", "save_plan")},
    "free_features_early": ("memory", "free_features_early"),
    "quantized_comms": ("wire", "quantized_comms"),
    "ids_on_wire": ("wire", "ids"),
    "dedup": ("wire", "dedup"),
}


def recsys(
    plan: Any = "prefetch", kinds: dict[str, str] | None = None, optimizer: Any = ADAGRAD, **options: Any
) -> RecsysPipelineStrategy:
    """The strategy, with sharding types of tables by name; a field of an option group may be a keyword (``FIELDS``)."""
    if kinds:
        # So that eight columns can be split in two.
        options["constraints"] = {name: {"sharding_types": [kind], "min_partition": 4} for name, kind in kinds.items()}
    groups: dict[str, dict[str, Any]] = {}
    for name in [name for name in options if name in FIELDS]:
        group, field = FIELDS[name]
        groups.setdefault(group, {})[field] = options.pop(name)
    return RecsysPipelineStrategy(plan, sparse_optimizer=optimizer, **{**groups, **options})


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet trainer over this process, or over the ranks of ``run_ranks`` (whose environment Lightning reads)."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return quiet_trainer(**{"devices": ranks, "strategy": strategy, "log_every_n_steps": 1, **options})


def fit(
    module: pl.LightningModule,
    strategy: Any,
    train: Any = None,
    val: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Train on 24 rows, four a batch and rank, unless ``train`` says otherwise; ``options`` are the trainer's."""
    used = trainer(strategy, **options)
    torch.manual_seed(17 + (dist.get_rank() if dist.is_initialized() else 0))
    used.fit(module, loader() if train is None else train, val, ckpt_path=ckpt_path)
    return used


def predictions(used: pl.Trainer, module: pl.LightningModule, data: Any) -> Tensor:
    """What ``predict`` gives for all rows of this rank."""
    batches: Any = used.predict(module, data)
    return torch.cat(batches)


def state_of(used: pl.Trainer) -> dict[str, Tensor]:
    """All that training left: tables as a whole, dense values, states of the optimizers. Every rank calls it.

    The names are the same for a sharded module and an unsharded one, but for states of fused optimizers.
    """
    module, strategy = used.lightning_module, used.strategy
    found: dict[str, Tensor] = {}
    if isinstance(strategy, RecsysPipelineStrategy):
        sharded = strategy.sharded_model
        for name in sorted(sharded.tables):
            found[name] = sharded.full_table(name)
            found.update({f"{name} {key}": value for key, value in sharded.full_table_optimizer_state(name).items()})
        for name, map_of_rank in sharded.id_maps.collect_id_histories().items():
            found.update({f"{name} {key}": value.clone() for key, value in map_of_rank.items()})
        dense: Any = sharded.dense_parameters()
    else:
        dense = module.named_parameters()
    found.update({name: parameter.detach().clone() for name, parameter in dense})
    found.update({name: buffer.clone() for name, buffer in module.named_buffers() if is_trained(name, buffer)})
    for optimizer in used.optimizers:
        for index, state in optimizer.state_dict().get("state", {}).items():
            for key, value in state.items():
                if isinstance(value, (Tensor, int, float)):  # LBFGS has lists
                    found[f"optimizer {index} {key}"] = torch.as_tensor(value).clone()
    return found


def outcome(module: Clicks, used: pl.Trainer) -> dict[str, Any]:
    """Losses of this rank, parameters, buffers and states of the optimizers."""
    return {"losses": module.losses, **state_of(used)}


def difference(one: dict[str, Tensor], other: dict[str, Tensor], within: float = 0.0) -> list[str]:
    """Names of what is not in both, or differs: in any bit, or by more than ``within``."""

    def same(name: str) -> bool:
        if name not in one or name not in other or one[name].shape != other[name].shape:
            return False
        if within == 0.0:
            return torch.equal(one[name], other[name])
        return torch.allclose(one[name], other[name], rtol=0.0, atol=within)

    return [name for name in sorted({*one, *other}) if not same(name)]
