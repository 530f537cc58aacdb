"""The recommender of the benchmarks: pooled tables and an MLP, for this project's pipelines and TorchRec's."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.streamable import Pipelineable

from lightning_pipe.recsys.sharding.shard_model import ShardedModel, shard_model


@dataclass
class Batch(Pipelineable):
    """Dense features, sparse features and labels of a rank's samples."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Batch on *device*."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that *stream* uses the batch."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.label.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Batch in pinned memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory())


class Model(nn.Module):
    """Sum-pooled tables, and an MLP over them and the dense features, with the outputs that TorchRec expects."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.features = [f"feature{index}" for index in range(options.tables)]
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"table{index}",
                    embedding_dim=options.width,
                    num_embeddings=options.rows,
                    feature_names=[feature],
                )
                for index, feature in enumerate(self.features)
            ],
            device=torch.device("meta"),
        )
        layers: list[nn.Module] = []
        width = options.tables * options.width + options.dense
        for out in (*options.mlp, 1):
            layers += [nn.Linear(width, out), nn.ReLU()]
            width = out
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        # By name, because in TorchRec's pipelines the columns of values() are in the order of the sharding.
        pooled = self.tables(batch.sparse).to_dict()
        columns = [pooled[name] for name in self.features]
        logits = self.mlp(torch.cat([*columns, batch.dense], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, (loss.detach(), logits.detach())


def batches(options: argparse.Namespace, rank: int, pin: bool) -> list[Batch]:
    """A few batches, which every pipeline trains on repeatedly."""
    generator = torch.Generator().manual_seed(rank)
    keys = [f"feature{index}" for index in range(options.tables)]
    data = []
    for _ in range(8):
        lengths = torch.randint(0, 2 * options.pooling + 1, (options.tables * options.batch,), generator=generator)
        values = torch.randint(0, options.rows, (int(lengths.sum()),), generator=generator)
        batch = Batch(
            torch.randn(options.batch, options.dense, generator=generator),
            KeyedJaggedTensor(keys=keys, values=values, lengths=lengths),
            torch.randint(0, 2, (options.batch,), generator=generator).float(),
        )
        data.append(batch.pin_memory() if pin else batch)
    return data


RATE, EPS = 0.05, 1e-8


def theirs(
    options: argparse.Namespace, device: torch.device, plan: Any = None, kind: type[Model] = Model, sharders: Any = None
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Model sharded and wrapped by TorchRec, with the given sharding plan or that of TorchRec's planner."""
    torch.manual_seed(1)
    model = kind(options)
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": RATE, "eps": EPS})
    dmp = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    seed_tables(dmp)
    dense = KeyedOptimizerWrapper(
        {name: p for name, p in dmp.named_parameters() if "tables" not in name},
        lambda params: torch.optim.SGD(params, lr=RATE),
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def ours(
    options: argparse.Namespace, device: torch.device, plan: Any, kind: type[Model] = Model, sharders: Any = None
) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """The same model with the same sharding plan, sharded by this project."""
    torch.manual_seed(1)
    optimizer = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}}
    assert dist.group.WORLD is not None
    model = kind(options)
    sharded = shard_model(
        model,
        device=device,
        group=dist.group.WORLD,
        sparse_optimizer=optimizer,
        sharding_plan=plan,
        sharders=sharders,
    )
    seed_tables(sharded.dmp)
    return sharded, torch.optim.SGD([parameter for _, parameter in sharded.dense_parameters()], lr=RATE)


def seed_tables(model: nn.Module) -> None:
    """Fill the tables with random values that are the same for every pipeline."""
    torch.manual_seed(2)
    for value in model.state_dict().values():
        for shard in getattr(value, "local_shards", list)():
            nn.init.uniform_(shard.tensor, -0.05, 0.05)


def forever(data: list[Batch]) -> Iterator[Batch]:
    """Endless repetition of the batches."""
    while True:
        yield from data
