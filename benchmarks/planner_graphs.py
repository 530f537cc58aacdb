"""Synthetic task graphs for real: what the simulator says of plans, and what the planner's choice takes.

``python benchmarks/planner_graphs.py`` runs 30 random graphs whose tasks' durations are known: network, disk and copies
wait on a timer, compute runs a matrix product that was timed before, on no more lanes than there are cores. For each
graph the best plans that the planner finds, the serial plan and, for a small graph, the best plan of trying all run in
turns on the real pipeline, and the planner chooses by these measurements, as it does in training. Printed are

- the lower bound: the larger of the busiest resource and the slowest cycle of dependencies;
- the chosen plan's milliseconds per iteration, simulated and measured, and how far they are apart (aim: 10 %);
- how far the measured time is above the bound (aim: 5 %) and above that of the best of all plans;
- the same of all plans that were run, at the end.

Times are medians over rounds. A run during which other processes had more than 3 % of the machine is repeated, up to
five times, where the system says how much they had (Linux); the last column counts the runs that stayed disturbed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import torch

from lightning_pipe.engine import PipelinePlan, PlanError, SWPipeline, TaskSchedule
from lightning_pipe.engine.plan_bound import lower_bound
from lightning_pipe.engine.plan_choice import choose_plan
from lightning_pipe.engine.planner import exhaustive_plans, find_plans
from lightning_pipe.engine.simulation import simulate
from tests.engine.synthetic import Graph, Kernel, random_graph

EXHAUSTIVE_TASKS = 5
CANDIDATES = 3
WARM_UP = 3
DISTURBED, REPEATS = 0.03, 5
HEADS = ("bound", "simulated", "measured", "apart", "over bound", "over best", "serial", "disturbed")


def main() -> None:
    """Run the graphs and print the table."""
    options = argparse.ArgumentParser(description="what the planner's plans take on random synthetic task graphs")
    options.add_argument("--first", type=int, default=0, help="seed of the first graph")
    options.add_argument("--graphs", type=int, default=30)
    options.add_argument("--rounds", type=int, default=6, help="6 or more: with fewer no plan can be chosen")
    options.add_argument("--iterations", type=int, default=8, help="of a plan in a round")
    given = options.parse_args()
    torch.set_num_threads(1)
    kernel = Kernel()
    print(f"one pass of the kernel takes {kernel.seconds_per_pass * 1e6:.1f} us; times are in milliseconds")
    print(f"{'graph':9}{'tasks':>6}{'cores':>6}{'depth':>6}" + "".join(f"{head:>11}" for head in HEADS))
    apart: list[float] = []
    over: list[float] = []
    over_best: list[float] = []
    for seed in range(given.first, given.first + given.graphs):
        graph = random_graph(seed, kernel=kernel)
        kernel.calibrate()
        _run_graph(graph, given.rounds, given.iterations, apart, over, over_best)
    for what, values, aim in (
        ("simulated and measured time of every plan that was run", apart, 0.10),
        ("the chosen plan over the bound", over, 0.05),
        ("the chosen plan over the best of all plans", over_best, 0.05),
    ):
        if values:
            within = sum(value <= aim for value in values)
            middle, worst = statistics.median(values), max(values)
            print(f"{what}: within {aim:.0%} {within} of {len(values)}, median {middle:.1%}, worst {worst:.1%}")


def _run_graph(
    graph: Graph, rounds: int, iterations: int, apart: list[float], over: list[float], over_best: list[float]
) -> None:
    """Print a graph's row and note its figures."""
    candidates = find_plans(graph.tasks, graph.costs, graph.limits, graph.machine, keep=CANDIDATES)
    serial = PipelinePlan([(task, TaskSchedule()) for task in graph.tasks], name="serial")
    best = _best_of_all(graph)
    medians: dict[str, float] = {}
    disturbed = 0

    def measure(plans: Sequence[PipelinePlan]) -> list[list[float]]:
        nonlocal disturbed
        plans = [*plans, *best]
        times: list[list[float]] = [[] for _ in plans]
        for _ in range(rounds):
            for plan, taken in zip(plans, times, strict=True):
                seconds, quiet = _quiet_run(plan, iterations)
                taken.append(seconds)
                disturbed += not quiet
        for plan, taken in zip(plans, times, strict=True):
            medians[plan.name] = statistics.median(taken)
            said = simulate(plan, graph.costs, graph.machine).seconds_per_iteration
            apart.append(abs(medians[plan.name] / said - 1))
        return times[: len(plans) - len(best)]

    chosen = choose_plan(candidates, measure, [serial]).plan
    simulated = simulate(chosen, graph.costs, graph.machine).seconds_per_iteration
    measured = medians[chosen.name]
    bound = lower_bound(graph.tasks, graph.costs, graph.limits.max_in_flight, graph.machine).seconds
    over.append(measured / bound - 1)
    over_best += [measured / medians[plan.name] - 1 for plan in best]
    row = [f"{seconds * 1e3:.2f}" for seconds in (bound, simulated, measured)]
    row += [f"{measured / simulated - 1:.1%}", f"{over[-1]:.1%}", f"{over_best[-1]:.1%}" if best else ""]
    row += [f"{medians['serial'] * 1e3:.2f}", str(disturbed)]
    start = f"{graph.name:9}{len(graph.tasks):6}{graph.machine.cores:6g}{graph.limits.max_in_flight:6}"
    print(start + "".join(f"{cell:>11}" for cell in row), flush=True)


def _best_of_all(graph: Graph) -> list[PipelinePlan]:
    if len(graph.tasks) > EXHAUSTIVE_TASKS:
        return []
    try:
        return [exhaustive_plans(graph.tasks, graph.costs, graph.limits, graph.machine).plan]
    except PlanError:
        return []  # too many


def _quiet_run(plan: PipelinePlan, iterations: int) -> tuple[float, bool]:
    """Seconds per iteration of a run that others left alone, or of the last that was tried; and whether they did."""
    for _ in range(REPEATS):
        with SWPipeline(plan) as pipeline:
            data = repeat(None)
            for _ in range(WARM_UP):
                pipeline.progress(data)
            others, own, begin = _all_busy(), time.process_time(), time.perf_counter()
            for _ in range(iterations):
                pipeline.progress(data)
            seconds = time.perf_counter() - begin
            used = _all_busy() - others - (time.process_time() - own)
        if used <= DISTURBED * seconds * (os.cpu_count() or 1):
            return seconds / iterations, True
    return seconds / iterations, False


def _all_busy() -> float:
    """Seconds for which the machine's cores were busy so far, together; 0 where the system does not say."""
    try:
        user, nice, system, _, _, interrupts, soft, steal, *_ = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        )
    except OSError:
        return 0.0
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
