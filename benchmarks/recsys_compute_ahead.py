"""Steps of a recommender over a slow link, with lookups in two parts (``compute_ahead``) and without.

``python -m benchmarks.recsys_compute_ahead --rate 200mbit`` trains two ranks joined by a rate-limited link
(:mod:`slow_link`; requires root): sequence tables sharded by rows (20 ids per table and sample) and pooled tables
sharded by table (5 ids), with uniform ids and by Zipf's law (:func:`draw_ids`).

- Ours: base, prefetch, fused_sparse_dist, compute_ahead, and semi_sync, which is stale.
- "all rows ahead" is compute_ahead without the rows that wait, so that it is stale, too: the limit of what a lookup
  ahead of the previous batch's update can gain. On a CPU, semi_sync waits for its rows before the step goes on.
- TorchRec's: ``TrainPipelineSparseDist``, and for sequences ``TrainPipelinePEC`` without its CUDA events.

The pipelines alternate in blocks of steps, in a different order in each round (:mod:`recsys_turns`). Times are those of
the slower rank. The benchmark fails if exact pipelines of ours differ in a loss.

Aims: compute_ahead gains at least three quarters of what semi_sync gains over base, and of what all rows ahead gain,
where these gain anything beyond noise; its step is at most 1.03 times as long as that of base.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import os
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.pec_train_pipeline import TrainPipelinePEC
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from benchmarks.figures import Figure, add_options, interval, median_ratio, save
from benchmarks.recsys_model import EPS, RATE, Batch, batches, seed_tables
from benchmarks.recsys_turns import CPU, FILL, Deep, Ours, Training
from benchmarks.recsys_wire import Sequences
from benchmarks.slow_link import slow_link
from lightning_pipe.callbacks.timeline_picture import TimelinePanel, draw_timelines
from lightning_pipe.engine.observe.timeline import Timeline, task_bars
from lightning_pipe.recsys import TrainPipeline, shard_model
from lightning_pipe.recsys.rewrite.divided_lookup import NewestBatchRows

EXACT = ("base", "prefetch", "fused_sparse_dist", "compute_ahead")
ALL_AHEAD = "all rows ahead (stale)"
LAWS = ("uniform", "zipf")
BATCHES = 8
_WARM_UP = 2  # rounds that do not count, in which modules that send little ahead are found


class DeepSequences(Sequences):
    """Sequence tables, and as many hidden layers as in :class:`~benchmarks.recsys_turns.Deep`."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.mlp = Deep(options).mlp


class PECSequences(DeepSequences):
    """The same in the module that TorchRec computes ahead."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.tables = PECEmbeddingCollection(self.tables)


def draw_ids(data: list[Batch], rows: int, law: str) -> None:
    """Replace the ids of batches by uniform ones or, in a random order of rows, by Zipf's law with exponent 1.1."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    shares = torch.arange(1, rows + 1, dtype=torch.float64) ** (-1.1 if law == "zipf" else 0.0)
    places = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for batch in data:
        ids = batch.sparse.values()
        ids.copy_(places[torch.multinomial(shares, ids.numel(), replacement=True, generator=generator)])


class AheadRace:
    """All pipelines for one kind of tables and ids.

    Args:
        options: options of the command line.
        sequences: True for sequence tables sharded by rows, False for pooled tables sharded by table.
        law: distribution of the ids.
    """

    def __init__(self, options: argparse.Namespace, sequences: bool, law: str) -> None:
        self.options = copy.copy(options)
        self.options.pooling = 20 if sequences else 5
        self.data = batches(self.options, dist.get_rank(), False)[:BATCHES]
        draw_ids(self.data, options.rows, law)
        self._kind: Callable[[argparse.Namespace], nn.Module] = DeepSequences if sequences else Deep
        self._sequences = sequences
        self.arms: dict[str, Training] = {plan: self._ours(plan) for plan in (*EXACT, "semi_sync")}
        self.arms["base again"] = self._ours("base")
        self.arms[ALL_AHEAD] = self._all_ahead()
        self.arms["TorchRec's SparseDist"] = self._theirs(TrainPipelineSparseDist, self._kind)
        if sequences:
            self.arms["TorchRec's PEC"] = self._theirs(TrainPipelinePEC, PECSequences)
        for arm in self.arms.values():
            arm.turn()  # the first step finds out the inputs of the tables

    def _plan(self, tables: Any, sharder: Any) -> ShardingPlan:
        names = [f"table{index}" for index in range(self.options.tables)]
        placed = {
            name: row_wise(compute_kernel="fused") if self._sequences else table_wise(index % 2, compute_kernel="fused")
            for index, name in enumerate(names)
        }
        module_plan = construct_module_sharding_plan(
            tables, placed, sharder=sharder, world_size=2, local_size=1, device_type="cpu"
        )
        return ShardingPlan(plan={"tables": module_plan})

    def _ours(self, plan: str) -> Ours:
        torch.manual_seed(1)
        model = self._kind(self.options)
        sharder: Any = EmbeddingCollectionSharder() if self._sequences else EmbeddingBagCollectionSharder()
        assert dist.group.WORLD is not None
        sharded = shard_model(
            model,
            device=CPU,
            group=dist.group.WORLD,
            sparse_optimizer={"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}},
            sharding_plan=self._plan(self._kind(self.options).tables, sharder),
        )
        seed_tables(sharded.dmp)
        dense = torch.optim.SGD([parameter for _, parameter in sharded.dense_parameters()], lr=RATE)
        return Ours(sharded, TrainPipeline(sharded, dense, CPU, plan=plan), self.data, self.options.steps)

    def _all_ahead(self) -> Ours:
        arm = self._ours("compute_ahead")
        progress = arm._progress

        def progress_without_late_rows(source: Iterator[Batch]) -> Any:
            with mock.patch.object(NewestBatchRows, "replace", _none_shared):
                return progress(source)

        arm._progress = progress_without_late_rows
        return arm

    def _theirs(self, pipeline: Any, kind: Callable[[argparse.Namespace], nn.Module]) -> Training:
        torch.manual_seed(1)
        model: Any = kind(self.options)
        sharder: Any = EmbeddingCollectionSharder() if self._sequences else EmbeddingBagCollectionSharder()
        if pipeline is TrainPipelinePEC:
            sharder = PECEmbeddingCollectionSharder()
        apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": RATE, "eps": EPS})
        plan = self._plan(kind(self.options).tables, sharder)
        dmp = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
        seed_tables(dmp)
        dense = KeyedOptimizerWrapper(
            {name: parameter for name, parameter in dmp.named_parameters() if "tables" not in name},
            lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        )
        optimizer = CombinedOptimizer([dmp.fused_optimizer, dense])
        with mock.patch("torch.cuda.Event", mock.MagicMock):
            progress = pipeline(dmp, optimizer, CPU).progress

        def run(source: Iterator[Batch]) -> Any:
            with (
                mock.patch("torch.cpu.current_stream", return_value=mock.MagicMock()),
                mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
            ):
                return progress(source)

        return Training(dmp, run if pipeline is TrainPipelinePEC else progress, self.data, self.options.steps)

    def timeline_of(self, plan: str) -> TimelinePanel:
        """Timeline of three steps of this rank under a plan."""
        arm = self.arms[plan]
        assert isinstance(arm, Ours)
        pipeline = arm.pipeline.pipeline
        pipeline.start_trace()
        arm.turn()
        spans = pipeline.stop_trace()
        ends = sorted(span.end for span in spans if span.task == "OptimStep")[FILL : FILL + 4]
        milliseconds = 1e3 * (ends[-1] - ends[0]) / (len(ends) - 1)
        timeline = Timeline(task_bars(spans, dist.get_rank()), pipeline.plan.dependencies)
        return TimelinePanel(f"{plan}: {milliseconds:.0f} ms a step", timeline, ends)

    def run(self) -> dict[str, list[float]]:
        """Seconds per step of all pipelines by round."""
        order = random.Random(0)  # the same on every rank
        for arm in self.arms.values():
            arm.restart()
        for _ in range(self.options.rounds + _WARM_UP):
            for name in order.sample(list(self.arms), len(self.arms)):
                self.arms[name].turn()
        losses = {name: self.arms[name].losses for name in (*EXACT, "base again")}
        if any(of_plan != losses["base"] for of_plan in losses.values()):
            raise SystemExit(f"exact plans have other losses: {losses}")
        return {name: arm.times[_WARM_UP:] for name, arm in self.arms.items()}

    def shares_ahead(self) -> tuple[float, float]:
        """Share of the ids, and of the bags, that the batch before does not have on any rank, in these batches."""
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, [(batch.sparse.values(), batch.sparse.lengths()) for batch in self.data])
        ids, bags = [], []
        for before, batch in zip(range(BATCHES), range(1, BATCHES), strict=False):
            for index in range(self.options.tables):
                seen = torch.cat([_ids_of(gathered[rank][before], index, self.options.tables)[0] for rank in (0, 1)])
                for rank in (0, 1):
                    values, lengths = _ids_of(gathered[rank][batch], index, self.options.tables)
                    new = ~torch.isin(values, seen)
                    ids.append(new)
                    bags.append(torch.segment_reduce(new.double(), "min", lengths=lengths, initial=1.0) > 0)
        return torch.cat(ids).double().mean().item(), torch.cat(bags).double().mean().item()


def _ids_of(batch: tuple[torch.Tensor, torch.Tensor], index: int, tables: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, lengths = batch
    by_table = lengths.view(tables, -1)
    start = int(by_table[:index].sum())
    return values[start : start + int(by_table[index].sum())], by_table[index]


def _none_shared(self: NewestBatchRows, features: KeyedJaggedTensor) -> torch.Tensor:
    return torch.zeros(features.values().numel(), dtype=torch.bool)


def show(where: str, times: dict[str, list[float]], shares: tuple[float, float]) -> list[Figure]:
    """Print the times, and return the figures."""
    print(f"\n{where}: ahead {shares[0]:.1%} of ids, {shares[1]:.1%} of bags")
    base = times["base"]
    for name, of_name in times.items():
        ratio, (low, high) = median_ratio(of_name, base)
        middle = 1e3 * statistics.median(of_name)
        print(f"{name:<28}{middle:>9.2f} ms   / base {ratio:.3f} ({low:.3f} .. {high:.3f})")
    ratio, spread = median_ratio(times["compute_ahead"], base)
    figures = [Figure(f"{where}: compute_ahead / base", ratio, "ratio", spread, "<= 1.03", ratio <= 1.03)]

    def gain(name: str, rounds: Sequence[int]) -> float:
        return statistics.median(base[index] - times[name][index] for index in rounds)

    def share(stale: str, rounds: Sequence[int]) -> float:
        return gain("compute_ahead", rounds) / max(1e-9, gain(stale, rounds))

    rounds = range(len(base))
    for stale in ("semi_sync", ALL_AHEAD):
        low, high = interval(partial(gain, stale), len(base))
        print(f"{stale} gains {1e3 * low:.2f} to {1e3 * high:.2f} ms", end="")
        if low > 0:
            gained, spread = share(stale, rounds), interval(partial(share, stale), len(base))
            print(f"; compute_ahead {gained:.2f} ({spread[0]:.2f} .. {spread[1]:.2f}) of that", end="")
            figures.append(
                Figure(
                    f"{where}: gain of compute_ahead / of {stale}", gained, "ratio", spread, ">= 0.75", gained >= 0.75
                )
            )
        print()
    sys.stdout.flush()
    return figures


def run_rank(options: argparse.Namespace) -> None:
    """Run one of the two processes."""
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures: list[Figure] = []
    for kind, law in itertools.product(options.kinds, options.laws):
        race = AheadRace(options, kind == "sequences", law)
        times, shares = race.run(), race.shares_ahead()
        panels = [race.timeline_of(plan) for plan in ("base", "compute_ahead")]
        for arm in race.arms.values():
            if isinstance(arm, Ours):
                arm.pipeline.close()
        if dist.get_rank() == 0:
            figures += show(f"{options.rate}, {kind}, {law}", times, shares)
            save(figures, options.json)
            if options.picture is not None and (kind, law) == ("sequences", "uniform"):
                draw_timelines(panels, options.picture)
    dist.barrier()
    os._exit(0)  # pipeline threads still wait for batches


def main() -> None:
    """Start two processes, or run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="rate of the link per direction, in tc's format")
    parser.add_argument("--kinds", nargs="*", default=["sequences", "pooled"], choices=("sequences", "pooled"))
    parser.add_argument("--laws", nargs="*", default=list(LAWS), choices=LAWS)
    for name, default, help_text in (
        ("tables", 4, ""),
        ("rows", 100_000, "rows per table"),
        ("width", 32, "width of the rows"),
        ("batch", 256, "samples per rank"),
        ("dense", 16, "number of dense features"),
        ("times", 60, "number of times that the hidden layer is applied"),
        ("steps", 5, "timed steps per block"),
        ("rounds", 8, "rounds that count"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
    parser.add_argument("--mlp", type=int, nargs=1, default=[128], help="width of the MLP")
    parser.add_argument(
        "--picture", type=Path, help="also draw the timelines of base and compute_ahead, of uniform sequences"
    )
    add_options(parser)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    with slow_link(options.rate) as link:
        link.run([sys.executable, "-m", "benchmarks.recsys_compute_ahead", *sys.argv[1:]], timeout=1800)


if __name__ == "__main__":
    main()
