"""This project's train pipelines against TorchRec's, on one machine, in turns within one run.

``torchrun --nproc-per-node 2 -m benchmarks.recsys_train_pipeline`` trains a DLRM-like model (pooled tables, an MLP) and
prints, for each pipeline, the fastest and the median time of a step and their ratio to TorchRec's base pipeline
(``TrainPipelineSparseDist``). Every pipeline has a model of its own, of the same seed; they take turns, round by round,
and all must end with the same losses, or the comparison means nothing. On CUDA devices it also runs TorchRec's prefetch
pipeline, which has no CPU version.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.streamable import Pipelineable

from lightning_pipe.recsys.sharding import ShardedModel, shard_model
from lightning_pipe.recsys.train_pipeline import TrainPipeline


@dataclass
class Batch(Pipelineable):
    """Dense features, sparse features and labels of a rank's samples."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on *device*."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that *stream* uses it."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.label.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in pinned memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory())


class Model(nn.Module):
    """Tables pooled by sum, and an MLP over them and the dense features; returns what TorchRec's pipelines expect."""

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
        # By name: in TorchRec's pipelines the columns of values() are in the order of the sharding.
        pooled = self.tables(batch.sparse).to_dict()
        columns = [pooled[name] for name in self.features]
        logits = self.mlp(torch.cat([*columns, batch.dense], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, (loss.detach(), logits.detach())


def batches(options: argparse.Namespace, rank: int, pin: bool) -> list[Batch]:
    """A few batches, which every pipeline trains on again and again."""
    generator = torch.Generator().manual_seed(rank)
    keys = [f"feature{index}" for index in range(options.tables)]
    made = []
    for _ in range(8):
        lengths = torch.randint(0, 2 * options.pooling + 1, (options.tables * options.batch,), generator=generator)
        values = torch.randint(0, options.rows, (int(lengths.sum()),), generator=generator)
        batch = Batch(
            torch.randn(options.batch, options.dense, generator=generator),
            KeyedJaggedTensor(keys=keys, values=values, lengths=lengths),
            torch.randint(0, 2, (options.batch,), generator=generator).float(),
        )
        made.append(batch.pin_memory() if pin else batch)
    return made


RATE, EPS = 0.05, 1e-8


def theirs(
    options: argparse.Namespace, device: torch.device, plan: Any = None, kind: type[Model] = Model
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """A model sharded and wrapped by TorchRec; without a sharding plan as its planner says."""
    torch.manual_seed(1)
    model = kind(options)
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": RATE, "eps": EPS})
    dmp = DistributedModelParallel(model, device=device, plan=plan)
    seed_tables(dmp)
    dense = KeyedOptimizerWrapper(
        {name: p for name, p in dmp.named_parameters() if "tables" not in name},
        lambda params: torch.optim.SGD(params, lr=RATE),
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def ours(
    options: argparse.Namespace, device: torch.device, plan: Any, kind: type[Model] = Model
) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """The same sharded by this project, in the same way."""
    torch.manual_seed(1)
    optimizer = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}}
    assert dist.group.WORLD is not None
    model = kind(options)
    sharded = shard_model(model, device=device, group=dist.group.WORLD, sparse_optimizer=optimizer, sharding_plan=plan)
    seed_tables(sharded.dmp)
    return sharded, torch.optim.SGD([parameter for _, parameter in sharded.dense_parameters()], lr=RATE)


def seed_tables(model: nn.Module) -> None:
    """The same values in every pipeline's tables."""
    torch.manual_seed(2)
    for value in model.state_dict().values():
        for shard in getattr(value, "local_shards", list)():
            nn.init.uniform_(shard.tensor, -0.05, 0.05)


def pipelines(options: argparse.Namespace, device: torch.device) -> dict[str, Callable[[Iterator[Any]], Any]]:
    """Each pipeline's ``progress``."""
    made: dict[str, Callable[[Iterator[Any]], Any]] = {}
    kinds: dict[str, Any] = {"torchrec base": TrainPipelineSparseDist}
    if device.type == "cuda":
        kinds["torchrec prefetch"] = PrefetchTrainPipelineSparseDist
    for name, kind in kinds.items():
        dmp, combined = theirs(options, device)
        made[name] = kind(dmp, combined, device, execute_all_batches=True).progress
    for plan in ("serial", "base", "prefetch"):
        sharded, optimizer = ours(options, device, dmp.plan)
        made[plan] = TrainPipeline(sharded, optimizer, device, plan=plan).progress
    return made


def main() -> None:
    """Run and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("tables", 8),
        ("rows", 100_000),
        ("width", 64),
        ("pooling", 10),
        ("batch", 1024),
        ("dense", 16),
        ("steps", 10),
        ("rounds", 12),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mlp", type=int, nargs="*", default=[256, 128])
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    runs = pipelines(options, device)
    data = batches(options, rank, on_gpu)
    endless = {name: forever(data) for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, float] = {}
    for turn in range(options.rounds):
        for name, progress in runs.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                losses[name] = progress(endless[name])[0]
            if on_gpu:
                torch.cuda.synchronize()
            if turn:  # the first round warms up, and ours resolves its model in it
                times[name].append((time.perf_counter() - start) / options.steps * 1000)
    values = {name: float(loss) for name, loss in losses.items()}
    if len(set(values.values())) != 1:
        raise SystemExit(f"the pipelines trained to different losses: {values}")
    if rank == 0:
        best, middle = min(times["torchrec base"]), statistics.median(times["torchrec base"])
        print(f"{'ms a step':<20}{'fastest':>9}{'median':>9}{'ratio of fastest':>18}{'of median':>11}")
        for name, taken in times.items():
            low, mid = min(taken), statistics.median(taken)
            print(f"{name:<20}{low:>9.2f}{mid:>9.2f}{low / best:>18.3f}{mid / middle:>11.3f}")
    dist.barrier()
    os._exit(0)  # the pipelines still have batches in flight, and threads that wait for more


def forever(data: list[Batch]) -> Iterator[Batch]:
    """The batches, again and again."""
    while True:
        yield from data


if __name__ == "__main__":
    main()
