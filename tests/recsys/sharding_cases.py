"""Models, batches and comparisons for the tests of sharding: what a rank's process runs, as functions of a module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.feature_processor_ import FeatureProcessor, PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from lightning_pipe.recsys.sharding.shard_model import shard_model
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from tests.rounding import Reference

CPU = torch.device("cpu")
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
# As the classes have it: an eps that is left out is the kernel's where the optimizer is given in TorchRec's way.
ADAGRAD = {"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.1, "eps": 1e-10}}
ROW_WISE_ADAGRAD = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": 0.1, "eps": 1e-10}}
USERS, MOVIES, HISTORY = (
    "pooled.embedding_bags.users.weight",
    "pooled.embedding_bags.movies.weight",
    "sequence.embeddings.history.weight",
)
ROWS = 24
BATCH = 4


def pooled_tables(pooling: PoolingType = PoolingType.MEAN) -> list[EmbeddingBagConfig]:
    """Two tables that share a feature; the second one is pooled as asked."""
    return [
        EmbeddingBagConfig(name="users", embedding_dim=8, num_embeddings=ROWS, feature_names=["user", "item"]),
        EmbeddingBagConfig(
            name="movies", embedding_dim=8, num_embeddings=ROWS, feature_names=["item"], pooling=pooling
        ),
    ]


class Model(nn.Module):
    """Two pooled tables, one table of sequences, one dense layer."""

    def __init__(self, device: str = "cpu", pooling: PoolingType = PoolingType.MEAN) -> None:
        super().__init__()
        self.pooled = EmbeddingBagCollection(tables=pooled_tables(pooling), device=torch.device(device))
        self.sequence = EmbeddingCollection(
            tables=[EmbeddingConfig(name="history", embedding_dim=8, num_embeddings=ROWS, feature_names=["past"])],
            device=torch.device(device),
        )
        self.dense = nn.Linear(24, 1, device=device)

    def forward(self, bags: KeyedJaggedTensor, sequences: KeyedJaggedTensor) -> torch.Tensor:
        pooled = torch.sigmoid(self.dense(self.pooled(bags).values())).mean()
        return pooled + self.sequence(sequences)["past"].values().square().sum() / BATCH


class SumPooled(Model):
    """The same with sum pooling, for grid sharding, which cannot pool by mean."""

    def __init__(self) -> None:
        super().__init__(pooling=PoolingType.SUM)


class Processed(nn.Module):
    """A pooled table whose features are weighted by their position, weights that are trained."""

    def __init__(self) -> None:
        super().__init__()
        tables = pooled_tables()[:1]
        processors: dict[str, FeatureProcessor] = {name: PositionWeightedModule(3) for name in ("user", "item")}
        self.processed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables, is_weighted=True), processors
        )

    def forward(self, bags: KeyedJaggedTensor, sequences: KeyedJaggedTensor) -> torch.Tensor:
        return self.processed(bags).values().square().sum() / BATCH


def make_model(kind: type[nn.Module] = Model, seed: int = 7) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind()


def make_batch(step: int, rank: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def jagged(keys: list[str], least: int) -> KeyedJaggedTensor:
        lengths = torch.randint(least, 4, (len(keys) * BATCH,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor(keys, ids, lengths=lengths)

    return jagged(["user", "item"], 0), jagged(["past"], 1)


def constraints_for(pooled: str, sequence: str = "table_wise") -> dict[str, Any]:
    options = {"min_partition": 4}  # so that eight columns can be split in two
    return {
        "users": {"sharding_types": [pooled], **options},
        "movies": {"sharding_types": [pooled], **options},
        "history": {"sharding_types": [sequence], **options},
    }


def shard(model: nn.Module, **arguments: Any) -> ShardedModel:
    return shard_model(
        model, **{"device": CPU, "group": dist.group.WORLD, "sparse_optimizer": SGD, "constraints": None, **arguments}
    )


def tables_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "embedding" in name}


def apply_in_backward(model: nn.Module, optimizer: dict[str, Any], tables: Iterable[str] | None = None) -> None:
    """TorchRec's own way to say an optimizer, and torch's to train an unsharded table by it."""
    from lightning_pipe.recsys.kernels.table_optimizer import SparseOptimizerConfig

    chosen = SparseOptimizerConfig.from_config(optimizer)
    parameters = tables_of(model)
    _apply_optimizer_in_backward(
        chosen.optimizer_class,
        [parameters[name] for name in (tables or parameters)],
        dict(chosen.arguments),
    )


def on_another_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


FACTORS = (1.0, 1.0, 0.5, 0.5, 2.0, 0.1)  # of the learning rate, by step


@cache
def unsharded(class_path: str, rate: float, kind: type[nn.Module], world_size: int) -> Reference:
    """Tables, and states of their optimizers, trained in one module on all ranks' batches at once."""

    def trained() -> dict[str, Any]:
        model = make_model(kind)
        apply_in_backward(model, {"class_path": class_path, "init_args": {"lr": rate}})
        tables = tables_of(model)
        for step, factor in enumerate(FACTORS):
            for parameter in tables.values():
                parameter._in_backward_optimizers[0].param_groups[0]["lr"] = rate * factor  # type: ignore[attr-defined]
            torch.stack([model(*make_batch(step, rank)) for rank in range(world_size)]).mean().backward()
        states = {
            name: parameter._in_backward_optimizers[0].state[parameter].get("sum")  # type: ignore[attr-defined]
            for name, parameter in tables.items()
        }
        return {**tables, **{f"{name} state": state for name, state in states.items() if state is not None}}

    return Reference.of(trained)


def differences_from_unsharded(
    rank: int, world_size: int, optimizer: dict[str, Any], constraints: dict[str, Any], kind: Any = Model
) -> list[str]:
    """Train a step for each of `FACTORS`; returns what differs from the unsharded module, and tables that stay.

    All ranks gather the same tables, so that the first one alone compares them.
    """
    model, before = make_model(kind), tables_of(make_model(kind))
    sharded = shard(model, sparse_optimizer=optimizer, constraints=constraints)
    problems = [
        f"{name}: other initial values"
        for name, values in before.items()
        if not torch.equal(sharded.full_table(name), values)
    ]
    for step, factor in enumerate(FACTORS):
        sharded.set_learning_rate_factor(factor)
        model(*make_batch(step, rank)).backward()
        on_another_thread(sharded.step_data_parallel_tables)
    found = {name: sharded.full_table(name) for name in before}
    problems += [f"{name}: not trained" for name, values in before.items() if (found[name] - values).abs().max() < 1e-3]
    states = {name: sharded.full_table_optimizer_state(name) for name in before}
    if rank > 0:
        return problems
    expected = unsharded(optimizer["class_path"], optimizer["init_args"]["lr"], kind, world_size)
    for name in before:
        for state in states[name].values():
            wanted = expected.values.get(f"{name} state")
            problems += [f"{name}: a state that the unsharded module does not have"] if wanted is None else []
            found[f"{name} state"] = state if wanted is None else state.reshape(wanted.shape)
    return problems + expected.differences(found)
