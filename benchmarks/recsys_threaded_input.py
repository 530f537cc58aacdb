"""Steps under the plan ``threaded_input`` against ``base`` and ``prefetch``, over a slow link and with a slow copy.

``python -m benchmarks.recsys_threaded_input`` trains the model of :mod:`recsys_model` on two ranks joined by a
rate-limited link (:mod:`slow_link`; requires root). The number of ids is set so that their exchange alone takes
``--exchange`` times as long as the rest of a step. Each copy of a batch to the device waits for ``--copy`` milliseconds
more, as a copy from pageable memory to a GPU makes the host wait: the thread sleeps and uses no core.

The pipelines alternate in blocks of steps, in a different order in each round (:mod:`recsys_turns`), and train the same
batches; the benchmark fails if their losses are not equal to the bit. ``base`` runs twice, which shows the noise. Times
are those of the slower rank, as medians over rounds, with 95 % intervals from a bootstrap over rounds.

Aims: without a slow copy, ``threaded_input`` is not slower than ``base`` by more than the noise of the run. With it,
``threaded_input`` is faster than both by at least half of the copy, which the other plans make on the main thread.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.figures import Figure, add_options, at_most, interval, save
from benchmarks.recsys_model import Batch
from benchmarks.recsys_slow_link import OtherSize, calibrate
from benchmarks.recsys_turns import Ours, Parts, Workload, add_workload_options
from benchmarks.slow_link import slow_link

PLANS = ("base", "prefetch", "threaded_input")
AGAIN = "base again"


@dataclass
class SlowBatch(Batch):
    """Batch whose copy makes the host wait.

    Attributes:
        wait: time that a copy takes in addition (seconds).
    """

    wait: float = 0.0

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        time.sleep(self.wait)
        return super().to(device, non_blocking)


def measure(workload: Workload, milliseconds: float, options: argparse.Namespace) -> list[Figure]:
    """Train under each plan with copies of *milliseconds*, print on rank 0, and return the figures."""
    workload.data[:] = [
        SlowBatch(batch.dense, batch.sparse, batch.label, milliseconds / 1e3) for batch in workload.data
    ]
    arms: dict[str, Ours] = {name: workload.of_ours(name) for name in PLANS} | {AGAIN: workload.of_ours("base")}
    draw = random.Random(0)  # the same on every rank
    for arm in arms.values():
        arm.turn()  # the first step finds out the inputs of the tables
        arm.restart()
    for _ in range(options.rounds):
        for name in draw.sample(list(arms), len(arms)):
            arms[name].turn()
    if len({tuple(entry.losses) for entry in arms.values()}) > 1:
        raise SystemExit(f"the plans have different losses: { ({name: entry.losses for name, entry in arms.items()}) }")

    def ratio(name: str, baseline: str, rounds: Sequence[int] | None = None) -> float:
        return arms[name].median(rounds) / arms[baseline].median(rounds)

    where = f"{options.rate}, exchange {options.exchange:g} x the rest, copy {milliseconds:g} ms"
    figures = []
    for reference in ("base", "prefetch"):
        compared = partial(ratio, "threaded_input", reference)
        spread = interval(compared, options.rounds)
        low, high = interval(partial(ratio, AGAIN, "base"), options.rounds)
        limit = max(1.0, high, 1 / low)
        if milliseconds:
            limit = 1 - milliseconds / 2e3 / arms[reference].median()
        figures.append(at_most(f"recsys step, {where}: threaded_input / {reference}", compared(), limit, spread))
    if dist.get_rank() == 0:
        print(f"\n{where}")
        for name, arm in arms.items():
            print(f"{name:<16}{1e3 * arm.median():>9.2f} ms per step")
        for figure in figures:
            low, high = figure.spread
            print(f"{figure.name}: {figure.value:.3f} ({low:.3f} .. {high:.3f}), aim {figure.target}")
        sys.stdout.flush()
    for arm in arms.values():
        arm.pipeline.close()
    return figures


def run_rank(options: argparse.Namespace) -> None:
    """Run one of the two processes."""
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload(options)
    workload.give(1)
    try:
        calibrate(Parts(workload), options.exchange)
    except OtherSize as error:  # raised on both ranks, because both compare the same times
        if dist.get_rank() == 0:
            print(f"no figures; try a quieter machine, a smaller --rate or other --times: {error}", flush=True)
        dist.barrier()
        os._exit(1)
    figures: list[Figure] = []
    for milliseconds in options.copy:
        figures += measure(workload, milliseconds, options)
        if dist.get_rank() == 0:
            save(figures, options.json)
    dist.barrier()
    os._exit(0)  # threads of closed pipelines may still wait


def main() -> None:
    """Start two processes, or run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser, times=60, rounds=8)
    parser.add_argument("--exchange", type=float, default=0.5, help="exchange of ids / rest of a step")
    parser.add_argument("--copy", type=float, nargs="+", default=[0.0, 5.0], help="ms that a copy takes in addition")
    add_options(parser)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    with slow_link(options.rate) as link:
        link.run([sys.executable, "-m", "benchmarks.recsys_threaded_input", *sys.argv[1:]], timeout=1800)


if __name__ == "__main__":
    main()
