"""How the cost of a step grows with the work: time and memory against batch size, tables, ranks, stages, micro-batches.

``OMP_NUM_THREADS=1 python -m benchmarks.growth`` starts 1, 2 and 4 ranks (Gloo over loopback), one world after the
other, and that twice. In each world the points of a curve take turns, round by round:

- a recommender (that of :mod:`recsys_model`, plan base, two ranks) with batches of more and more samples, and
  with more and more tables: milliseconds of a step, beside a line; the most bytes of live tensors that a rank made in a
  step, beside a line;
- the same on more and more ranks, as many samples on each: milliseconds that all ranks together have a core in a step,
  beside a line (every rank brings its own work, and with a second one messages begin); bytes of a rank, beside a
  constant;
- a transformer in more and more stages, one a rank, 1F1B, as many layers in all: milliseconds of a step, beside what a
  step of one stage takes, times the larger of ``(P - 1 + m) / (m P)`` for ``P`` ranks and ``m`` micro-batches and
  ``1 / cores``; bytes of activations that the first rank holds, beside a constant (``P`` micro-batches of a ``P``-th
  part of the layers);
- the same in two stages with more and more micro-batches, GPipe and 1F1B: the share of a step in which ranks are idle,
  beside ``(P - 1) / (m + P - 1)``; bytes of activations of the first rank, beside those of one micro-batch, times ``m``
  or the lesser of ``m`` and ``P``.

A figure is the worst deviation of a point (its median over rounds) from the curve: the ratio less 1, and for shares the
difference; with the 95 % interval over rounds. Lines are fitted by least squares of ratios. ``--picture`` is where all
of it is drawn.
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
from benchmarks.llm_bounds import Schedule, gather, pin, step
from benchmarks.llm_stages import loss_of, make_micro_batches, make_runner
from benchmarks.recsys_live_bytes import Copied, LiveStorages
from benchmarks.recsys_model import batches, ours
from lightning_pipe.llm.measure.live_bytes import LiveBytes
from lightning_pipe.llm.schedules.bubble import measure_step
from lightning_pipe.llm.schedules.named import SCHEDULES
from lightning_pipe.llm.schedules.simulation import actions_of
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline

BATCHES = (256, 512, 1024, 2048, 4096)
TABLES = (2, 4, 8, 16, 32)
RANKS = (1, 2, 4)
MICRO_BATCHES = (2, 4, 6, 8, 16)  # 1F1B takes as many as there are stages
STAGES_MICRO_BATCHES = 8
CPU = torch.device("cpu")
MEBIBYTE = 2**20


class Key(NamedTuple):
    """A point of a curve: what grows, what is looked at, and how large it is."""

    series: str
    quantity: str
    size: int


Points = dict[Key, list[float]]
Curve = Callable[[Sequence[int], Sequence[float]], list[float]]


@dataclass(frozen=True)
class Series:
    """A curve, and what it should be.

    Attributes:
        series: what grows, of what.
        quantity: what is looked at.
        unit: of it.
        across: what its axis says.
        expected: from sizes and medians, what these should be.
        curve: what that is called.
        share: whether it is a share, whose deviation is a difference.
        points: of each size, one number for each round.
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
        """Of each size, over all rounds or those given."""
        taken = (self.points[size] for size in self.sizes)
        return [statistics.median(one if rounds is None else [one[each] for each in rounds]) for one in taken]

    def worst(self, rounds: Sequence[int] | None = None) -> float:
        """The largest deviation of a point."""
        found = self.medians(rounds)
        wanted = self.expected(self.sizes, found)
        pairs = zip(found, wanted, strict=True)
        return max(abs(one - other) if self.share else abs(one / other - 1) for one, other in pairs)

    def exponent(self) -> float:
        """The slope between logarithms."""
        return float(np.polyfit(np.log(self.sizes), np.log(self.medians()), 1)[0])


# ------------------------------------------------------------------------------- curves


def line(sizes: Sequence[int], found: Sequence[float]) -> list[float]:
    slope, start = np.polyfit(sizes, found, 1, w=1 / np.asarray(found))
    return [float(start + slope * size) for size in sizes]


def constant(sizes: Sequence[int], found: Sequence[float]) -> list[float]:
    return [statistics.mean(found)] * len(sizes)


def of_stages(sizes: Sequence[int], found: Sequence[float]) -> list[float]:
    cores, m = len(os.sched_getaffinity(0)), STAGES_MICRO_BATCHES
    return [found[0] * max((m + ranks - 1) / (m * ranks), 1 / cores) for ranks in sizes]


def bubble(sizes: Sequence[int], found: Sequence[float]) -> list[float]:
    return [1 / (m + 1) for m in sizes]


def held_by_gpipe(sizes: Sequence[int], found: Sequence[float]) -> list[float]:
    return [found[0] * m / sizes[0] for m in sizes]


def held_by_1f1b(sizes: Sequence[int], found: Sequence[float]) -> list[float]:
    return [found[0] * min(m, 2) / min(sizes[0], 2) for m in sizes]


def all_series() -> list[Series]:
    """Without points."""
    made = []
    for name, across in (("recsys, batch size", "samples of a rank's batch"), ("recsys, tables", "tables")):
        made.append(Series(name, "time of a step", "ms", across, line, "line"))
        made.append(Series(name, "live bytes", "MiB", across, line, "line"))
    made += [
        Series("recsys, ranks", "core time of a step", "ms", "ranks", line, "line"),
        Series("recsys, ranks", "live bytes", "MiB", "ranks", constant, "constant"),
        Series("LLM, stages", "time of a step", "ms", "stages", of_stages, "theory: bubble and cores"),
        Series("LLM, stages", "activations held", "MiB", "stages", constant, "constant"),
    ]
    for name, held in (("gpipe", held_by_gpipe), ("1f1b", held_by_1f1b)):
        series = f"LLM, micro-batches, {name}"
        made.append(Series(series, "bubble", "share", "micro-batches", bubble, "(P - 1) / (m + P - 1)", share=True))
        of = "m micro-batches" if name == "gpipe" else "min(m, P) micro-batches"
        made.append(Series(series, "activations held", "MiB", "micro-batches", held, of))
    return made


# ------------------------------------------------------------------------- recommenders


class Recommender:
    """A model under the base plan."""

    def __init__(self, options: argparse.Namespace, batch: int, tables: int) -> None:
        sizes = {"batch": batch, "tables": tables, "rows": 20_000, "width": 64, "pooling": 10, "dense": 16}
        given = argparse.Namespace(**sizes, mlp=[256, 128])
        sharded, optimizer = ours(given, CPU, None)
        data = [Copied(one.dense, one.sparse, one.label) for one in batches(given, dist.get_rank(), False)]
        self._feed: Iterator[Any] = cycle(data)
        self._steps = options.steps
        self._pipeline = TrainPipeline(sharded, optimizer, CPU, plan="base")
        self.time()  # resolves the model, and fills the pipeline

    def time(self) -> tuple[float, float]:
        """Milliseconds of a step, and those in which ranks had a core, all together."""
        dist.barrier()
        used, start = time.process_time(), time.perf_counter()
        for _ in range(self._steps):
            self._pipeline.progress(self._feed)
        used = time.process_time() - used
        dist.barrier()
        taken = time.perf_counter() - start
        return 1e3 * max(gather(taken)) / self._steps, 1e3 * sum(gather(used)) / self._steps

    def bytes(self) -> float:
        """The most MiB of what was made, of any rank."""
        live = LiveStorages()
        with live.counting():
            for _ in range(4):  # what was in flight has been trained
                self._pipeline.progress(self._feed)
            live.peak = live.now
            for _ in range(8):
                self._pipeline.progress(self._feed)
        return max(gather(live.peak)) / MEBIBYTE

    def close(self) -> None:
        self._pipeline.close()


def recommenders(found: Points, options: argparse.Namespace) -> None:
    """Those of this world."""
    if dist.get_world_size() == 2:
        kinds = [("recsys, batch size", size, size, 8) for size in BATCHES]
        kinds += [("recsys, tables", count, 512, count) for count in TABLES]
    else:
        kinds = []
    kinds.append(("recsys, ranks", dist.get_world_size(), 512, 8))
    made = [(series, size, Recommender(options, batch, tables)) for series, size, batch, tables in kinds]
    for turn in range(options.rounds):
        for series, size, one in made if turn % 2 else reversed(made):
            taken, used = one.time()
            if series == "recsys, ranks":
                found[Key(series, "core time of a step", size)].append(used)
            found[Key(series, "time of a step", size)].append(taken)
    for series, size, one in made:
        found[Key(series, "live bytes", size)] += [one.bytes()] * options.rounds
        one.close()


# -------------------------------------------------------------------------- transformers


class Transformer:
    """One under a schedule, with as many micro-batches."""

    def __init__(self, options: argparse.Namespace, schedule: str, count: int) -> None:
        self._actions = actions_of(SCHEDULES[schedule], dist.get_world_size(), count)
        self._at_work = Schedule(*make_runner(schedule, options.width, 4))
        self._inputs = make_micro_batches(count, 2, 64)
        self.time()  # makes the schedule, and touches memory

    def time(self) -> tuple[float, float]:
        """Milliseconds of a step, and the share of it in which ranks did nothing."""
        taken, events = step(self._at_work, self._inputs, record=True)
        return 1e3 * max(gather(taken)), measure_step(gather(events), self._actions).measured

    def bytes(self) -> float:
        """The most MiB of activations that the first rank held."""
        with LiveBytes(self._at_work.stages) as live:
            self._at_work.runner.train(self._inputs, loss_of)
        held: list[int] = gather(max(sum(one.values()) for one in live.after_forwards))
        return held[0] / MEBIBYTE


def transformers(found: Points, options: argparse.Namespace) -> None:
    """Those of this world."""
    ranks = dist.get_world_size()
    made = [("LLM, stages", ranks, Transformer(options, "1f1b", STAGES_MICRO_BATCHES))]
    if ranks == 2:
        for name in ("gpipe", "1f1b"):
            series = f"LLM, micro-batches, {name}"
            made += [(series, count, Transformer(options, name, count)) for count in MICRO_BATCHES]
    for turn in range(options.rounds):
        for series, size, one in made if turn % 2 else reversed(made):
            taken, idle = one.time()
            found[Key(series, "time of a step", size)].append(taken)
            found[Key(series, "bubble", size)].append(idle)
    for series, size, one in made:
        found[Key(series, "activations held", size)] += [one.bytes()] * options.rounds


# ------------------------------------------------------------------------------- worlds


def world(rank: int, ranks: int, options: argparse.Namespace, folder: str) -> None:
    """A rank of a world; the first one leaves what was found."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: Points = defaultdict(list)
    recommenders(found, options)
    pin()
    transformers(found, options)
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(dict(found)))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> Points:
    """All worlds, one after the other, twice."""
    points: Points = defaultdict(list)
    for turn in range(2):
        for ranks in RANKS if turn else reversed(RANKS):
            with tempfile.TemporaryDirectory() as folder:
                # Forked: what was imported here is there, in all of them.
                mp.start_processes(world, (ranks, options, folder), nprocs=ranks, start_method="fork")
                found = pickle.loads(Path(folder, "found").read_bytes())
            for key, values in found.items():
                points[key] += values
    return points


def main() -> None:
    """Measure, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="of a recommender, in a round")
    parser.add_argument("--rounds", type=int, default=4, help="in each world, of which there are two of each size")
    parser.add_argument("--width", type=int, default=256, help="of the transformer")
    default = Path(__file__).parent / "results" / "growth.png"
    parser.add_argument("--picture", type=Path, default=default, help="PNG")
    add_options(parser)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    points = measure(options)
    figures, found = [], all_series()
    for one in found:
        one.points.update({key.size: values for key, values in points.items() if key[:2] == (one.series, one.quantity)})
        figures.append(show(one))
    save(figures, options.json)
    from benchmarks.growth_picture import draw  # a picture takes matplotlib

    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(found, options.picture)
    print(f"drawn to {options.picture}")


def show(one: Series) -> Figure:
    """Prints a curve; returns its figure."""
    rounds = len(one.points[one.sizes[0]])
    worst, spread = one.worst(), interval(one.worst, rounds)
    medians, wanted = one.medians(), one.expected(one.sizes, one.medians())
    print(
        f"\n{one.quantity} in {one.unit}, {one.series}; exponent {one.exponent():.2f}; {one.curve}: off by {worst:.3f}"
    )
    for head, row in (("", one.sizes), ("found", medians), ("curve", wanted)):
        print(f"{head:>8}" + "".join(f"{value:>10.4g}" for value in row))
    what = "difference" if one.share else "deviation"
    name = f"growth with {one.series}: {one.quantity}, worst {what} from {one.curve}"
    return Figure(name, worst, "share" if one.share else "ratio", spread)


if __name__ == "__main__":
    main()
