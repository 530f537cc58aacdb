"""The ``lightning-pipe plan`` commands, which print plans and predict their iteration times without running them."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from lightning_pipe.cli.plan_report import describe_assumed_cores, simulation_report
from lightning_pipe.engine import PipelinePlan, PlanError, PlanSpec, ProfileResult
from lightning_pipe.engine.common.quantities import parse_bandwidth, parse_duration
from lightning_pipe.engine.common.report_table import print_report
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.costs_yaml import CostsSpec, parse_costs_yaml
from lightning_pipe.engine.planning.network import NetworkModel
from lightning_pipe.engine.planning.prediction import find_scaling_break, predict_plan_performance
from lightning_pipe.engine.planning.simulation import simulate
from lightning_pipe.engine.plans.user_files import open_plan_file, prefix_plan_errors, read_text
from lightning_pipe.environment import import_torchrec
from lightning_pipe.llm.run.training_tasks import llm_plan
from lightning_pipe.loops.programs.default_program import build_plan_of_default_tasks
from lightning_pipe.pipe.plans import build_gpipe_and_1f1b_plans
from lightning_pipe.strategies.registry import STRATEGIES

_SIMULATE = """\
Predict the iteration time of each plan by simulation, from the costs of its tasks and the latency and bandwidth of a
network, for any number of ranks. Costs are either a profile.json written by the callback PipelineProfiler, preferably
under the serial plan, whose waits are not shortened by overlap, or YAML as described in docs/simulation.md.
"""
_EXAMPLES = """\
examples:
  lightning-pipe plan simulate serial base prefetch --costs profile.json
  lightning-pipe plan simulate base plan.yaml --costs costs.yaml --latency 5us --bandwidth 25GB/s --ranks 2,8,128,4096
"""
_IN_PROCESS = "in_process_pipeline"
_RANKS = (2, 8, 128, 4096)
_MOST_RANKS = 2**20
_PARTITIONS = 2  # number of partitions assumed to show the plans of a pipe, which depend on it


def main(arguments: Sequence[str]) -> None:
    """Run ``lightning-pipe plan``."""
    parser = argparse.ArgumentParser(
        prog="lightning-pipe plan", description="Show plans and predict their iteration times."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    show = commands.add_parser(
        "show",
        help="print a plan as a table and a timeline, or as YAML",
        description="Print a plan: a table of its tasks, and a timeline of the batch of each task in each period.",
    )
    show.add_argument("name", metavar="NAME", help="name of a strategy or plan, or path of a plan in YAML")
    show.add_argument("--format", choices=("table", "yaml"), default="table", help="default: table")
    show.set_defaults(run=_run_show)
    simulation = commands.add_parser(
        "simulate",
        help="predict the iteration times of plans, on 2 to 4,096 ranks",
        description=_SIMULATE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulation.add_argument("names", metavar="PLAN", nargs="+", help="one or more plans, named as for 'plan show'")
    simulation.add_argument("--costs", metavar="FILE", required=True, help="profile.json of PipelineProfiler, or YAML")
    simulation.add_argument(
        "--ranks",
        metavar="N,N",
        type=_parse_rank_counts,
        help="numbers of ranks, for costs with bytes; default: 2,8,128,4096",
    )
    simulation.add_argument("--latency", metavar="TIME", help="latency of a message between two ranks, such as 5us")
    simulation.add_argument(
        "--bandwidth", metavar="RATE", help="bandwidth of a rank's link in each direction, such as 25GB/s or 200mbit"
    )
    simulation.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    simulation.set_defaults(run=_run_simulate)
    options = parser.parse_args(arguments)
    options.run(options)


def _parse_rank_counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MOST_RANKS for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected a list of numbers from 1 to {_MOST_RANKS} such as 2,8,128, got {text!r}"
        )
    return sorted({int(part) for part in parts})


# ---------------------------------------------------------------------- plans


def _run_show(options: argparse.Namespace) -> None:
    plans = [find_plan_by_name(options.name)]
    if options.name == _IN_PROCESS and options.format == "table":
        plans = _make_in_process_plans()  # forward, backward, and one forward one backward
    print("\n".join(plan.to_yaml() if options.format == "yaml" else f"{plan}\n" for plan in plans), end="")


def _make_in_process_plans() -> list[PipelinePlan]:
    """Plans of a pipe with ``_PARTITIONS`` partitions."""

    def nothing(partition: int, ctx: object) -> None:
        """Placeholder, because tasks are only shown and not run."""

    return build_gpipe_and_1f1b_plans(_PARTITIONS, (), nothing, nothing, nothing)


def _identity(batch: object, *_: object) -> object:
    return batch


def find_plan_by_name(name: str) -> PipelinePlan:
    """Find a plan by name. Its tasks are placeholders that cannot run."""
    of_strategy = {entry.name: entry.plan for entry in STRATEGIES}
    plan_name = of_strategy.get(name, name)
    plain = {
        plan.name: plan
        for plan in (build_plan_of_default_tasks(_identity), llm_plan(_identity, _identity), *_make_in_process_plans())
    }
    if plan_name in plain:
        return plain[plan_name]
    if plan_name == "auto":
        raise PlanError(
            f"{name!r} has no fixed plan, because it chooses its plan during training. Pass the file that its option"
            " save_plan writes."
        )
    recsys = [plan for plan in dict.fromkeys(of_strategy.values()) if plan not in (*plain, "auto")]
    if plan_name in recsys:
        return _recsys_plan(plan_name)
    if not os.path.exists(plan_name):
        plans = [*plain, *recsys]
        close = difflib.get_close_matches(name, [*of_strategy, *plans], n=1)
        raise PlanError(
            f"Unknown plan {name!r}. Expected a strategy ({', '.join(of_strategy)}), a plan ({', '.join(plans)}), or"
            f" the path of a file.{f' Did you mean {close[0]}?' if close else ''}"
        )
    with open_plan_file(plan_name, [*plain, *recsys], "prefetch") as spec:
        for plan in plain.values():
            if spec.schedule.keys() == plan.tasks.keys():
                return PipelinePlan.from_spec(spec, plan.tasks.values())
        return _recsys_plan(spec)


def _recsys_plan(plan: str | PlanSpec) -> PipelinePlan:
    """Plan with a name, or of a spec. Tasks that only some models or plans have are enabled if the spec has them."""
    import_torchrec()  # lazy: other commands do not need it
    from lightning_pipe.recsys.plans.recsys_plans import BALANCING, PLANS, SYNC_REPLICAS, plan_of_spec
    from lightning_pipe.recsys.tasks.task_list import recsys_tasks

    spec = PLANS[plan] if isinstance(plan, str) else plan
    task_names = spec.schedule.keys()
    tasks = recsys_tasks(
        balanced=not task_names.isdisjoint(BALANCING), replicated=SYNC_REPLICAS in task_names, divided=True
    )
    return plan_of_spec(spec, tasks)


# ---------------------------------------------------------------------- costs


def _read_costs(path: str, tasks: Sequence[str]) -> tuple[CostsSpec, str]:
    """Costs in a file, and a note to print about them."""
    text = read_text(path, f"the costs {path!r}", "give a profile.json of PipelineProfiler, or YAML")
    with prefix_plan_errors(path):
        return _costs_from_profile(text, tasks) if text.lstrip().startswith("{") else (parse_costs_yaml(text), "")


def _costs_from_profile(text: str, tasks: Sequence[str]) -> tuple[CostsSpec, str]:
    profile = ProfileResult.from_json(text)
    task_seconds = profile.task_seconds
    costs = {name: TaskCost(seconds) for name, seconds in task_seconds.items()}
    if "EmbInputDistWait" in tasks:
        import torch

        from lightning_pipe.recsys.tasks.auto_plan import recsys_costs

        costs = recsys_costs(task_seconds, peers=True, device=torch.device("cpu"))
    note = ""
    if profile.plan != "serial":
        note = (
            f"The costs were measured under plan {profile.plan}, whose overlap shortens the measured waits, so the time"
            " of exchanges is underestimated. Profile strategy recsys_serial_pipeline instead."
        )
    return CostsSpec(costs), note


def _make_network_models(options: argparse.Namespace, costs: CostsSpec) -> list[NetworkModel | None]:
    """Networks to simulate, one for each number of ranks; ``[None]`` if the costs contain no messages."""
    latency = costs.latency if options.latency is None else parse_duration(options.latency)
    bandwidth = costs.bandwidth if options.bandwidth is None else parse_bandwidth(options.bandwidth)
    if not costs.has_messages:
        network_options = [name for name in ("ranks", "latency", "bandwidth") if getattr(options, name) is not None]
        if network_options:
            raise PlanError(
                f"--{network_options[0]} has no effect, because the costs contain times of exchanges but not their"
                " sizes in bytes. Give costs in YAML with sizes for all_to_all: or all_reduce:, as shown in"
                " docs/simulation.md."
            )
        return [None]
    if latency is None or bandwidth is None:
        missing = [name for name, value in (("latency", latency), ("bandwidth", bandwidth)) if value is None]
        raise PlanError(
            f"The costs contain message sizes, but the network's {' and '.join(missing)} is missing. Pass --latency 5us"
            " --bandwidth 25GB/s, or add network: {latency: 5us, bandwidth: 25GB/s} to the file."
        )
    return [NetworkModel(latency, bandwidth, ranks) for ranks in options.ranks or _RANKS]


# ---------------------------------------------------------------------- predictions


def _run_simulate(options: argparse.Namespace) -> None:
    plans = [find_plan_by_name(name) for name in options.names]
    costs, note = _read_costs(options.costs, list(plans[0].tasks))
    cores = 1.0 if costs.cores is None else costs.cores
    networks = _make_network_models(options, costs)
    with prefix_plan_errors(options.costs):  # the costs may not match the tasks
        machines = [
            Machine(cores, network=network, device_streams=costs.device_streams, between_periods=costs.between_periods)
            for network in networks
        ]
        predictions = [predict_plan_performance(plan, costs.tasks, machine) for plan in plans for machine in machines]
    ranks = [network.ranks for network in networks if network is not None]
    breaks = [
        find_scaling_break(plan, costs.tasks, machines[0], ranks[0], ranks[-1]) for plan in plans if len(ranks) > 1
    ]
    most = {} if ranks else {plan.name: simulate(plan, costs.tasks, machines[0]).exposed for plan in plans}
    if options.format == "json":
        content = {
            "predictions": [asdict(prediction) for prediction in predictions],
            "breaks": [asdict(scaling_break) for scaling_break in breaks],
            "assumed": describe_assumed_cores(cores),
            "notes": [note] if note else [],
        }
        print(json.dumps(content, indent=1))
        return
    report = simulation_report(predictions, breaks, most, costs, describe_assumed_cores(cores), note)
    print_report(report)
