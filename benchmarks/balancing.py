"""Benefit and cost of balancing samples between ranks, for histories of very different lengths.

``python -m benchmarks.balancing`` starts two ranks (Gloo over loopback, one thread each). The length of a sample's
history is drawn from a lognormal distribution. The model looks up the whole history and applies a small network to each
item, so that the cost of a sample is proportional to the length of its history. The same batches are trained in three
ways, which alternate in each round:

unbalanced
    without balancing;
balanced
    with a BatchBalancer, including its gather, partition and exchange;
perfect
    the same global batches, distributed in advance according to the partition: the same work without an exchange.

The output is the median and the quartiles of the slower rank's step times; the ratio of balanced to perfect (aim: at
most 1.10); the imbalance of the batches; and the time of partitioning 8 ranks x 4,096 samples (aim: at most 15 ms).
Another Python thread counts during the partition, to show how much the partition slows down other threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from benchmarks.figures import Figure, add_options, at_most, interval, quartiles, save
from lightning_pipe.recsys import TrainPipeline, shard_model
from lightning_pipe.recsys.balancing.partition import imbalance, partition_samples, sum_workloads_by_rank

LIMIT, PARTITION_LIMIT = 1.10, 15.0  # ratio, ms
WAYS = ("unbalanced", "balanced", "perfect")


@dataclass
class Batch:
    """Histories and labels of a rank's samples."""

    history: KeyedJaggedTensor
    label: torch.Tensor


class Model(nn.Module):
    """A network that is applied to each item of a history. The mean of its outputs is the sample's score."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="table", embedding_dim=options.width, num_embeddings=options.items, feature_names=["history"]
        )
        self.tables = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.over = nn.Sequential(
            nn.Linear(options.width, options.hidden), nn.ReLU(), nn.Linear(options.hidden, options.hidden), nn.ReLU()
        )
        self.score = nn.Linear(options.hidden, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        history = self.tables(batch.history)["history"]
        lengths = history.lengths()
        samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        items = self.score(self.over(history.values()))[:, 0]
        scores = torch.zeros(len(lengths)).index_add(0, samples, items) / lengths.clamp(min=1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), None


def histories(options: argparse.Namespace, ranks: int) -> list[np.ndarray[Any, Any]]:
    """Lengths of each global batch, ordered by rank."""
    random = np.random.default_rng(options.seed)
    drawn = random.lognormal(np.log(options.median), options.sigma, (options.batches, ranks * options.batch))
    return list(np.clip(drawn.round(), 1, options.longest).astype(np.int64))


def rank_batch(lengths: np.ndarray[Any, Any], samples: np.ndarray[Any, Any], options: argparse.Namespace) -> Batch:
    """Batch of a rank with these samples. The content of a sample does not depend on the rank."""
    ids = [
        torch.from_numpy(np.random.default_rng(int(sample)).integers(0, options.items, lengths[sample]))
        for sample in samples
    ]
    history = KeyedJaggedTensor(["history"], torch.cat(ids), lengths=torch.from_numpy(lengths[samples]))
    return Batch(history, torch.from_numpy(samples % 2).float())


def train(rank: int, ranks: int, options: argparse.Namespace, folder: str) -> None:
    """Train in all three ways, alternating, on one rank. Rank 0 prints and saves the figure."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    source = np.repeat(np.arange(ranks, dtype=np.int32), options.batch)
    data: dict[str, list[Batch]] = {"unbalanced": [], "perfect": []}
    for lengths in histories(options, ranks):
        for way, owner in {"unbalanced": source, "perfect": partition_samples(lengths, source, ranks)}.items():
            data[way].append(rank_batch(lengths, np.flatnonzero(owner == rank), options))
    data["balanced"] = data["unbalanced"]
    pipelines = {way: pipeline_of(options, way == "balanced") for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds + 1):
        for way in WAYS if turn % 2 else reversed(WAYS):
            seconds = round_of(pipelines[way], data[way])
            if turn:  # the first round builds the pipelines and warms up
                times[way] += seconds
    report = pipelines["balanced"].balance_report
    for pipeline in pipelines.values():
        pipeline.close()
    everyone: list[dict[str, list[float]]] = [{}] * ranks
    dist.all_gather_object(everyone, times)
    if rank == 0:
        save([show(everyone, report)], Path(folder, "figures"))
    dist.barrier()
    dist.destroy_process_group()


def pipeline_of(options: argparse.Namespace, balanced: bool) -> TrainPipeline:
    torch.manual_seed(1)
    constraints = {"table": {"sharding_types": ["row_wise"]}}
    optimizer = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": 0.05}}
    world = dist.group.WORLD
    assert world is not None
    cpu = torch.device("cpu")
    model = shard_model(Model(options), device=cpu, group=world, sparse_optimizer=optimizer, constraints=constraints)
    dense = torch.optim.SGD([parameter for _, parameter in model.dense_parameters()], lr=0.05)
    return TrainPipeline(model, dense, cpu, options.plan, balancer=balanced)


def round_of(pipeline: TrainPipeline, data: list[Batch]) -> list[float]:
    """Seconds of each step, without the first and last steps, in which the pipeline fills and drains."""
    feed, marks = iter(data), []
    dist.barrier()
    while True:
        try:
            pipeline.progress(feed)
        except StopIteration:
            break
        marks.append(time.perf_counter())
    steps = [end - begin for begin, end in pairwise(marks)]
    return steps[2:-3]


def show(everyone: list[dict[str, list[float]]], report: Any) -> Figure:
    """Print the table, and return the ratio of balanced to perfect with its interval over steps."""
    # The slower rank's time counts, because the other rank waits for it.
    steps = {
        way: [max(of_ranks) for of_ranks in zip(*(rank_steps[way] for rank_steps in everyone), strict=True)]
        for way in WAYS
    }
    medians = {way: statistics.median(seconds) for way, seconds in steps.items()}
    print(f"{'':<11}{'median':>10}{'quartiles':>20}{'to perfect':>12}")
    for way in WAYS:
        low, _, high = statistics.quantiles(steps[way], n=4)
        quartiles = f"{low * 1e3:.1f} - {high * 1e3:.1f} ms"
        print(f"{way:<11}{medians[way] * 1e3:>7.1f} ms{quartiles:>20}{medians[way] / medians['perfect']:>12.3f}")
    print(
        f"{len(steps['perfect'])} steps each; balanced / perfect {medians['balanced'] / medians['perfect']:.3f} (1.10)"
    )
    print(f"work of the slowest rank over the mean: {report.mean_before:.3f} before, {report.mean_after:.3f} after")

    def ratio(indices: Sequence[int]) -> float:
        balanced, perfect = (
            statistics.median(steps[way][index] for index in indices) for way in ("balanced", "perfect")
        )
        return balanced / perfect

    count = len(steps["perfect"])  # steps with the same index train the same batch
    name = "recsys step of skewed histories, balanced / dealt out beforehand"
    return at_most(name, ratio(range(count)), LIMIT, interval(ratio, count))


def partition_time(ranks: int, samples: int, repeats: int = 20) -> Figure:
    """Time of the partition. Also prints the speed of a counting thread during it, relative to its speed alone."""
    random = np.random.default_rng(0)
    workloads = random.lognormal(4, 1.2, ranks * samples).round()
    source = np.repeat(np.arange(ranks, dtype=np.int32), samples)
    assignment = partition_samples(workloads, source, ranks)
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        partition_samples(workloads, source, ranks)
        seconds.append(time.perf_counter() - begun)
    median = statistics.median(seconds)
    before, after = (imbalance(sum_workloads_by_rank(workloads, owners, ranks)) for owners in (source, assignment))
    print(f"partition of {ranks} x {samples:,}: {median * 1e3:.1f} ms (15), {before:.3f} -> {after:.4f}", end="; ")
    alone = counted(lambda: time.sleep(median * repeats))
    beside = counted(lambda: [partition_samples(workloads, source, ranks) for _ in range(repeats)])
    print(f"meanwhile a Python thread counts at {beside / alone:.0%} of its speed alone")
    spread = quartiles([1e3 * value for value in seconds])
    return at_most(f"partition of {ranks} x {samples} samples", 1e3 * median, PARTITION_LIMIT, spread, "ms")


def counted(body: Any) -> float:
    """Counts per second of another thread while *body* runs."""
    count, over = 0, threading.Event()

    def run() -> None:
        nonlocal count
        while not over.is_set():
            count += 1

    thread = threading.Thread(target=run)
    thread.start()
    begun = time.perf_counter()
    body()
    seconds, at_end = time.perf_counter() - begun, count
    over.set()
    thread.join()
    return at_end / seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plan", default="base")
    parser.add_argument("--batch", type=int, default=64, help="samples per rank")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--median", type=float, default=30.0, help="median of the history lengths")
    parser.add_argument("--sigma", type=float, default=2.0, help="standard deviation of the log lengths")
    parser.add_argument("--longest", type=int, default=4000)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser)
    options = parser.parse_args()
    figures = [partition_time(8, 4096)]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (options.ranks, options, folder), nprocs=options.ranks)
        figures += [Figure(**figure) for figure in json.loads(Path(folder, "figures").read_text(encoding="utf-8"))]
    save(figures, options.json)


if __name__ == "__main__":
    main()
