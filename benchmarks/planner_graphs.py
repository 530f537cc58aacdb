"""Execution of synthetic task graphs: accuracy of the simulator, and gain of the planner's choice over the serial plan.

``python -m benchmarks.planner_graphs`` runs 30 random graphs whose tasks have known durations: network, disk and copy
tasks wait on a timer, and compute tasks run a kernel until it has used a core for a given time, on at most one lane per
core. For each graph, the serial plan and the best variants that the planner makes of it alternate on the real pipeline.
One plan is chosen by these measurements, as in training. The output is

- simulated and measured milliseconds per iteration of the chosen plan, and their difference (aim: 10 %);
- measured milliseconds per iteration of the serial plan;
- a summary over all executed plans at the end.

Times are medians over rounds. Disturbed runs are repeated (see ``benchmarks/quiet.py``), and the last column counts
runs that stayed disturbed. With ``--seconds``, no further graph starts after that time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from itertools import repeat

from benchmarks.figures import Figure, add_options, at_most, quartiles, save
from benchmarks.quiet import QuietRuns
from lightning_pipe.engine import SWPipeline
from lightning_pipe.engine.planning.plan_choice import choose_measured_plan, max_generated_plans
from lightning_pipe.engine.planning.simulation import simulate
from tests.engine.synthetic import Graph, Kernel, random_graph

AIM = 0.1
WARM_UP = 3
HEADS = ("simulated", "measured", "error", "serial", "disturbed")


def main() -> None:
    """Run the graphs and print the table."""
    parser = argparse.ArgumentParser(description="times of the planner's plans on random synthetic task graphs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first graph")
    parser.add_argument("--graphs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no graph after this time")
    parser.add_argument("--rounds", type=int, default=6, help="at least 5; with fewer, no variant can be chosen")
    parser.add_argument("--iterations", type=int, default=8, help="iterations of a plan per round")
    parser.add_argument("--plans", action="store_true", help="also print every plan that was run")
    add_options(parser)
    options = parser.parse_args()
    kernel, quiet = Kernel(), QuietRuns()
    print("times are in milliseconds")
    print(f"{'graph':9}{'tasks':>6}{'cores':>6}{'depth':>6}" + "".join(f"{head:>11}" for head in HEADS))
    errors: list[float] = []
    begun = time.monotonic()
    for seed in range(options.first, options.first + options.graphs):
        if time.monotonic() - begun > options.seconds:
            break
        errors += _run_graph(random_graph(seed, kernel=kernel), quiet, options)
    within = sum(error <= AIM for error in errors)
    print(
        f"error of the simulation, all plans that were run: within {AIM:.0%} {within} of {len(errors)},"
        f" median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    )
    title, spread = "simulator: error of a synthetic graph's iteration", quartiles(errors)
    figures = [at_most(f"{title}, median", statistics.median(errors), AIM, spread)]
    save([*figures, Figure(f"{title}, worst", max(errors), "ratio", spread)], options.json)


def _run_graph(graph: Graph, quiet: QuietRuns, options: argparse.Namespace) -> list[float]:
    """Run a graph, print its row, and return the relative error of the simulation of each plan."""
    every = [graph.serial_plan(), *graph.variants(keep=max_generated_plans(options.rounds))]
    plans = {plan.name: plan for plan in every}
    disturbed_before = quiet.disturbed
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(options.rounds):
        for name, plan in plans.items():
            with SWPipeline(plan) as pipeline:
                times[name].append(quiet.run(partial(_seconds, pipeline, options.iterations)))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    simulated = {name: simulate(plan, graph.costs, graph.machine).seconds_per_iteration for name, plan in plans.items()}
    chosen = choose_measured_plan(times, ["serial"])
    row = [f"{seconds * 1e3:.2f}" for seconds in (simulated[chosen], medians[chosen])]
    row += [f"{medians[chosen] / simulated[chosen] - 1:.1%}", f"{medians['serial'] * 1e3:.2f}"]
    row.append(str(quiet.disturbed - disturbed_before))
    start = f"{graph.name:9}{len(graph.tasks):6}{graph.machine.cores:6g}{graph.max_in_flight:6}"
    print(start + "".join(f"{cell:>11}" for cell in row), flush=True)
    if options.plans:
        for name, plan in plans.items():
            label = f"  {name}: {len(plan.thread_group_names)} threads, {plan.pipeline_depth} in flight"
            times_of = f"{simulated[name] * 1e3:11.2f}{medians[name] * 1e3:11.2f}"
            print(f"{label:38}{times_of}{medians[name] / simulated[name] - 1:11.1%}", flush=True)
    return [abs(medians[name] / simulated[name] - 1) for name in plans]


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
