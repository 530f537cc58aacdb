"""Start-up time: the import and the first step, against those of Lightning and TorchRec.

``OMP_NUM_THREADS=1 python -m benchmarks.start_up`` measures in new processes, alternating in one run:

- the import: ``import lightning.pytorch`` against ``import lightning.pytorch, lightning_pipe``, from the start of a
  script to the end of that line. The figure is the median difference of two consecutive processes (aim: at most 0.3 s),
  with its 95 % interval;
- the first step of the recommender of :mod:`recsys_model` on two ranks, starting from the unsharded model:

  torchrec
      ``DistributedModelParallel``, which plans and shards; ``TrainPipelineSparseDist``; its first ``progress``;
  pipeline
      this project without Lightning: ``shard_model``, ``TrainPipeline`` under plan base, its first ``progress``;
  fit
      this project under Lightning: from the call of ``Trainer.fit`` with ``RecsysPipelineStrategy`` under plan base to
      the first ``on_train_batch_end``. This includes all work of Lightning for a ``fit``.

  Each of them plans its own sharding and initializes its tables. The batches, the process group, the Trainer and the
  imports of a user's script exist in advance. The figures are the medians over rounds of *fit* / *torchrec* and
  *pipeline* / *torchrec* (aim of both: at most 1.1), for the slower rank. The processes are forked from one that has
  only imported the modules. To get equal losses, the tables are filled with the same values after sharding, which is
  not timed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from benchmarks.figures import Figure, add_options, at_most, interval, median_ratio, save
from benchmarks.recsys_model import EPS, RATE, Batch, Model, batches
from lightning_pipe.recsys.sharding.shard_model import shard_model
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline
from lightning_pipe.strategies import RecsysPipelineStrategy

IMPORT_LIMIT, STEP_LIMIT = 0.3, 1.1
IMPORTS = ("lightning.pytorch", "lightning.pytorch, lightning_pipe")
TIMED_IMPORT = "import time; begun = time.perf_counter(); import {}; print(time.perf_counter() - begun)"
CPU = torch.device("cpu")
OPTIMIZER = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}}


# ------------------------------------------------------------------------------- import


def imports(rounds: int) -> Figure:
    """Measure the import, print the result and return the figure."""
    times: dict[str, list[float]] = {key: [] for key in IMPORTS}
    for turn in range(rounds + 1):
        for statement in IMPORTS if turn % 2 else reversed(IMPORTS):
            command = [sys.executable, "-c", TIMED_IMPORT.format(statement)]
            seconds = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
            if turn:  # the first round reads files from the disk, and may compile them
                times[statement].append(seconds)
    plain, with_ours = times.values()
    more = [total - base for total, base in zip(with_ours, plain, strict=True)]
    spread = interval(lambda indices: statistics.median(more[index] for index in indices), rounds)
    print(
        f"import lightning.pytorch {statistics.median(plain):.3f} s, with lightning_pipe"
        f" {statistics.median(with_ours):.3f} s; difference {statistics.median(more):.3f} s ({spread[0]:.3f} .."
        f" {spread[1]:.3f}), aim at most {IMPORT_LIMIT} s",
        flush=True,
    )
    name = "import of lightning_pipe, beyond that of lightning.pytorch"
    return at_most(name, statistics.median(more), IMPORT_LIMIT, spread, "s")


# --------------------------------------------------------------------------- first step


class Clock:
    """Seconds since this object was created, without the time spent filling tables."""

    def __init__(self) -> None:
        dist.barrier()
        self._begun = time.perf_counter()

    def fill(self, model: nn.Module) -> None:
        """Fill the tables with values that do not depend on the sharding."""
        begun = time.perf_counter()
        for value in model.state_dict().values():
            for shard in getattr(value, "local_shards", list)():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                places = torch.arange(row, row + rows)[:, None] * 1.7 + torch.arange(column, column + columns) * 0.3
                shard.tensor.copy_(places.sin() * 0.05)
        self._begun += time.perf_counter() - begun

    def seconds(self) -> float:
        return time.perf_counter() - self._begun


def torchrec(model: Model, data: list[Batch]) -> tuple[float, float]:
    """Seconds and loss of TorchRec's first step."""
    clock = Clock()
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": RATE, "eps": EPS})
    dmp = DistributedModelParallel(model, device=CPU)
    clock.fill(dmp)
    dense = KeyedOptimizerWrapper(
        {name: parameter for name, parameter in dmp.named_parameters() if "tables" not in name},
        lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    )
    pipeline: Any = TrainPipelineSparseDist(dmp, CombinedOptimizer([dmp.fused_optimizer, dense]), CPU)
    loss = pipeline.progress(iter(data))[0]
    return clock.seconds(), float(loss)


def pipeline(model: Model, data: list[Batch]) -> tuple[float, float]:
    """Seconds and loss of this project's first step without Lightning."""
    clock = Clock()
    world = dist.group.WORLD
    assert world is not None
    sharded = shard_model(model, device=CPU, group=world, sparse_optimizer=OPTIMIZER)
    clock.fill(sharded.dmp)
    dense = torch.optim.SGD([parameter for _, parameter in sharded.dense_parameters()], lr=RATE)
    loss = TrainPipeline(sharded, dense, CPU, plan="base").progress(iter(data))[0]
    return clock.seconds(), float(loss)


class Recommender(pl.LightningModule):
    """The model under a Trainer. Records the end of its first step."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.clock: Clock
        self.first: tuple[float, Tensor]

    def on_train_start(self) -> None:
        self.clock.fill(self.trainer.strategy.sharded_model.dmp)  # type: ignore[attr-defined]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch)[0]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.first = self.clock.seconds(), outputs["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def fit(model: Model, data: list[Batch]) -> tuple[float, float]:
    """Seconds and loss of this project's first step under Lightning."""
    module = Recommender(model)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=RecsysPipelineStrategy("base", sparse_optimizer=OPTIMIZER),
        max_epochs=1,
        use_distributed_sampler=False,  # every rank has different batches
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    module.clock = Clock()
    trainer.fit(module, loader)
    seconds, loss = module.first
    return seconds, float(loss)


WAYS = {"torchrec": torchrec, "pipeline": pipeline, "fit": fit}


def rank_of(rank: int, way: str, options: argparse.Namespace, folder: str) -> None:
    """Run one rank. The first rank writes the seconds and losses of all ranks."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": options.ranks}
    os.environ |= {name: str(value) for name, value in {**ranks, "LOCAL_WORLD_SIZE": options.ranks}.items()}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipe", "torchrec", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    torch.manual_seed(1)
    model, data = Model(options), batches(options, rank, False)
    results: list[Any] = [None] * options.ranks
    dist.all_gather_object(results, WAYS[way](model, data))
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # the pipelines still have batches in flight and waiting threads


def first_steps(options: argparse.Namespace) -> list[Figure]:
    """Measure the first steps, print the results and return the figures."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: Sequence[float] = ()
    for turn in range(options.rounds + 1):
        for way in list(WAYS) if turn % 2 else reversed(WAYS):
            with tempfile.TemporaryDirectory() as folder:
                mp.start_processes(rank_of, (way, options, folder), nprocs=options.ranks, start_method="fork")
                seconds, lost = zip(*json.loads(Path(folder, "found").read_text(encoding="utf-8")), strict=True)
            losses = losses or lost
            torch.testing.assert_close(lost, losses, rtol=0, atol=1e-5, msg=f"{way} has losses {lost}, others {losses}")
            if turn:
                times[way].append(max(seconds))
    figures = []
    for way, longest in times.items():
        ratio, spread = median_ratio(longest, times["torchrec"])
        print(
            f"{way:<10}{statistics.median(longest):>7.3f} s to the end of the first step; / torchrec {ratio:.3f}"
            f" ({spread[0]:.3f} .. {spread[1]:.3f})",
            flush=True,
        )
        if way != "torchrec":
            name = f"recsys first step, {way} under plan base / TorchRec's DMP and TrainPipelineSparseDist"
            figures.append(at_most(name, ratio, STEP_LIMIT, spread))
    return figures


def main() -> None:
    """Run both measurements and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("ranks", 2),
        ("rounds", 10),
        ("import-rounds", 6),
        ("tables", 8),
        ("rows", 100_000),
        ("width", 64),
        ("pooling", 10),
        ("batch", 1024),
        ("dense", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mlp", type=int, nargs="*", default=[256, 128])
    add_options(parser)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = first_steps(options)
    save([imports(options.import_rounds), *figures], options.json)


if __name__ == "__main__":
    main()
