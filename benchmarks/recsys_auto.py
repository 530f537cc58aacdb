"""The plan that ``plan: auto`` finds against the handwritten plans, alternating in one run on one machine.

``python -m benchmarks.recsys_auto movielens`` trains the MovieLens example on two processes. ``slow`` trains pooled
tables and an MLP on two processes joined by a rate-limited link (:mod:`slow_link`; requires root). The number of ids is
set so that their exchange alone takes 0.5, 1 and 2 times as long as the rest of an iteration (``--exchange``).

Both train under a Trainer. First, plan auto finds its plan, as in normal training. Then this plan, the same plan a
second time, and the serial, base and prefetch plans alternate in blocks of iterations, in a different order in each
round. Batches in flight are trained between blocks, and the iterations that fill a pipeline are not timed. The output
is the median iteration time and the interquartile range of each plan over blocks, and the ratio of auto to the best
handwritten plan with a 95 % interval (bootstrap over rounds, which selects the best plan again in each sample). The
ratio of auto to its second run shows the noise.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from benchmarks.figures import interval
from benchmarks.slow_link import slow_link
from examples.recsys_movielens.data import MovieLensData, RatingDataset
from examples.recsys_movielens.model import MovieLensDLRM
from lightning_pipe.engine import PipelinePlan, SWPipeline, TrainingContext
from lightning_pipe.loops.programs.auto_program import PlanChoice
from lightning_pipe.loops.programs.program import TrainingProgram
from lightning_pipe.recsys.plans.recsys_plans import recsys_plan
from lightning_pipe.strategies import RecsysPipelineStrategy

BY_HAND = ("serial", "base", "prefetch")
EXCHANGE = ("EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch")


class Turns(TrainingProgram):
    """Trains under several alternating plans, and times them.

    Args:
        program: program that this one replaces.
        plans: plans by the names of their times.
        device: as in :class:`~lightning_pipe.engine.SWPipeline`.
        steps: timed iterations per block.
        rounds: number of rounds, with one block of every plan in each. A first round is run in addition and discarded.
    """

    def __init__(
        self, program: TrainingProgram, plans: Mapping[str, PipelinePlan], device: torch.device, steps: int, rounds: int
    ) -> None:
        self.__dict__.update(program.__dict__)
        self._pipelines = {name: SWPipeline(plan, device, dist.group.WORLD) for name, plan in plans.items()}
        self._steps = steps
        draw = random.Random(0)  # the same on every rank
        self._blocks = deque(name for _ in range(rounds + 1) for name in draw.sample(list(plans), len(plans)))
        self.times: dict[str, list[float]] = {name: [] for name in plans}
        self._begun = 0
        self._drains = True  # the first pipeline may hold a batch in flight, which it must train first
        program.pipeline.close()
        self.pipeline = self._pipelines[self._blocks[0]]

    @property
    def done(self) -> bool:
        """True after the last block."""
        return not self._blocks

    def begin_next_batch(self, source: Iterator[Any]) -> TrainingContext:
        if not self.done:
            fill = self.pipeline.plan.pipeline_depth + 2
            if self._begun == fill:
                self._since = time.perf_counter()
            elif self._begun == fill + self._steps:
                self.times[self._blocks[0]].append((time.perf_counter() - self._since) / self._steps)
                self._drains = True
            while self._drains:
                try:
                    return super().begin_next_batch(iter(()))
                except StopIteration:
                    self._next_block()
        self._begun += 1
        return super().begin_next_batch(source)

    def close(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.close()
        super().close()

    def _next_block(self) -> None:
        self._drains = False
        if self._begun:
            self._blocks.popleft()
        self._begun = 0
        if self._blocks:
            self.pipeline = self._pipelines[self._blocks[0]]


class InTurns(RecsysPipelineStrategy):
    """Strategy that trains under several alternating plans.

    Args:
        plans: plans or their names, by the names of their times.
        steps: as in :class:`Turns`.
        rounds: as in :class:`Turns`.
        options: further arguments of the strategy.
    """

    def __init__(self, plans: Mapping[str, Any], steps: int, rounds: int, **options: Any) -> None:
        super().__init__("serial", **options)
        self._in_turns = plans
        self._size = steps, rounds
        self.turns: Turns | None = None

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        program = super().training_program(trainer, transfer)
        tasks = list(program.pipeline.plan.tasks.values())
        plans = {name: recsys_plan(plan, tasks) for name, plan in self._in_turns.items()}
        self._program = self.turns = Turns(program, plans, self.root_device, *self._size)
        return self.turns


class StopWhen(pl.Callback):
    """Ends training once *over* returns True.

    Args:
        over: function with the same result on every rank.
    """

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        trainer.should_stop = self._over()


@dataclass
class Workload:
    """Model and data of a comparison."""

    module: pl.LightningModule
    data: pl.LightningDataModule | DataLoader[Any]
    options: Mapping[str, Any]  # arguments of the strategy
    nodes: int

    def fit(self, strategy: RecsysPipelineStrategy, over: Callable[[], bool], folder: str) -> None:
        """Train until *over* returns True, with the loggers of the examples."""
        trainer = pl.Trainer(
            accelerator="cpu",
            num_nodes=self.nodes,
            devices=2 // self.nodes,
            strategy=strategy,
            max_epochs=1,
            log_every_n_steps=10,
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=isinstance(self.data, pl.LightningDataModule),
            logger=[CSVLogger(folder), TensorBoardLogger(folder)],
            callbacks=[pl.callbacks.LearningRateMonitor(), StopWhen(over)],
        )
        trainer.fit(self.module, self.data)

    def choice(self, folder: str) -> PlanChoice:
        """Choice of plan auto."""
        strategy = RecsysPipelineStrategy("auto", **self.options)
        self.fit(strategy, lambda: strategy.plan_choice is not None, folder)
        assert strategy.plan_choice is not None
        return strategy.plan_choice

    def times(self, plans: Mapping[str, Any], steps: int, rounds: int, folder: str) -> dict[str, list[float]]:
        """Seconds per iteration of each plan in each round, without the first round."""
        strategy = InTurns(plans, steps, rounds, **self.options)
        self.fit(strategy, lambda: strategy.turns is not None and strategy.turns.done, folder)
        assert strategy.turns is not None
        return {name: times[1:] for name, times in strategy.turns.times.items()}


# ------------------------------------------------------------------ MovieLens


class _Repeated(RatingDataset):
    """The dataset repeated 200 times, so that the epoch does not end during the benchmark."""

    def __len__(self) -> int:
        return 200 * super().__len__()

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return super().__getitems__([index % super(_Repeated, self).__len__() for index in indices])


class _LongMovieLens(MovieLensData):
    def train_dataloader(self) -> DataLoader[Batch]:
        features = self._described()
        rows = _Repeated(features, range(features.training_rows))
        return DataLoader(
            rows, batch_size=self.batch_size, shuffle=True, drop_last=True, collate_fn=lambda batch: batch
        )


def movielens() -> Workload:
    """The example with the options of ``make train``."""
    return Workload(MovieLensDLRM(learning_rate=5e-4, table_learning_rate=5e-3), _LongMovieLens(), {}, nodes=1)


# ------------------------------------------------------------------ many ids over a slow link

TABLES, WIDTH, ROWS, BATCH, HIDDEN, TIMES = 8, 8, 20_000, 256, 256, 10


class Pooled(pl.LightningModule):
    """Pooled tables and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, WIDTH, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(TABLES)]
        )
        self.first = nn.Linear(TABLES * WIDTH, HIDDEN)
        # One layer is used many times, so that the step is mostly compute and not the all-reduce of many gradients.
        self.again = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        hidden = torch.relu(self.first(self.tables(batch.sparse_features).values()))
        for _ in range(TIMES):
            hidden = hidden + torch.relu(self.again(hidden)) / TIMES
        logits = self.last(hidden).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class _Endless(IterableDataset[Batch]):
    def __init__(self, rank: int, pooling: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        keys = [f"f{i}" for i in range(TABLES)]
        self._batches = []
        for _ in range(8):
            lengths = torch.full((TABLES * BATCH,), pooling)
            ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
            labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
            self._batches.append(Batch(torch.zeros(BATCH, 1), KeyedJaggedTensor(keys, ids, lengths=lengths), labels))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self._batches


def pooled(pooling: int) -> Workload:
    """Batches with *pooling* ids for each table and row."""
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}}
    loader = DataLoader(_Endless(int(os.environ["RANK"]), pooling), batch_size=None)
    # Tables that are replicated on every rank would need no exchange.
    constraints = {f"t{i}": {"sharding_types": ["table_wise"]} for i in range(TABLES)}
    return Workload(
        Pooled(), loader, {"sparse_optimizer": optimizer, "sharding": {"constraints": constraints}}, nodes=2
    )


def calibrated(exchange: float, folder: str) -> tuple[Workload, str]:
    """Workload whose ids take about *exchange* times as long to exchange as the rest of a serial iteration.

    Returns:
        The workload, and a description with the measured times.
    """
    pooling = 30.0
    for _ in range(6):
        workload = pooled(round(pooling))
        seconds, task_seconds = serial_times(workload, folder)
        ids = sum(task_seconds[name] for name in EXCHANGE)
        ratio = ids / (seconds - ids)
        if abs(ratio / exchange - 1) < 0.2:
            break
        # More ids also lengthen the rest, and the exchange has a constant part.
        pooling = min(500.0, max(1.0, pooling * min(3.0, max(0.3, exchange / ratio))))
    return workload, f"{round(pooling)} ids per table and row: {1e3 * ids:.1f} ms exchange, {ratio:.2f} times the rest"


def serial_times(workload: Workload, folder: str, iterations: int = 15) -> tuple[float, dict[str, float]]:
    """Seconds of a serial iteration and of each of its tasks, as means of the ranks' medians."""
    strategy = RecsysPipelineStrategy("serial", **workload.options)
    begun: list[float] = []
    task_seconds: dict[str, float] = {}

    def over() -> bool:
        begun.append(time.perf_counter())
        if len(begun) == 5:
            strategy.start_trace()
        if len(begun) < iterations + 5:
            return False
        times: dict[str, list[float]] = {}
        for span in strategy.stop_trace():
            times.setdefault(span.task, []).append(span.end - span.start)
        steps = [later - earlier for earlier, later in pairwise(begun[4:])]
        values = {name: statistics.median(of_task) for name, of_task in times.items()} | {"": statistics.median(steps)}
        ranks: list[dict[str, float]] = [{}, {}]
        dist.all_gather_object(ranks, values)
        task_seconds.update({name: statistics.fmean(rank_times[name] for rank_times in ranks) for name in values})
        return True

    workload.fit(strategy, over, folder)
    return task_seconds.pop(""), task_seconds


# ------------------------------------------------------------------ measuring and printing


def compare(workload: Workload, description: str, options: argparse.Namespace, folder: str) -> None:
    """Find a plan, measure it against the others, and print the result."""
    begun = time.perf_counter()
    choice = workload.choice(folder)
    search_seconds = time.perf_counter() - begun
    plans: dict[str, Any] = {"auto": choice.plan, "auto again": choice.plan, **{name: name for name in BY_HAND}}
    times = workload.times(plans, options.steps, options.rounds, folder)
    if dist.get_rank():
        return
    rounds = options.rounds

    def median(name: str, indices: Sequence[int]) -> float:
        return statistics.median(times[name][index] for index in indices)

    def ratio(indices: Sequence[int]) -> float:
        return median("auto", indices) / min(median(name, indices) for name in BY_HAND)

    def noise(indices: Sequence[int]) -> float:
        return median("auto", indices) / median("auto again", indices)

    print(f"\n{description}")
    print(f"plan auto chose {choice.plan.name}, after {search_seconds:.0f} s")
    if choice.plan.name not in BY_HAND:
        print(choice.plan)
    best = min(median(name, range(rounds)) for name in BY_HAND)
    print(f"{'plan':<14}{'median':>10}{'quartiles':>20}{'/ best handwritten':>22}")
    for name, of_name in times.items():
        low, _, high = statistics.quantiles(of_name, n=4)
        middle = median(name, range(rounds))
        print(
            f"{name:<14}{1e3 * middle:>7.2f} ms{1e3 * low:>11.2f} - {1e3 * high:.2f} ms{middle / best:>19.3f}",
        )
    for name, statistic in (("auto / handwritten", ratio), ("auto / auto again", noise)):
        low, high = interval(statistic, rounds)
        print(f"{name:<22}{statistic(range(rounds)):.3f}  ({low:.3f} to {high:.3f})")
    sys.stdout.flush()


def run_rank(options: argparse.Namespace) -> None:
    """Run one of the two processes."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.workload == "movielens":
            compare(movielens(), "MovieLens, two processes", options, folder)
        else:
            for exchange in options.exchange:
                workload, description = calibrated(exchange, folder)
                compare(workload, f"{options.rate} each way, {description}", options, folder)
    dist.destroy_process_group()


def main() -> None:
    """Start two processes, or run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=("movielens", "slow"))
    parser.add_argument("--steps", type=int, default=20, help="timed iterations per block")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--exchange", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="slow: exchange / rest")
    parser.add_argument("--rate", default="200mbit", help="slow: rate of the link per direction, in tc's format")
    options = parser.parse_args()
    if options.workload == "slow" and "RANK" not in os.environ:
        with slow_link(options.rate) as link:
            link.run([sys.executable, "-m", "benchmarks.recsys_auto", *sys.argv[1:]], timeout=3600)
    else:
        run_rank(options)  # for MovieLens, Lightning starts the other process


if __name__ == "__main__":
    main()
