"""Execution of synthetic task graphs: accuracy of the simulator, and distance of the planner's choice from the bound.

``python -m benchmarks.planner_graphs`` runs 30 random graphs whose tasks have known durations: network, disk and copy
tasks wait on a timer, and compute tasks run a kernel until it has used a core for a given time, on at most one lane per
core. For each graph, the best plans that the planner finds, the serial plan and, for a small graph, the best of all
plans alternate on the real pipeline. One plan is chosen by these measurements, as in training. The output is

- the lower bound: the larger of the busiest resource and the slowest dependency cycle;
- simulated and measured milliseconds per iteration of the chosen plan, and their difference (aim: 10 %);
- the excess of the measured time over the bound (aim: 3 % for the median of all graphs) and over the time of the best
  of all plans;
- a summary over all executed plans at the end.

Times are medians over rounds. Disturbed runs are repeated (see ``benchmarks/quiet.py``), and the last column counts
runs that stayed disturbed. The figures are the median and the maximum of measured / bound over graphs. With
``--seconds``, no further graph starts after that time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

from benchmarks.figures import Figure, add_options, at_most, quartiles, save
from benchmarks.quiet import QuietRuns
from lightning_pipe.engine import PipelinePlan, PlanError, SWPipeline, TaskSchedule
from lightning_pipe.engine.planning.plan_bound import lower_bound
from lightning_pipe.engine.planning.plan_choice import fastest, most_found
from lightning_pipe.engine.planning.planner import PlanCandidate, find_plans
from lightning_pipe.engine.planning.simulation import simulate
from tests.engine.exhaustive import best_of_all
from tests.engine.synthetic import Graph, Kernel, random_graph

LIMIT = 1.03
EXHAUSTIVE_TASKS = 5
WARM_UP = 3
HEADS = ("bound", "simulated", "measured", "apart", "over bound", "over best", "serial", "disturbed")


@dataclass
class Figures:
    """Relative errors over all graphs.

    Attributes:
        apart: error of the simulation of each plan.
        over: excess of the chosen plan over the bound.
        over_best: excess of the chosen plan over the best of all plans.
    """

    apart: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)
    over_best: list[float] = field(default_factory=list)


def main() -> None:
    """Run the graphs and print the table."""
    options = argparse.ArgumentParser(description="times of the planner's plans on random synthetic task graphs")
    options.add_argument("--first", type=int, default=0, help="seed of the first graph")
    options.add_argument("--graphs", type=int, default=30)
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no graph after this time")
    options.add_argument("--rounds", type=int, default=6, help="at least 6; with fewer, no plan can be chosen")
    options.add_argument("--iterations", type=int, default=8, help="iterations of a plan per round")
    options.add_argument("--plans", action="store_true", help="also print every plan that was run")
    add_options(options)
    given = options.parse_args()
    kernel, quiet = Kernel(), QuietRuns()
    print("times are in milliseconds")
    print(f"{'graph':9}{'tasks':>6}{'cores':>6}{'depth':>6}" + "".join(f"{head:>11}" for head in HEADS))
    figures, begun = Figures(), time.monotonic()
    for seed in range(given.first, given.first + given.graphs):
        if time.monotonic() - begun > given.seconds:
            break
        graph = random_graph(seed, kernel=kernel)
        _run_graph(graph, quiet, given, figures)
    for what, values, aim in (
        ("error of the simulation, all plans that were run", figures.apart, 0.10),
        ("the chosen plan over the bound", figures.over, LIMIT - 1),
        ("the chosen plan over the best of all plans", figures.over_best, 0.05),
    ):
        if values:
            within = sum(value <= aim for value in values)
            middle, worst = statistics.median(values), max(values)
            print(f"{what}: within {aim:.0%} {within} of {len(values)}, median {middle:.1%}, worst {worst:.1%}")
    save(found_of(figures), given.json)


def found_of(figures: Figures) -> list[Figure]:
    """Figures of the median and the worst ratio over graphs."""
    ratios = [1 + over for over in figures.over]
    spread = quartiles(ratios) if len(ratios) > 1 else (ratios[0], ratios[0])
    what = "planner: measured iteration / bound of synthetic graphs"
    return [
        at_most(f"{what}, median", statistics.median(ratios), LIMIT, spread),
        Figure(f"{what}, worst", max(ratios), "ratio", spread),
    ]


def _run_graph(graph: Graph, quiet: QuietRuns, given: argparse.Namespace, figures: Figures) -> None:
    """Run a graph, print its row and add its figures."""
    found = find_plans(graph.tasks, graph.costs, graph.limits, graph.machine, keep=most_found(given.rounds))
    serial = PipelinePlan([(task, TaskSchedule()) for task in graph.tasks], name="serial")
    bound = lower_bound(graph.tasks, graph.costs, graph.limits.max_in_flight, graph.machine).seconds
    best = _best_of_all(graph, found[0], bound)
    every = [serial, *(candidate.plan for candidate in found)]
    plans = {plan.name: plan for plan in (*every, *([best] if best else []))}
    disturbed_before = quiet.disturbed
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(given.rounds):
        for name, plan in plans.items():
            with SWPipeline(plan) as pipeline:
                times[name].append(quiet.run(partial(_seconds, pipeline, given.iterations)))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    simulated = {name: simulate(plan, graph.costs, graph.machine).seconds_per_iteration for name, plan in plans.items()}
    figures.apart += [abs(medians[name] / simulated[name] - 1) for name in plans]
    chosen = fastest({plan.name: times[plan.name] for plan in every}, ["serial"])
    measured = medians[chosen]
    figures.over.append(measured / bound - 1)
    if best:
        figures.over_best.append(measured / medians[best.name] - 1)
    row = [f"{seconds * 1e3:.2f}" for seconds in (bound, simulated[chosen], measured)]
    row += [
        f"{measured / simulated[chosen] - 1:.1%}",
        f"{figures.over[-1]:.1%}",
        f"{figures.over_best[-1]:.1%}" if best else "",
    ]
    row += [f"{medians['serial'] * 1e3:.2f}", str(quiet.disturbed - disturbed_before)]
    start = f"{graph.name:9}{len(graph.tasks):6}{graph.machine.cores:6g}{graph.limits.max_in_flight:6}"
    print(start + "".join(f"{cell:>11}" for cell in row), flush=True)
    if given.plans:
        for name, plan in plans.items():
            what = f"  {name}: {len(plan.thread_groups)} threads, {plan.pipeline_depth} in flight"
            times_of = f"{simulated[name] * 1e3:11.2f}{medians[name] * 1e3:11.2f}"
            print(f"{what:38}{times_of}{medians[name] / simulated[name] - 1:11.1%}", flush=True)


def _best_of_all(graph: Graph, found: PlanCandidate, bound: float) -> PipelinePlan | None:
    """The best of all plans by simulation, or None if the graph has too many plans to try."""
    if len(graph.tasks) > EXHAUSTIVE_TASKS:
        return None
    if found.seconds <= bound * (1 + 1e-6):
        return found.plan  # no plan can be better
    try:
        return best_of_all(graph).plan
    except PlanError:
        return None


def _seconds(pipeline: SWPipeline, iterations: int) -> float:
    """Seconds per iteration."""
    data = repeat(None)
    for _ in range(WARM_UP):
        pipeline.progress(data)
    begin = time.perf_counter()
    for _ in range(iterations):
        pipeline.progress(data)
    return (time.perf_counter() - begin) / iterations


if __name__ == "__main__":
    main()
