"""Validation under a plan against validation batch by batch, on one machine, in turns within one run.

``torchrun --nproc-per-node 2 -m benchmarks.recsys_evaluation`` validates a DLRM-like model under a Trainer with the
serial, the base and the prefetch plan, and without a pipeline (``pipelined_evaluation=False``), and prints for each the
fastest and the median time of a batch and its ratio to the last. All must find the same loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_pipe.strategies import RecsysPipelineStrategy

TABLES = 8
WIDTH = 64
IDS = 100_000


class Scores(pl.LightningModule):
    """Pooled tables and an MLP.

    Args:
        hidden: width of the MLP's layers.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        tables = [
            EmbeddingBagConfig(name=f"t{index}", embedding_dim=WIDTH, num_embeddings=IDS, feature_names=[f"f{index}"])
            for index in range(TABLES)
        ]
        self.tables = EmbeddingBagCollection(tables)
        self.top = nn.Sequential(
            nn.Linear(TABLES * WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def validation_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> None:
        self.log("mean", self.top(self.tables(batch).values()).mean(), batch_size=1, sync_dist=True)


def make_batches(count: int, rows: int, rank: int) -> list[KeyedJaggedTensor]:
    """Batches of this rank: one to nine ids for each key and row."""
    generator = torch.Generator().manual_seed(rank)
    keys = [f"f{index}" for index in range(TABLES)]
    batches = []
    for _ in range(count):
        lengths = torch.randint(1, 10, (TABLES * rows,), generator=generator)
        ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=generator)
        batches.append(KeyedJaggedTensor(keys, ids, lengths=lengths))
    return batches


class Clock(Callback):
    """Seconds from the first batch's start, which resolves what feeds the tables, to the end."""

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            self.begun = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seconds = time.perf_counter() - self.begun


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    data: Any = make_batches(options.batches, options.rows, rank)
    loader: DataLoader[Any] = DataLoader(data, batch_size=None)
    kinds: dict[str, dict[str, Any]] = {
        **{plan: {"plan": plan} for plan in ("serial", "base", "prefetch")},
        "batch by batch": {"pipelined_evaluation": False},
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    means: dict[str, float] = {}
    for _ in range(options.rounds):
        for kind, arguments in kinds.items():
            clock = Clock()
            trainer = pl.Trainer(
                accelerator="gpu" if torch.cuda.is_available() else "cpu",
                devices=ranks,
                strategy=RecsysPipelineStrategy(
                    sparse_optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}, **arguments
                ),
                logger=False,
                enable_progress_bar=False,
                use_distributed_sampler=False,
                callbacks=[clock],
            )
            (found,) = trainer.validate(Scores(options.hidden), loader, verbose=False)
            times[kind].append(clock.seconds / (options.batches - 1))
            means[kind] = found["mean"]
    if rank == 0:
        assert len(set(means.values())) == 1, means
        base = times["batch by batch"]
        print(f"{'evaluation':16} {'fastest':>10} {'median':>10} {'fastest/':>10} {'median/':>10}")
        for kind, of_kind in times.items():
            fastest, median = min(of_kind), statistics.median(of_kind)
            ratios = (
                fastest / min(base),
                statistics.median(one / other for one, other in zip(of_kind, base, strict=True)),
            )
            print(f"{kind:16} {fastest * 1e3:7.2f} ms {median * 1e3:7.2f} ms {ratios[0]:10.3f} {ratios[1]:10.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
