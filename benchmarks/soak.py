"""Long training of a small recommender under the prefetch plan: memory and the number of threads must not grow.

``python -m benchmarks.soak`` (or ``torchrun --nproc-per-node 2 -m benchmarks.soak``) prints the growth of each rank's
resident memory after a warm-up: the slope of a least-squares line in bytes per iteration, and its standard error.
Neighboring measurements are correlated, so they are averaged for the standard error. A leak of one small tensor per
iteration has a slope of a few hundred bytes. The exit status is 1 if the slope is more than three standard errors above
zero and more than ``--allowed`` bytes per iteration, or if the number of threads grew. It falls by one, because a
thread of Lightning's launcher watches its processes only for the first five seconds.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from benchmarks.figures import add_options, at_most, save
from lightning_pipe.strategies.recommender.strategy import RecsysPipelineStrategy

KEYS = ("user", "item")
IDS, WIDTH = 1000, 16
# Number of averages from which the slope is computed.
BLOCKS = 20


@dataclass
class Batch:
    """A batch of B samples: ``dense`` has the shape [B, 4], ``label`` [B]."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor


class Stream(IterableDataset[Batch]):
    """Endless stream of random batches of eight samples with 0 to 3 ids per feature."""

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
        while True:
            lengths = torch.randint(0, 4, (len(KEYS) * 8,), generator=generator)
            values = torch.randint(0, IDS, (int(lengths.sum()),), generator=generator)
            yield Batch(
                torch.rand(8, 4, generator=generator),
                KeyedJaggedTensor(keys=list(KEYS), values=values, lengths=lengths),
                torch.randint(0, 2, (8,), generator=generator).float(),
            )


class Model(pl.LightningModule):
    """Two tables and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=key, embedding_dim=WIDTH, num_embeddings=IDS, feature_names=[key]) for key in KEYS
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(4 + len(KEYS) * WIDTH, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.over(torch.cat([batch.dense, self.bags(batch.sparse).values()], dim=1))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch.label))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.over.parameters(), lr=0.01)


@dataclass
class Measure(Callback):
    """Records the process's resident memory and number of threads.

    Args:
        every: iterations between two readings.
        warm_up: iterations before the first reading.
    """

    every: int
    warm_up: int
    iterations: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step >= self.warm_up and step % self.every == 0:
            self.iterations.append(step)
            self.resident.append(_status("VmRSS") * 1024)
            self.threads.append(_status("Threads"))


def _status(name: str) -> int:
    """Value of a line in ``/proc/self/status``. Sizes are in KiB."""
    with open("/proc/self/status", encoding="ascii") as lines:
        entry = next(line for line in lines if line.startswith(f"{name}:"))
    return int(entry.split()[1])


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope of *y* over *x* and its standard error, from the averages of BLOCKS blocks of neighbors."""
    size = len(x) // BLOCKS
    xs = [sum(x[start : start + size]) / size for start in range(0, BLOCKS * size, size)]
    ys = [sum(y[start : start + size]) / size for start in range(0, BLOCKS * size, size)]
    x_mean, y_mean = sum(xs) / BLOCKS, sum(ys) / BLOCKS
    spread = sum((value - x_mean) ** 2 for value in xs)
    coefficient = sum((a - x_mean) * (b - y_mean) for a, b in zip(xs, ys, strict=True)) / spread
    residual = sum((b - y_mean - coefficient * (a - x_mean)) ** 2 for a, b in zip(xs, ys, strict=True))
    return coefficient, math.sqrt(residual / (BLOCKS - 2) / spread)


def main() -> None:
    """Train, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--epoch", type=int, default=1_000, help="iterations per epoch")
    parser.add_argument("--warm-up", type=int, default=4_000, help="iterations before the first reading")
    parser.add_argument("--every", type=int, default=20, help="iterations between two readings")
    parser.add_argument("--allowed", type=float, default=16.0, help="maximum slope in bytes per iteration")
    add_options(parser)
    options = parser.parse_args()
    if options.iterations < options.warm_up + BLOCKS * options.every:
        parser.error(f"--iterations must be at least --warm-up plus {BLOCKS} times --every")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    measure = Measure(options.every, options.warm_up)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=RecsysPipelineStrategy(
            "prefetch", sparse_optimizer={"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}}
        ),
        max_steps=options.iterations,
        max_epochs=-1,
        limit_train_batches=options.epoch,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[measure],
    )
    start = time.perf_counter()
    trainer.fit(Model(), DataLoader(Stream(), batch_size=None))
    seconds = time.perf_counter() - start

    growth, error = slope(measure.iterations, measure.resident)
    threads = sorted(set(measure.threads))
    line = (
        f"rank {trainer.global_rank}: {trainer.global_step} iterations in {seconds:.0f} s; resident memory"
        f" {measure.resident[0] / 2**20:.1f} MiB after {measure.iterations[0]} and {measure.resident[-1] / 2**20:.1f}"
        f" MiB at the end: {growth:+.1f} bytes per iteration, standard error {error:.1f}; threads:"
        f" {', '.join(map(str, threads))}"
    )
    lines: list[Any] = [line] * world_size
    if world_size > 1:
        dist.all_gather_object(lines, line)
    if trainer.global_rank == 0:
        print("\n".join(lines), flush=True)
        ends = growth - 2 * error, growth + 2 * error
        save(
            [at_most("memory that grows", growth, max(options.allowed, 3 * error), ends, "B an iteration")],
            options.json,
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(int(growth > max(options.allowed, 3 * error) or threads[-1] > measure.threads[0]))


if __name__ == "__main__":
    main()
