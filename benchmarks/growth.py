"""Growth of a step's time and memory with batch size, tables, ranks, stages and micro-batches.

``OMP_NUM_THREADS=1 python -m benchmarks.growth`` starts worlds of 1, 2 and 4 ranks (Gloo over loopback) one after the
other, twice. In each world the points of a curve alternate in each round. The curves, with the reference that each is
compared with:

- a recommender (that of :mod:`recsys_model`, plan base, two ranks) with a growing number of samples per batch, and with
  a growing number of tables: milliseconds per step (a line), and peak bytes of live tensors that a rank created in a
  step (a line);
- the same recommender on a growing number of ranks, with the same number of samples on each: total core milliseconds of
  all ranks per step (a line: each rank adds its own work, and messages begin with the second rank), and bytes per rank
  (a constant);
- a transformer in a growing number of stages, one per rank, under 1F1B, with the same total number of layers:
  milliseconds per step (the step time of one stage, times the larger of ``(P - 1 + m) / (m P)`` for ``P`` ranks and
  ``m`` micro-batches and ``1 / cores``), and bytes of activations on the first rank (a constant: ``P`` micro-batches of
  a ``P``-th of the layers);
- the same transformer in two stages with a growing number of micro-batches, under GPipe and 1F1B: the idle share of a
  step (``(P - 1) / (m + P - 1)``), and bytes of activations on the first rank (those of one micro-batch, times ``m``
  for GPipe and ``min(m, P)`` for 1F1B).

A figure is the largest deviation of a point (its median over rounds) from the reference: the ratio minus 1, or the
difference for shares, with the 95 % interval over rounds. Lines are fitted by least squares of relative errors.
``--picture`` is the path of a plot of all curves.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.figures import Figure, add_options, interval, save
from benchmarks.forward_bytes import ForwardBytes
from benchmarks.llm_bounds import Schedule, gather, pin, step
from benchmarks.llm_stages import loss_of, make_micro_batches, make_runner
from benchmarks.recsys_live_bytes import Copied, LiveStorages
from benchmarks.recsys_model import batches, ours
from lightning_pipe.llm.schedules.bubble import compute_step_bubble
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.llm.schedules.specs import SCHEDULES
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline

BATCHES = (256, 512, 1024, 2048, 4096)
TABLES = (2, 4, 8, 16, 32)
RANKS = (1, 2, 4)
MICRO_BATCHES = (2, 4, 6, 8, 16)  # 1F1B needs at least one per stage
STAGES_MICRO_BATCHES = 8
CPU = torch.device("cpu")
MEBIBYTE = 2**20


class Key(NamedTuple):
    """A point of a curve: series, measured quantity, and size."""

    series: str
    quantity: str
    size: int


Points = dict[Key, list[float]]
Curve = Callable[[Sequence[int], Sequence[float]], list[float]]


@dataclass(frozen=True)
class Series:
    """A measured curve and its reference.

    Attributes:
        series: workload and growing size.
        quantity: measured quantity.
        unit: unit of the quantity.
        across: label of the horizontal axis.
        expected: function from sizes and medians to the reference values.
        curve: name of the reference.
        share: True if the quantity is a share, whose deviation is a difference (default False).
        points: for each size, one number per round.
    """

    series: str
    quantity: str
    unit: str
    across: str
    expected: Curve
    curve: str
    share: bool = False
    points: dict[int, list[float]] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        return sorted(self.points)

    def medians(self, rounds: Sequence[int] | None = None) -> list[float]:
        """Median of each size over the given rounds (default: all)."""
        points = (self.points[size] for size in self.sizes)
        return [
            statistics.median(values if rounds is None else [values[index] for index in rounds]) for values in points
        ]

    def worst(self, rounds: Sequence[int] | None = None) -> float:
        """Largest deviation of a point from the reference."""
        medians = self.medians(rounds)
        references = self.expected(self.sizes, medians)
        pairs = zip(medians, references, strict=True)
        return max(
            abs(median - reference) if self.share else abs(median / reference - 1) for median, reference in pairs
        )

    def exponent(self) -> float:
        """Exponent of the growth: the slope of the logarithms."""
        return float(np.polyfit(np.log(self.sizes), np.log(self.medians()), 1)[0])


# ------------------------------------------------------------------------------- curves


def line(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    slope, start = np.polyfit(sizes, values, 1, w=1 / np.asarray(values))
    return [float(start + slope * size) for size in sizes]


def constant(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    return [statistics.mean(values)] * len(sizes)


def of_stages(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    cores, m = len(os.sched_getaffinity(0)), STAGES_MICRO_BATCHES
    return [values[0] * max((m + ranks - 1) / (m * ranks), 1 / cores) for ranks in sizes]


def bubble(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    return [1 / (m + 1) for m in sizes]


def held_by_gpipe(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    return [values[0] * m / sizes[0] for m in sizes]


def held_by_1f1b(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    return [values[0] * min(m, 2) / min(sizes[0], 2) for m in sizes]


def all_series() -> list[Series]:
    """All curves, without points."""
    curves = []
    for name, across in (("recsys, batch size", "samples of a rank's batch"), ("recsys, tables", "tables")):
        curves.append(Series(name, "time of a step", "ms", across, line, "line"))
        curves.append(Series(name, "live bytes", "MiB", across, line, "line"))
    curves += [
        Series("recsys, ranks", "core time of a step", "ms", "ranks", line, "line"),
        Series("recsys, ranks", "live bytes", "MiB", "ranks", constant, "constant"),
        Series("LLM, stages", "time of a step", "ms", "stages", of_stages, "theory: bubble and cores"),
        Series("LLM, stages", "activations held", "MiB", "stages", constant, "constant"),
    ]
    for name, reference in (("gpipe", held_by_gpipe), ("1f1b", held_by_1f1b)):
        series = f"LLM, micro-batches, {name}"
        curves.append(Series(series, "bubble", "share", "micro-batches", bubble, "(P - 1) / (m + P - 1)", share=True))
        formula = "m micro-batches" if name == "gpipe" else "min(m, P) micro-batches"
        curves.append(Series(series, "activations held", "MiB", "micro-batches", reference, formula))
    return curves


# ------------------------------------------------------------------------- recommenders


class Recommender:
    """The recommender under the base plan."""

    def __init__(self, options: argparse.Namespace, batch: int, tables: int) -> None:
        sizes = {"batch": batch, "tables": tables, "rows": 20_000, "width": 64, "pooling": 10, "dense": 16}
        model_options = argparse.Namespace(**sizes, mlp=[256, 128])
        sharded, optimizer = ours(model_options, CPU, None)
        data = [Copied(item.dense, item.sparse, item.label) for item in batches(model_options, dist.get_rank(), False)]
        self._feed: Iterator[Any] = cycle(data)
        self._steps = options.steps
        self._pipeline = TrainPipeline(sharded, optimizer, CPU, plan="base")
        self.time()  # resolves the model, and fills the pipeline

    def time(self) -> tuple[float, float]:
        """Milliseconds per step, and total core milliseconds of all ranks per step."""
        dist.barrier()
        used, start = time.process_time(), time.perf_counter()
        for _ in range(self._steps):
            self._pipeline.progress(self._feed)
        used = time.process_time() - used
        dist.barrier()
        elapsed = time.perf_counter() - start
        return 1e3 * max(gather(elapsed)) / self._steps, 1e3 * sum(gather(used)) / self._steps

    def bytes(self) -> float:
        """Peak MiB of the tensors that any rank created."""
        live = LiveStorages()
        with live.counting():
            for _ in range(4):  # train the batches in flight
                self._pipeline.progress(self._feed)
            live.peak = live.current
            for _ in range(8):
                self._pipeline.progress(self._feed)
        return max(gather(live.peak)) / MEBIBYTE

    def close(self) -> None:
        self._pipeline.close()


def recommenders(points: Points, options: argparse.Namespace) -> None:
    """Measure the recommenders of this world."""
    if dist.get_world_size() == 2:
        kinds = [("recsys, batch size", size, size, 8) for size in BATCHES]
        kinds += [("recsys, tables", count, 512, count) for count in TABLES]
    else:
        kinds = []
    kinds.append(("recsys, ranks", dist.get_world_size(), 512, 8))
    arms = [(series, size, Recommender(options, batch, tables)) for series, size, batch, tables in kinds]
    for turn in range(options.rounds):
        for series, size, arm in arms if turn % 2 else reversed(arms):
            step_time, used = arm.time()
            if series == "recsys, ranks":
                points[Key(series, "core time of a step", size)].append(used)
            points[Key(series, "time of a step", size)].append(step_time)
    for series, size, arm in arms:
        points[Key(series, "live bytes", size)] += [arm.bytes()] * options.rounds
        arm.close()


# -------------------------------------------------------------------------- transformers


class Transformer:
    """The transformer under a schedule with a number of micro-batches."""

    def __init__(self, options: argparse.Namespace, schedule: str, count: int) -> None:
        self._actions = list_compute_actions(SCHEDULES[schedule], dist.get_world_size(), count)
        self._at_work = Schedule(*make_runner(schedule, options.width, 4))
        self._inputs = make_micro_batches(count, 2, 64)
        self.time()  # makes the schedule, and touches memory

    def time(self) -> tuple[float, float]:
        """Milliseconds per step, and the idle share of the ranks."""
        seconds, events = step(self._at_work, self._inputs, record=True)
        return 1e3 * max(gather(seconds)), compute_step_bubble(gather(events), self._actions).measured

    def bytes(self) -> float:
        """Peak MiB of activations on the first rank."""
        with ForwardBytes(self._at_work.stages) as live:
            self._at_work.runner.train(self._inputs, loss_of)
        peaks: list[int] = gather(max(sum(forward_bytes.values()) for forward_bytes in live.after_forwards))
        return peaks[0] / MEBIBYTE


def transformers(points: Points, options: argparse.Namespace) -> None:
    """Measure the transformers of this world."""
    ranks = dist.get_world_size()
    arms = [("LLM, stages", ranks, Transformer(options, "1f1b", STAGES_MICRO_BATCHES))]
    if ranks == 2:
        for name in ("gpipe", "1f1b"):
            series = f"LLM, micro-batches, {name}"
            arms += [(series, count, Transformer(options, name, count)) for count in MICRO_BATCHES]
    for turn in range(options.rounds):
        for series, size, arm in arms if turn % 2 else reversed(arms):
            step_time, idle = arm.time()
            points[Key(series, "time of a step", size)].append(step_time)
            points[Key(series, "bubble", size)].append(idle)
    for series, size, arm in arms:
        points[Key(series, "activations held", size)] += [arm.bytes()] * options.rounds


# ------------------------------------------------------------------------------- worlds


def world(rank: int, ranks: int, options: argparse.Namespace, folder: str) -> None:
    """Run one rank of a world. The first rank writes the measured points."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    points: Points = defaultdict(list)
    recommenders(points, options)
    pin()
    transformers(points, options)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(dict(points)))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> Points:
    """Run all worlds one after the other, twice."""
    points: Points = defaultdict(list)
    for turn in range(2):
        for ranks in RANKS if turn else reversed(RANKS):
            with tempfile.TemporaryDirectory() as folder:
                # Forked, so that the modules are imported once for all ranks.
                mp.start_processes(world, (ranks, options, folder), nprocs=ranks, start_method="fork")
                rank_points = pickle.loads(Path(folder, "found").read_bytes())
            for key, values in rank_points.items():
                points[key] += values
    return points


def main() -> None:
    """Measure, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of a recommender per round")
    parser.add_argument("--rounds", type=int, default=4, help="rounds in each of the two worlds of each size")
    parser.add_argument("--width", type=int, default=256, help="width of the transformer")
    default = Path(__file__).parent / "results" / "growth.png"
    parser.add_argument("--picture", type=Path, default=default, help="PNG file for the plot")
    add_options(parser)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    points = measure(options)
    figures, curves = [], all_series()
    for series in curves:
        series.points.update(
            {key.size: values for key, values in points.items() if key[:2] == (series.series, series.quantity)}
        )
        figures.append(show(series))
    save(figures, options.json)
    from benchmarks.growth_picture import draw  # imported here because it needs Matplotlib

    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, options.picture)
    print(f"drawn to {options.picture}")


def show(series: Series) -> Figure:
    """Print a curve and return its figure."""
    rounds = len(series.points[series.sizes[0]])
    worst, spread = series.worst(), interval(series.worst, rounds)
    medians, references = series.medians(), series.expected(series.sizes, series.medians())
    print(
        f"\n{series.quantity} in {series.unit}, {series.series}; exponent {series.exponent():.2f}; {series.curve}: off"
        f" by {worst:.3f}"
    )
    for head, row in (("", series.sizes), ("found", medians), ("curve", references)):
        print(f"{head:>8}" + "".join(f"{value:>10.4g}" for value in row))
    kind = "difference" if series.share else "deviation"
    name = f"growth with {series.series}: {series.quantity}, worst {kind} from {series.curve}"
    return Figure(name, worst, "share" if series.share else "ratio", spread)


if __name__ == "__main__":
    main()
