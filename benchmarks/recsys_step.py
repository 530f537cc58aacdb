"""Step time of a recommender against TorchRec's train pipelines, without and with a Trainer.

``OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.recsys_step`` trains the model of :mod:`recsys_model` on
the same batches in four ways, which alternate in the same processes: TorchRec's pipeline, the same pipeline a second
time (A/A: a separate object and model), this project's ``TrainPipeline``, and a ``Trainer.fit`` under
``RecsysPipelineStrategy``, whose callback runs the blocks of the others between its own. A block has 20 steps, and the
order is random in each round. The peers are ``TrainPipelineSparseDist`` for the base plan and ``TrainPipelineBase`` for
the serial plan. The sizes range from a step dominated by call overhead to a step dominated by compute.

Each size and plan has three figures. Each is the median over rounds of a block's time over that of the peer's block in
the same round, with a 95 % bootstrap interval: the second peer (noise of the ratios), ``TrainPipeline``, and the
Trainer. The framework cost of this project's loop over a bare loop is subtracted from the Trainer's step first (as in
:mod:`loop_cost`, without a ``self.log``, measured in the same processes, each without the others). Aim of the last two:
the upper end of the interval is not above that of the second peer. The benchmark fails if the losses of the four ways
are not equal to the bit in every step.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from benchmarks import loop_cost
from benchmarks.figures import Figure, add_options, median_ratio, save
from benchmarks.recsys_model import EPS, RATE, Batch, Model, batches, forever, ours, seed_tables, theirs
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline
from lightning_pipe.strategies import PipelineStrategy, RecsysPipelineStrategy

PEERS: dict[str, Any] = {"base": TrainPipelineSparseDist, "serial": TrainPipelineBase}

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"tables": 2, "rows": 1_000, "width": 8, "pooling": 2, "batch": 32, "dense": 4, "mlp": [16]},
    "small": {"tables": 4, "rows": 10_000, "width": 16, "pooling": 4, "batch": 256, "dense": 8, "mlp": [64]},
    "medium": {"tables": 8, "rows": 50_000, "width": 32, "pooling": 6, "batch": 512, "dense": 16, "mlp": [128, 64]},
    "large": {"tables": 16, "rows": 50_000, "width": 64, "pooling": 8, "batch": 512, "dense": 16, "mlp": [256, 128]},
    # The default tables and batch of torchrec.distributed.benchmark.benchmark_train_pipeline. Only for a GPU.
    "torchrec": {
        "tables": 200,
        "rows": 100_000,
        "width": 128,
        "pooling": 10,
        "batch": 32_768,
        "dense": 10,
        "mlp": [256],
    },
}

PEER, AGAIN, OURS, TRAINER = "peer", "peer again", "TrainPipeline", "Trainer"


class Turns:
    """Alternating blocks of steps. The Trainer runs its own blocks, between two calls of :meth:`others`.

    Args:
        arms: function that trains a batch, for every way except the Trainer.
        steps: steps per block.
        rounds: number of rounds, with one block of every way in each. A first round is run in addition and discarded.
        finished: function that waits for the work on the device.

    Attributes:
        times: seconds per step of each way, by round.
        done: True after the last block.
    """

    def __init__(
        self, arms: dict[str, Callable[[], None]], steps: int, rounds: int, finished: Callable[[], None]
    ) -> None:
        self._arms = arms
        self._steps = steps
        self._finished = finished
        names = [*arms, TRAINER]
        draw = random.Random(0)  # the same on every rank
        self._blocks = deque(name for _ in range(rounds + 1) for name in draw.sample(names, len(names)))
        self.times: dict[str, list[float]] = {name: [] for name in names}
        self.done = False
        self._since: float | None = None

    def others(self) -> None:
        """End the Trainer's current block, run the blocks before its next one, and start that block."""
        if self._since is not None:
            self._end(TRAINER)
        while self._blocks:
            name = self._blocks.popleft()
            self._begin()
            if name == TRAINER:
                return
            train = self._arms[name]
            for _ in range(self._steps):
                train()
            self._end(name)
        self.done = True

    def _begin(self) -> None:
        gc.collect()  # so that no block collects the garbage of the previous one
        dist.barrier()
        self._since = time.perf_counter()

    def _end(self, name: str) -> None:
        assert self._since is not None
        self._finished()
        dist.barrier()  # a block ends when all ranks have ended it
        self.times[name].append((time.perf_counter() - self._since) / self._steps)
        self._since = None


class Trained(Model, pl.LightningModule):
    """The model under a Trainer."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, (detached, _) = self(batch)
        self.losses.append(detached)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The strategy removes the parameters of the tables.
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Endless(IterableDataset[Batch]):
    """Endless repetition of the batches."""

    def __init__(self, data: list[Batch]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Batch]:
        return forever(self._data)


class Between(pl.Callback):
    """Runs the blocks of the others between those of the Trainer."""

    def __init__(self, turns: Turns, steps: int) -> None:
        self._turns = turns
        self._steps = steps

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, RecsysPipelineStrategy)
        seed_tables(trainer.strategy.sharded_model.dmp)
        self._turns.others()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self._steps == 0:
            self._turns.others()
            trainer.should_stop = self._turns.done


def measure(size: str, plan: str, framework: float, device: torch.device, options: argparse.Namespace) -> list[Figure]:
    """Measure all ways of *plan* on a model of *size*, print the result on rank 0, and return the figures.

    Args:
        size: name in ``SIZES``.
        plan: name in ``PEERS``.
        framework: seconds that are subtracted from each of the Trainer's steps.
        device: device of this rank.
        options: options of the command line.
    """
    sizes = argparse.Namespace(**SIZES[size])
    rank, on_gpu = dist.get_rank(), device.type == "cuda"
    data = batches(sizes, rank, on_gpu)
    losses: dict[str, list[Tensor]] = {PEER: [], AGAIN: [], OURS: []}
    pipelines: dict[str, Any] = {}
    for name in (PEER, AGAIN):
        dmp, combined = theirs(sizes, device)
        pipelines[name] = PEERS[plan](dmp, combined, device)
    sharded, optimizer = ours(sizes, device, dmp.plan)
    pipelines[OURS] = TrainPipeline(sharded, optimizer, device, plan=plan)
    arms = {name: _step(pipelines[name].progress, forever(data), losses[name]) for name in losses}
    rounds = options.rounds or ROUNDS[size]
    turns = Turns(arms, options.steps, rounds, torch.cuda.synchronize if on_gpu else lambda: None)
    torch.manual_seed(1)
    module = Trained(sizes)
    strategy = RecsysPipelineStrategy(
        plan,
        sparse_optimizer={"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}},
        sharding={"plan": dmp.plan},
    )
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Between(turns, options.steps)],
    )
    trainer.fit(module, DataLoader(Endless(data), batch_size=None))
    pipelines[OURS].close()
    first = torch.stack(losses[PEER])
    for name, way_losses in {**losses, TRAINER: module.losses}.items():
        if not torch.equal(torch.stack(way_losses), first):
            raise SystemExit(f"{size}, {plan} plan: the losses of {name!r} differ from those of the peer")
    return _figures(size, plan, framework, {name: seconds[1:] for name, seconds in turns.times.items()}, on_gpu)


def _step(
    progress: Callable[[Iterator[Batch]], Any], data: Iterator[Batch], losses: list[Tensor]
) -> Callable[[], None]:
    def train() -> None:
        losses.append(progress(data)[0])

    return train


def _figures(size: str, plan: str, framework: float, times: dict[str, list[float]], on_gpu: bool) -> list[Figure]:
    peer = PEERS[plan].__name__
    times[TRAINER] = [seconds - framework for seconds in times[TRAINER]]
    labels = {AGAIN: f"{peer} again", OURS: "TrainPipeline", TRAINER: "Trainer less the framework's cost"}
    limit = median_ratio(times[AGAIN], times[PEER])[1][1]
    figures = []
    middle = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    for name, label in labels.items():
        ratio, spread = median_ratio(times[name], times[PEER])
        target, met = None, None
        if name != AGAIN:
            target, met = f"upper bound <= {limit:.4f} (the peer against itself)", spread[1] <= limit
        device = " (cuda)" if on_gpu else ""
        title = f"recsys step, {plan} plan, {size}: {label} / {peer}{device}"
        figures.append(Figure(title, ratio, "ratio", spread, target, met))
        if not dist.get_rank():
            verdict = "" if met is None else f", {'met' if met else 'missed'}: {target}"
            print(
                f"{size:<7}{plan:<7}{label:<34}{middle[name]:8.3f} ms, peer {middle[PEER]:8.3f} ms; ratio {ratio:.4f}"
                f" ({spread[0]:.4f} .. {spread[1]:.4f}){verdict}",
                flush=True,
            )
    return figures


# ------------------------------------------------------------------ framework cost


def framework_cost(steps: int, rounds: int) -> float:
    """Seconds per step that this project's loop takes over a bare one. Call this before the process group is made."""
    ways = {"bare": loop_cost.bare, "loop": loop_cost.trained(PipelineStrategy)}
    generator = torch.Generator().manual_seed(1)
    data = list(torch.randn(steps, 4, loop_cost.WIDTH, generator=generator))
    costs = []
    with _alone():
        for turn in range(rounds + 1):
            step_times = {}
            for name in ways if turn % 2 else reversed(ways):
                module = loop_cost.Tiny(logs=False)
                ways[name](module, data)
                step_times[name] = module.step_time()
            if turn:
                costs.append(step_times["loop"] - step_times["bare"])
    return statistics.median(costs)


@contextmanager
def _alone() -> Iterator[None]:
    """Hide the variables of torchrun in the body, so that this process runs without the other ranks."""
    prefixes = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    saved = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    for name in saved:
        del os.environ[name]
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.update(saved)


ROUNDS = {"tiny": 24, "small": 20, "medium": 12, "large": 10, "torchrec": 4}


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES)[:-1])
    parser.add_argument("--plans", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--steps", type=int, default=20, help="steps per block")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipe", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    framework = framework_cost(steps=200, rounds=7)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    gc.freeze()  # so that the collection before each block skips imported objects
    if not dist.get_rank():
        print(f"framework cost: {1e3 * framework:.3f} ms per step", flush=True)
    figures = []
    for size in options.sizes:
        for plan in options.plans:
            figures += measure(size, plan, framework, device, options)
    if not dist.get_rank():
        save(figures, options.json)
    dist.barrier()
    os._exit(0)  # TorchRec's pipelines still have batches in flight


if __name__ == "__main__":
    main()
