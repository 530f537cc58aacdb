"""Accuracy of TaskProfiler: exposed time of tasks whose true exposed time is known.

``python -m benchmarks.profiler_accuracy`` runs 30 random graphs whose tasks have known durations (see
``benchmarks/planner_graphs.py``) and profiles each task in the serial plan and in the best plan that the planner finds.
The true exposed time comes from the simulator: the time per iteration with the task's work, less the time without it.
In a serial plan without background work this is the task's duration.

For each plan, the output is the simulated and measured time per iteration, and the task with the largest error of its
exposed time, as a share of the simulated time per iteration (aim: 5 %). A summary over all plans follows. Disturbed
runs are repeated (see ``benchmarks/quiet.py``), and the last column counts runs that stayed disturbed.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import NamedTuple

from benchmarks.figures import Figure, add_options, quartiles, save
from benchmarks.quiet import QuietRuns
from lightning_pipe.engine import PipelinePlan, SWPipeline, TaskProfiler
from lightning_pipe.engine.planning.simulation import simulate
from tests.engine.synthetic import Graph, Kernel, random_graph

AIM = 0.05
HEADS = ("simulated", "measured", "error", "true", "found", "95 %", "disturbed")


class Error(NamedTuple):
    """Error of a task's exposed time as a share of the time per iteration, and the times in seconds."""

    part: float
    task: str
    true: float
    measured: float
    low: float
    high: float


def main() -> None:
    """Profile the graphs and print the table."""
    parser = argparse.ArgumentParser(description="TaskProfiler on random synthetic task graphs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first graph")
    parser.add_argument("--graphs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--iterations", type=int, default=12, help="iterations of a pipelined plan; a serial plan runs a third"
    )
    parser.add_argument("--tasks", action="store_true", help="print every task")
    add_options(parser)
    options = parser.parse_args()
    kernel, quiet = Kernel(), QuietRuns()
    print("times are in milliseconds")
    widths = f"{'graph':9}{'plan':9}{'tasks':>6}  {'furthest off':13}"
    print(widths + "".join(f"{head:>{17 if head == '95 %' else 10}}" for head in HEADS))
    errors_by_plan: dict[str, list[list[Error]]] = {"serial": [], "auto_1": []}
    for seed in range(options.first, options.first + options.graphs):
        graph = random_graph(seed, kernel=kernel)
        serial, (best,) = graph.serial_plan(), graph.variants(keep=1)
        for plan, iterations in ((serial, max(1, options.iterations // 3)), (best, options.iterations)):
            errors = _profile(graph, plan, quiet, options.rounds, iterations, options.tasks)
            errors_by_plan[plan.name].append(errors)
    for name, of_graphs in (*errors_by_plan.items(), ("both", [*errors_by_plan["serial"], *errors_by_plan["auto_1"]])):
        parts = [abs(error.part) for errors in of_graphs for error in errors]
        good = sum(all(abs(error.part) <= AIM for error in errors) for errors in of_graphs)
        print(
            f"{name}: within {AIM:.0%} of the time per iteration {sum(part <= AIM for part in parts)} of {len(parts)}"
            f" tasks, and all tasks of {good} of {len(of_graphs)} plans; median {statistics.median(parts):.1%}, worst"
            f" {max(parts):.1%}"
        )
    # `parts` is that of the last entry, both plans.
    middle, title = statistics.median(parts), "profiler: error of a task's exposed time / iteration"
    save([Figure(f"{title}, median", middle, "ratio", quartiles(parts), f"<= {AIM:g}", middle <= AIM)], options.json)


def _profile(
    graph: Graph, plan: PipelinePlan, quiet: QuietRuns, rounds: int, iterations: int, every: bool
) -> list[Error]:
    """Print one row for a plan, or one per task, and return the errors of all tasks."""
    truth = simulate(plan, graph.costs, graph.machine)
    seconds = truth.seconds_per_iteration
    disturbed_before = quiet.disturbed
    errors, measured = [], []
    with SWPipeline(plan) as pipeline:
        profiler = TaskProfiler(pipeline, [None], rounds=rounds, iterations=iterations)
        for name, true in truth.exposed.items():
            result = quiet.run(partial(profiler.profile_many, [name]))
            measured.append(result.seconds)
            profile = result.tasks[name]
            assert profile.exposed is not None and profile.low is not None and profile.high is not None
            errors.append(
                Error((profile.exposed - true) / seconds, name, true, profile.exposed, profile.low, profile.high)
            )
    worst = max(errors, key=lambda error: abs(error.part))
    for error in errors if every else [worst]:
        row = f"{graph.name:9}{plan.name:9}{len(graph.tasks):6}  {error.task:13}"
        row += f"{seconds * 1e3:10.2f}{statistics.median(measured) * 1e3:10.2f}{error.part:10.1%}"
        row += f"{error.true * 1e3:10.2f}{error.measured * 1e3:10.2f}"
        row += f"{error.low * 1e3:9.2f} ..{error.high * 1e3:5.2f}{quiet.disturbed - disturbed_before:10}"
        print(row, flush=True)
    return errors


if __name__ == "__main__":
    main()
