"""Dynamic tables over a store 20 times their cache: effect of the prefetch, and cost of the lookup of slots.

``OMP_NUM_THREADS=1 python -m benchmarks.dynamic_embeddings`` trains several copies of a model in one process. The
copies alternate in blocks of batches, in a different order in each round: under the base plan and the prefetch plans
with a cache for a twentieth of the store's rows, and with all rows in memory. Ids follow Zipf's law. Reads of the store
wait for the time of a disk (``--latency`` per record, ``--readers`` in parallel), because the system's file cache would
otherwise hide it. Batches are created in advance. Aims: prefetch / base at most 0.70, and prefetch / all in memory at
most 1.15, both under the same plan. With ``--part lookup`` it measures the forward of the lookup of slots against a
plain ``EmbeddingBag`` with the same number of rows (aim: at most 1.2), and the map from ids to slots with all rows
cached (aim: at most 25 ns per id).

``--dense`` and ``--width`` set the number and the width of the layers of the dense part. The printed waiting time for
the store's reads is the time that the prefetch can hide.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.figures import Figure, add_options, at_most, quartiles, save
from benchmarks.slow_store import SlowStore
from lightning_pipe.recsys import ShardedModel, TrainPipeline, shard_model
from lightning_pipe.recsys.dynamic.tables import create_row_tables
from lightning_pipe.recsys.dynamic.tables.id_mixing import mix_ids
from lightning_pipe.recsys.modules.dynamic_modules import DynamicEmbeddingBagCollection, DynamicTable

AHEAD = 3  # batches that the deepest plan works ahead
CPU = torch.device("cpu")
OPTIMIZER = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": 0.05}}
TWO_AHEAD = Path(__file__).with_name("prefetch_two_ahead.yaml")
SPREAD = 0x5851F42D4C957F2D  # an odd factor, which spreads the ids over int64


@dataclass
class Batch:
    """A batch whose ``features`` have one key, with a bag for each row."""

    features: KeyedJaggedTensor
    label: Tensor


class Model(nn.Module):
    """One table with a tower of dense layers."""

    def __init__(self, store: Path, cache_rows: int, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = DynamicTable(name="things", embedding_dim=options.dim, feature_names=["item"], cache_rows=cache_rows)
        self.bags = DynamicEmbeddingBagCollection([table], store, seed=1, existing_rows="keep")
        widths = [options.dim, *[options.width] * options.dense]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.tower = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = self.tower(self.bags(batch.features).values())[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.label)
        return loss, loss.detach()


def main() -> None:
    """Run the requested part."""
    parser = argparse.ArgumentParser(description="dynamic tables over a store")
    parser.add_argument("--part", choices=("plans", "lookup"), default="plans")
    parser.add_argument("--rows", type=int, default=400_000, help="rows in the store")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=512, help="rows per batch")
    parser.add_argument("--bag", type=int, default=20, help="ids per bag")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--dense", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--latency", type=float, default=100e-6, help="waiting time of a record's read in seconds")
    parser.add_argument("--readers", type=int, default=16, help="records read in parallel")
    parser.add_argument("--block", type=int, default=12, help="batches per block")
    parser.add_argument("--rounds", type=int, default=9)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=0, world_size=1)
        figures = (plans if options.part == "plans" else lookup)(Path(folder), options)
        dist.destroy_process_group()
    save(figures, options.json)


# ---------------------------------------------------------------------- plans


class Ids:
    """Random ids that follow Zipf's law over a fixed number of ids, drawn by inversion."""

    def __init__(self, rows: int, exponent: float) -> None:
        weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
        self._ends = np.cumsum(weights / weights.sum())
        self._draw = np.random.default_rng(0)
        self._rows = rows

    def draw(self, number: int) -> Tensor:
        indices = np.searchsorted(self._ends, self._draw.random(number)).clip(max=self._rows - 1)
        return torch.from_numpy(indices.astype(np.int64)) * SPREAD


def batch(ids: Ids, options: argparse.Namespace) -> Batch:
    lengths = torch.full((options.batch,), options.bag)
    features = KeyedJaggedTensor(["item"], ids.draw(options.batch * options.bag), lengths=lengths)
    return Batch(features, torch.randint(0, 2, (options.batch,)).float())


def fill(sharded: ShardedModel, rows: int) -> None:
    """Look up and train every id once, so that the store has all rows."""
    (tables,) = sharded.dynamic_rows.values()
    (cache,) = tables.caches.values()

    for first in range(0, rows, cache.capacity // 4):
        keys = mix_ids(torch.arange(first, min(rows, first + cache.capacity // 4)) * SPREAD)
        ticket = cache.prefetch(keys)
        cache.begin_batch_and_count_ids(ticket, tables.next_step())
        cache.end_trained(ticket)
    tables.commit()


class Arm:
    """A model under a plan."""

    def __init__(self, name: str, plan: str | Path, folder: Path, cache_rows: int, options: argparse.Namespace) -> None:
        self.name = name
        world = dist.group.WORLD
        assert world is not None
        model = Model(folder / name, cache_rows, options)
        self.sharded = shard_model(model, device=CPU, group=world, sparse_optimizer=OPTIMIZER)
        fill(self.sharded, options.rows)
        dense = torch.optim.SGD([parameter for _, parameter in self.sharded.dense_parameters()], lr=0.01)
        self.pipeline = TrainPipeline(self.sharded, dense, CPU, plan, options={"rewrite": {"method": "direct"}})
        self.times: list[float] = []
        self.losses: list[Tensor] = []

    @property
    def cache(self) -> Any:
        (tables,) = self.sharded.dynamic_rows.values()
        return next(iter(tables.caches.values()))

    def turn(self, batches: Sequence[Batch]) -> float:
        """Seconds per batch. The pipeline is full when the timing starts and when it ends."""
        data = iter([*batches, *batches[:AHEAD]])
        for _ in range(AHEAD):
            self.pipeline.progress(data)
        begin = time.perf_counter()
        for _ in range(len(batches) - AHEAD):
            self.pipeline.progress(data)
        seconds = (time.perf_counter() - begin) / (len(batches) - AHEAD)
        while True:
            try:
                loss = self.pipeline.progress(data)
            except StopIteration:
                self.losses.append(loss)
                return seconds


def plans(folder: Path, options: argparse.Namespace) -> list[Figure]:
    reads: list[float] = []

    def slow(*arguments: Any, **named: Any) -> Any:
        def wait(seconds: float) -> None:
            if reads:
                reads[0] += seconds
                time.sleep(seconds)

        return SlowStore(open_store(*arguments, **named), 0.0, options.latency / options.readers, wait)

    open_store = create_row_tables.open_store
    small = options.rows // 20
    with mock.patch.object(create_row_tables, "open_store", slow):
        arms = [
            Arm("base", "base", folder, small, options),
            Arm("prefetch", "prefetch", folder, small, options),
            Arm("early prefetch", "early_prefetch", folder, small, options),
            Arm("two ahead", TWO_AHEAD, folder, small, options),
            Arm("all in memory", "early_prefetch", folder, options.rows + small, options),
        ]
    ids = Ids(options.rows, options.zipf)
    draw = random.Random(0)
    reads.append(0.0)
    before = [arm.cache.stats for arm in arms]
    waited: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(options.rounds + 1):
        batches = [batch(ids, options) for _ in range(options.block)]
        for arm in draw.sample(arms, len(arms)):
            reads[0] = 0.0
            step_time = arm.turn(batches)
            if turn:
                arm.times.append(step_time)
                waited[arm.name].append(reads[0] / (options.block + AHEAD))
    losses = [torch.stack(arm.losses) for arm in arms]
    assert all(torch.equal(loss, losses[0]) for loss in losses), "the losses differ"
    print(
        f"{options.rows} rows of {options.dim} numbers in the store, {small} in the cache, batches of {options.batch} x"
        f" {options.bag} ids, Zipf {options.zipf}"
    )
    for arm, start in zip(arms, before, strict=True):
        stats = arm.cache.stats
        missing = 1 - (stats.hits - start.hits) / max(1, stats.ids - start.ids)
        low, middle, high = statistics.quantiles(arm.times, n=4)
        print(
            f"{arm.name:14} {middle * 1e3:8.1f} ms per batch ({low * 1e3:.1f} .. {high * 1e3:.1f}); ids not cached"
            f" {missing:.3f}; reads wait {statistics.median(waited[arm.name]) * 1e3:.1f} ms per batch"
        )
    figures = []
    for name, reference, aim in (
        ("prefetch", "base", 0.70),
        ("prefetch", "all in memory", 1.15),
        ("early prefetch", "base", 0.70),
        ("early prefetch", "all in memory", 1.15),
        ("two ahead", "base", 0.70),
        ("two ahead", "all in memory", 1.15),
    ):
        times, reference_times = (
            next(arm.times for arm in arms if arm.name == arm_name) for arm_name in (name, reference)
        )
        ratios = [a / b for a, b in zip(times, reference_times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name} / {reference}: {middle:.3f} ({low:.3f} .. {high:.3f}), aim at most {aim}")
        figures.append(at_most(f"dynamic tables: step, {name} / {reference}", middle, aim, (low, high)))
    for arm in arms:
        arm.pipeline.close()
        arm.sharded.close()
    return figures


# ---------------------------------------------------------------------- lookup


def lookup(folder: Path, options: argparse.Namespace) -> list[Figure]:
    world = dist.group.WORLD
    assert world is not None
    model = Model(folder / "rows", options.rows, options)
    sharded = shard_model(model, device=CPU, group=world, sparse_optimizer=OPTIMIZER)
    fill(sharded, options.rows)
    (tables,) = sharded.dynamic_rows.values()
    cache = tables.caches["things"]
    plain = nn.EmbeddingBag(options.rows, options.dim, mode="sum")
    ids = Ids(options.rows, options.zipf)
    kernel: Any = next(iter(sharded.sharded_modules.values()))._lookups[0]
    times: dict[str, list[float]] = {"EmbeddingBag": [], "slots": [], "slots, training": [], "ids to slots": []}
    count = options.batch * options.bag
    offsets = torch.arange(0, count + 1, options.bag)

    for _ in range(options.rounds * 5):
        drawn = ids.draw(count)
        mixed = mix_ids(drawn)
        begin = time.perf_counter()
        ticket = cache.prefetch(mixed)
        times["ids to slots"].append((time.perf_counter() - begin) / count * 1e9)
        cache.end_untrained(ticket)
        steps: dict[str, Callable[[KeyedJaggedTensor], Any]] = {
            "EmbeddingBag": lambda features: plain(features.values(), offsets[:-1]),
            "slots": kernel,
        }
        steps["slots, training"] = steps["slots"]
        for name in random.sample(list(steps), len(steps)):
            # Each arm looks up other rows, because rows that were just read are in the processor's cache.
            rows = cache.prefetch(mix_ids(ids.draw(count)))
            lengths = offsets.diff()
            features = KeyedJaggedTensor(["item"], rows.slots, offsets=offsets, lengths=lengths, stride=options.batch)
            with torch.set_grad_enabled(name.endswith("training")):
                begin = time.perf_counter()
                steps[name](features)
                times[name].append(time.perf_counter() - begin)
            cache.end_untrained(rows)
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        unit, scale = ("ns an id", 1.0) if name == "ids to slots" else ("us", 1e6)
        print(f"{name:16} {middle * scale:9.1f} {unit} ({low * scale:.1f} .. {high * scale:.1f})")
    ratios = [a / b for a, b in zip(times["slots"], times["EmbeddingBag"], strict=True)]
    print(f"slots / EmbeddingBag: {statistics.median(ratios):.3f}, aim at most 1.2; ids to slots, aim at most 25 ns")
    sharded.close()
    spent = times["ids to slots"]
    return [
        at_most("dynamic tables: lookup of slots / EmbeddingBag", statistics.median(ratios), 1.2, quartiles(ratios)),
        at_most(
            "dynamic tables: ids to slots, all cached", statistics.median(spent), 25.0, quartiles(spent), "ns an id"
        ),
    ]


if __name__ == "__main__":
    main()
