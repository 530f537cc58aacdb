"""Steps of a recommender over a slow link: this project's pipelines against TorchRec's, and against the lower bound.

``python -m benchmarks.recsys_slow_link --rate 200mbit`` trains the model of :mod:`recsys_model` on two ranks joined by
a rate-limited link (:mod:`slow_link`; requires root). The number of ids is set so that their exchange alone, X, takes
0.5, 1 and 2 times as long as the rest of a step, F+B. No step can be shorter than the longer of the two.

- X: the three tasks of the input exchange, batch after batch, without other work.
- F+B: serial steps on batches whose ids were exchanged in advance, so that the time is measured and not a difference of
  two times. The time of the serial step less X, which should be about the same, is also printed.
- Ours: serial, base, prefetch, ``ids_behind_lookup.yaml``, and the best plan that the planner finds for the times of
  the serial plan's tasks. All of these plans are exact.
- TorchRec's: ``TrainPipelineBase``, ``TrainPipelineSparseDist`` and ``TrainPipelineSparseDistLite``, and
  ``TrainPipelineSparseDist`` a second time, which shows the noise.

All pipelines train the same batches with the same table-wise sharding, and the benchmark fails if their losses are not
equal to the bit. All send ids as int64, and X is the exchange of int64. Two of our pipelines also run "as shipped":
this project sends ids as int32 if all ids fit, which halves the bytes. Their separate figures may be below 0.

The pipelines alternate in blocks of steps, in a different order in each round. No batch is in flight at the start and
the end of a block, and the steps that fill and drain a pipeline are not timed. After a first round, which is discarded,
pipelines that are much slower than the fastest of their family are left out. Times are those of the slower rank, as
medians over rounds. "Ours" and "TorchRec's" are the pipelines with the smallest median in each family. Intervals come
from a bootstrap over rounds, which selects the fastest pipelines again in each sample.

Aims: (ours - bound) / (TorchRec's - bound), with bound = max(F+B, X), is at most 0.3 if X is 1 or 2 times F+B. If X is
half of F+B, ours is not slower than TorchRec's by more than the noise of the run. If the measured X / (F+B) differs
from the requested one by more than a quarter, that size has no figure. The exit status is 1 if no size has a figure.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDistLite

from benchmarks.figures import Figure, add_options, at_most, interval, quartiles, save
from benchmarks.recsys_turns import CPU, Arm, Ours, Parts, Training, Workload, add_workload_options
from benchmarks.slow_link import slow_link
from lightning_pipe.recsys.tasks.auto_plan import propose_plans

BEHIND_LOOKUP = Path(__file__).with_name("ids_behind_lookup.yaml")
BY_HAND: dict[str, str | Path] = {
    "serial": "serial",
    "base": "base",
    "prefetch": "prefetch",
    BEHIND_LOOKUP.stem: BEHIND_LOOKUP,
}
SHIPPED = (BEHIND_LOOKUP.stem, "base")
TORCHREC_PIPELINES = (TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineSparseDistLite)
AGAIN = f"{TrainPipelineSparseDist.__name__} again"
# A pipeline that is slower than the fastest of its family by this factor in the first round is left out.
BEHIND = 1.2
# Maximum relative difference between the measured and the requested X / (F+B) for a figure.
OFF = 0.25


class OtherSize(Exception):
    """The measured X / (F+B) differs too much from the requested one for a figure."""


def calibrate(parts: Parts, exchange_ratio: float) -> None:
    """Set the number of ids in the batches so that X is about *exchange_ratio* times F+B.

    Raises:
        OtherSize: no such number was found.
    """
    tried: dict[int, float] = {}
    pooling = 16
    while len(tried) < 7 and pooling not in tried:
        exchange, forward_backward = parts.give(pooling)
        measured = tried[pooling] = exchange / forward_backward
        if abs(measured / exchange_ratio - 1) < 0.04:
            return
        # The exchange has a constant part, and more ids also lengthen the rest.
        pooling = max(1, round(pooling * min(4.0, max(0.25, exchange_ratio / measured))))
    pooling, measured = min(tried.items(), key=lambda entry: abs(math.log(entry[1] / exchange_ratio)))
    if abs(measured / exchange_ratio - 1) > OFF:
        raise OtherSize(
            f"exchange {exchange_ratio:g} x the rest: the closest of the numbers of ids tried is {pooling}:"
            f" {measured:.2f}"
        )
    parts.give(pooling)


@dataclass(frozen=True)
class Result:
    """Result of a race.

    Args:
        times: seconds per step of each arm, by round.
        project: names of this project's pipelines.
        shipped: names of this project's pipelines as shipped.
        torchrec: names of TorchRec's pipelines.
        fastest: fastest of this project's pipelines.
        serial: seconds per step of the serial plan in the discarded round.
    """

    times: dict[str, list[float]]
    project: list[str]
    shipped: list[str]
    torchrec: list[str]
    fastest: Ours
    serial: float

    @property
    def rounds(self) -> int:
        return len(self.times["X"])

    def median(self, name: str, rounds: Sequence[int] | None = None) -> float:
        """Median time of an arm over the given rounds (default: all)."""
        times = self.times[name]
        return statistics.median(times if rounds is None else [times[index] for index in rounds])

    def best(self, names: Sequence[str], rounds: Sequence[int] | None = None) -> float:
        return min(self.median(name, rounds) for name in names)

    def bound(self, rounds: Sequence[int] | None = None) -> float:
        """Lower bound on the time of a step."""
        return max(self.median("X", rounds), self.median("F+B", rounds))

    def over_bound(self, names: Sequence[str], rounds: Sequence[int] | None = None) -> float:
        """Excess over the bound of the fastest of *names*, as a share of the excess of TorchRec's fastest."""
        excess = self.best(self.torchrec, rounds) - self.bound(rounds)
        return (self.best(names, rounds) - self.bound(rounds)) / excess if excess > 0 else math.inf

    def against(self, names: Sequence[str], rounds: Sequence[int] | None = None) -> float:
        return self.best(names, rounds) / self.best(self.torchrec, rounds)

    def noise(self, rounds: Sequence[int] | None = None) -> float:
        """Ratio of one of TorchRec's pipelines to its second run."""
        return self.median(AGAIN, rounds) / self.median(TrainPipelineSparseDist.__name__, rounds)

    def show(self) -> None:
        bound = self.bound()
        print(f"{'ms per step':<32}{'median':>9}{'quartiles':>18}{'/ bound':>14}")
        for name, times in self.times.items():
            low, high = quartiles(times)
            middle = self.median(name)
            print(f"{name:<32}{1e3 * middle:>9.2f}{1e3 * low:>9.2f} -{1e3 * high:>7.2f}{middle / bound:>14.3f}")


class Race:
    """Runs all pipelines, alternating.

    Args:
        workload: model and batches that they train.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._parts = Parts(workload)
        self._by_hand = {name: workload.of_ours(plan) for name, plan in BY_HAND.items()}
        self._shipped = {f"{name} as shipped": workload.of_ours(BY_HAND[name], "auto") for name in SHIPPED}
        self._torchrec = {kind.__name__: workload.of_theirs(kind) for kind in TORCHREC_PIPELINES}
        self._again = workload.of_theirs(TrainPipelineSparseDist)
        self._draw = random.Random(0)  # the same on every rank
        self._proposed: Ours | None = None
        for arm in (*self._by_hand.values(), *self._shipped.values(), *self._torchrec.values(), self._again):
            arm.turn()  # the first step of a pipeline finds out the inputs of the tables

    def run(self, exchange_ratio: float, rounds: int) -> Result:
        """Run all pipelines on batches whose exchange takes *exchange_ratio* times as long as the rest of a step.

        Args:
            exchange_ratio: requested X / (F+B).
            rounds: number of rounds that count.
        """
        calibrate(self._parts, exchange_ratio)
        torchrec_arms, again, shipped = dict(self._torchrec), {AGAIN: self._again}, dict(self._shipped)
        trained: dict[str, Training] = {
            "F+B": self._parts.forward_backward,
            **self._by_hand,
            **shipped,
            **torchrec_arms,
            **again,
        }
        for training in trained.values():
            training.restart()
        project_arms = dict(self._by_hand)
        if self._proposed is not None:
            self._proposed.pipeline.close()
        if proposed := self._find():
            proposed.turn()
            proposed.restart()
            project_arms["found"] = trained["found"] = proposed
        self._proposed = proposed
        self._turns(trained, 1)
        serial_step = self._by_hand["serial"].times[-1]
        for family in (project_arms, shipped, torchrec_arms):
            fastest = min(entry.times[-1] for entry in family.values())
            for name in [name for name, entry in family.items() if entry.times[-1] > BEHIND * fastest]:
                if name != TrainPipelineSparseDist.__name__:
                    del family[name]
        arms: dict[str, Arm] = {
            "X": self._parts.exchange,
            "F+B": self._parts.forward_backward,
            **project_arms,
            **shipped,
            **torchrec_arms,
            **again,
        }
        for arm in arms.values():
            arm.times.clear()
        self._turns(arms, rounds)
        longest = max((entry.losses for entry in trained.values()), key=len)
        for name, training in trained.items():
            if training.losses != longest[: len(training.losses)]:
                raise SystemExit(f"{name} has other losses: expected {longest}, got {training.losses}")
        times = {name: list(arm.times) for name, arm in arms.items()}
        return Result(
            times,
            list(project_arms),
            list(shipped),
            list(torchrec_arms),
            min(project_arms.values(), key=Arm.median),
            serial_step,
        )

    def _turns(self, arms: Mapping[str, Arm], rounds: int) -> None:
        for _ in range(rounds):
            for name in self._draw.sample(list(arms), len(arms)):
                arms[name].turn()

    def _find(self) -> Ours | None:
        """Variant of the handwritten plans that is predicted to be the fastest, or None without variants."""
        serial = self._by_hand["serial"]
        task_seconds, beside = serial.own_times()
        by_hand = [arm.pipeline.pipeline.plan for arm in self._by_hand.values()]
        plans = propose_plans(by_hand, task_seconds, beside, max_in_flight=3, peers=True, device=CPU, max_plans=1)
        return self._workload.of_ours(plans[0]) if plans else None


def measure(race: Race, exchange_ratio: float, options: argparse.Namespace) -> list[Figure]:
    """Run, print on rank 0, and return the figures.

    Raises:
        OtherSize: the measured X / (F+B) differs too much from *exchange_ratio*.
    """
    result = race.run(exchange_ratio, options.rounds)
    shown = dist.get_rank() == 0
    exchange, forward_backward = result.median("X"), result.median("F+B")
    where = f"{options.rate}, exchange {exchange_ratio:g} x the rest"
    if shown:
        ids = options.tables * options.batch * options.pooling
        print(f"\n{where}: {ids} ids per rank and step, X / (F+B) = {exchange / forward_backward:.2f}")
        result.show()
        print(f"serial step less X: {1e3 * (result.serial - exchange):.2f}")
        plan = result.fastest.pipeline.pipeline.plan
        print(f"our fastest: {plan.name}, {' '.join(f'{name}+{plan.schedule[name].stage}' for name in plan.order)}")
        sys.stdout.flush()
    if abs(exchange / forward_backward / exchange_ratio - 1) > OFF:
        raise OtherSize(f"{where}: it took {exchange / forward_backward:.2f} x the rest")
    figures = []
    for label, names in (("ours", result.project), ("ours as shipped", result.shipped)):
        if exchange_ratio < 1:
            low, high = interval(result.noise, result.rounds)
            limit = max(1.0, high, 1 / low)
            ratio, spread = result.against(names), interval(partial(result.against, names), result.rounds)
            name = f"recsys step over {where}: {label} / TorchRec's best"
            figures.append(Figure(name, ratio, "ratio", spread, f"<= 1 within noise ({limit:.3f})", ratio <= limit))
        else:
            name = f"recsys step over {where}: ({label} - bound) / (TorchRec's best - bound)"
            spread = interval(partial(result.over_bound, names), result.rounds)
            figures.append(at_most(name, result.over_bound(names), 0.3, spread))
    if shown:
        for figure in figures:
            low, high = figure.spread
            print(f"{figure.name}: {figure.value:.3f} ({low:.3f} .. {high:.3f}), aim {figure.target}")
        sys.stdout.flush()
    return figures


def run_rank(options: argparse.Namespace) -> None:
    """Run one of the two processes."""
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload(options)
    workload.give(1)
    race = Race(workload)
    figures: list[Figure] = []
    left_out: list[str] = []
    for exchange_ratio in options.exchange:
        try:
            figures += measure(race, exchange_ratio, options)
        except OtherSize as error:  # raised on both ranks, because both compare the same times
            left_out.append(str(error))
        if dist.get_rank() == 0:  # saved now, because a later size may fail
            save(figures, options.json)
    if left_out and dist.get_rank() == 0:
        print(
            "no figures; try a quieter machine, a smaller --rate or other --times:", *left_out, sep="\n  ", flush=True
        )
    dist.barrier()
    os._exit(1 if left_out and not figures else 0)  # pipeline threads still wait for batches


def main() -> None:
    """Start two processes, or run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_options(parser, times=100, rounds=6)
    parser.add_argument("--exchange", type=float, nargs="*", default=[0.5, 1.0, 2.0], help="X / (F+B)")
    add_options(parser)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    with slow_link(options.rate) as link:
        link.run([sys.executable, "-m", "benchmarks.recsys_slow_link", *sys.argv[1:]], timeout=1800)


if __name__ == "__main__":
    main()
