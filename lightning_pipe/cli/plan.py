"""The ``lightning-pipe plan`` commands: print a plan, and predict what plans take without running them."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_pipe.cli.plan_report import assumed_cores, simulation_report
from lightning_pipe.engine import PipelinePlan, PlanError, PlanSpec, ProfileResult
from lightning_pipe.engine.common.fitted_table import print_report
from lightning_pipe.engine.common.quantities import parse_bandwidth, parse_duration
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.costs_yaml import CostsFile, load_costs
from lightning_pipe.engine.planning.network import NetworkModel
from lightning_pipe.engine.planning.prediction import first_break, predict
from lightning_pipe.engine.planning.simulation import simulate
from lightning_pipe.engine.plans.plan_file import named, plan_file, read_text
from lightning_pipe.environment import import_torchrec
from lightning_pipe.llm.run.training_tasks import llm_plan
from lightning_pipe.loops.programs.default_program import default_plan
from lightning_pipe.pipe.plans import backward_plan, forward_plan, one_forward_one_backward_plan
from lightning_pipe.strategies.registry import STRATEGIES

__all__ = ["find_plan", "main"]

_SIMULATE = """\
Predict what an iteration takes under each plan, without running it: from what its tasks cost, on a network of which
latency and bandwidth are said, with any number of ranks. Costs are a profile that the callback PipelineProfiler wrote
(profile.json; of the serial plan, whose waits are whole), or YAML as docs/simulation.md describes.
"""
_EXAMPLES = """\
examples:
  lightning-pipe plan simulate serial base prefetch --costs profile.json
  lightning-pipe plan simulate base plan.yaml --costs costs.yaml --latency 5us --bandwidth 25GB/s --ranks 2,8,128,4096
"""
_IN_PROCESS = "in_process_pipeline"
_RANKS = (2, 8, 128, 4096)
_MOST_RANKS = 2**20
_PARTITIONS = 2  # of a module over the devices of one process, where a plan is shown that depends on how many there are


def main(arguments: Sequence[str]) -> None:
    """Run ``lightning-pipe plan``.

    Args:
        arguments: what follows it.

    Raises:
        PlanError: there is no such plan, or costs do not fit it.
        SetupError: a size or time cannot be read.
    """
    parser = argparse.ArgumentParser(prog="lightning-pipe plan", description="Show plans, and predict what they take.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    show = commands.add_parser(
        "show",
        help="print a plan as a table and a timeline, or as YAML",
        description="Print a plan: a table of its tasks, and which batch each of them works on, period by period.",
    )
    show.add_argument("name", metavar="NAME", help="a strategy, the name of a plan, or the path of a plan in YAML")
    show.add_argument("--format", choices=("table", "yaml"), default="table", help="default: table")
    show.set_defaults(run=_show)
    simulation = commands.add_parser(
        "simulate",
        help="predict what an iteration takes under plans, on 2 to 4,096 ranks",
        description=_SIMULATE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulation.add_argument("names", metavar="PLAN", nargs="+", help="as 'plan show' takes them; one or more")
    simulation.add_argument("--costs", metavar="FILE", help="profile.json of PipelineProfiler, or YAML")
    simulation.add_argument("--ranks", metavar="N,N", type=_ranks, help="default: 2,8,128,4096, for costs with bytes")
    simulation.add_argument("--latency", metavar="TIME", help="of a message between two ranks, such as 5us")
    simulation.add_argument("--bandwidth", metavar="RATE", help="of a rank's link each way: 25GB/s or 200mbit")
    simulation.add_argument("--cores", metavar="N", type=float, help="for the tasks of one rank; default: 1, or FILE's")
    simulation.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    simulation.set_defaults(run=_simulate)
    options = parser.parse_args(arguments)
    options.run(options)


def _ranks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MOST_RANKS for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 to {_MOST_RANKS}, such as 2,8,128")
    return sorted({int(part) for part in parts})


# ---------------------------------------------------------------------- plans


def _show(options: argparse.Namespace) -> None:
    plans = [find_plan(options.name)]
    if options.name == _IN_PROCESS and options.format == "table":
        plans = _pipe_plans()  # forward and backward, or both in turns
    print("\n".join(plan.to_yaml() if options.format == "yaml" else f"{plan}\n" for plan in plans), end="")


def _pipe_plans() -> list[PipelinePlan]:
    """Those of a pipe of so many partitions."""

    def nothing(partition: int, ctx: object) -> None:
        """Tasks are shown, not run."""

    return [
        forward_plan(_PARTITIONS, (), nothing),
        backward_plan(_PARTITIONS, (), nothing, nothing),
        one_forward_one_backward_plan(_PARTITIONS, (), nothing, nothing, nothing),
    ]


def _same(batch: object) -> object:
    return batch


def find_plan(name: str) -> PipelinePlan:
    """The plan that *name* means, over tasks that cannot run.

    Args:
        name: a strategy, the name of a plan, or the path of a plan in YAML.

    Raises:
        PlanError: there is none, or it is found while training only.
    """
    of_strategy = {entry.name: entry.plan for entry in STRATEGIES}
    wanted = of_strategy.get(name, name)
    plain = {plan.name: plan for plan in (default_plan(_same), llm_plan(_same, _same), *_pipe_plans())}
    if wanted in plain:
        return plain[wanted]
    if wanted == "auto":
        raise PlanError(
            f"{name!r} finds its plan while it trains; its save_plan writes that down, and 'plan show' takes the file"
        )
    recsys = [plan for plan in dict.fromkeys(of_strategy.values()) if plan not in (*plain, "auto")]
    if wanted in recsys:
        return _recsys_plan(wanted)
    if not os.path.exists(wanted):
        plans = [*plain, *recsys]
        close = difflib.get_close_matches(name, [*of_strategy, *plans], n=1)
        raise PlanError(
            f"there is no plan {name!r}: it is neither a strategy ({', '.join(of_strategy)}), nor a plan"
            f" ({', '.join(plans)}), nor a file.{f' Did you mean {close[0]}?' if close else ''}"
        )
    with plan_file(wanted, [*plain, *recsys], "prefetch") as spec:
        for plan in plain.values():
            if spec.schedule.keys() == plan.tasks.keys():
                return PipelinePlan.from_spec(spec, plan.tasks.values())
        return _recsys_plan(spec)


def _recsys_plan(plan: str | PlanSpec) -> PipelinePlan:
    """The plan of that name, or of a spec, which says by the tasks that it names whether samples are balanced, and
    tables have replicas."""
    import_torchrec()  # here, since other commands do without it
    from lightning_pipe.recsys.plans.named import PLANS, plan_of_spec
    from lightning_pipe.recsys.plans.with_balancer import BALANCING
    from lightning_pipe.recsys.plans.with_replicas import AVERAGING
    from lightning_pipe.recsys.tasks.task_list import recsys_tasks

    spec = PLANS[plan] if isinstance(plan, str) else plan
    named = spec.schedule.keys()
    return plan_of_spec(spec, recsys_tasks(balanced=not named.isdisjoint(BALANCING), replicated=AVERAGING in named))


# ---------------------------------------------------------------------- costs


@dataclass(frozen=True)
class _Costs:
    """What a file gave, and what is to be said of it."""

    costs: CostsFile
    note: str = ""


def _read_costs(path: str | None, tasks: Sequence[str]) -> _Costs:
    if path is None:
        raise PlanError(
            "no costs are given. Train with the callback PipelineProfiler and strategy recsys_serial_pipeline, and give"
            " the profile.json that it writes, --costs profile.json; or write a file as docs/simulation.md describes"
        )
    text = read_text(path, f"the costs {path!r}", "give a profile.json of PipelineProfiler, or YAML")
    with named(path):
        return _from_profile(text, tasks) if text.lstrip().startswith("{") else _Costs(load_costs(text))


def _from_profile(text: str, tasks: Sequence[str]) -> _Costs:
    profile = ProfileResult.from_json(text)
    own = profile.own
    costs = {name: TaskCost(seconds) for name, seconds in own.items()}
    if "EmbInputDistWait" in tasks:
        import torch

        from lightning_pipe.recsys.tasks.auto_plan import recsys_costs

        costs = recsys_costs(own, peers=True, device=torch.device("cpu"))
    note = ""
    if profile.plan != "serial":
        note = (
            f"The costs were measured under plan {profile.plan}, in which a wait is as short as that plan has made it:"
            " what goes over the network is underrated. Profile strategy recsys_serial_pipeline."
        )
    return _Costs(CostsFile(costs), note)


def _networks(options: argparse.Namespace, costs: CostsFile) -> list[NetworkModel | None]:
    """A network for each number of ranks to ask about."""
    latency = costs.latency if options.latency is None else parse_duration(options.latency)
    bandwidth = costs.bandwidth if options.bandwidth is None else parse_bandwidth(options.bandwidth)
    if not costs.has_messages:
        given = [name for name in ("ranks", "latency", "bandwidth") if getattr(options, name) is not None]
        if given:
            raise PlanError(
                f"--{given[0]} makes no difference: the costs say how long tasks wait for other ranks, not how many"
                " bytes they exchange. Give costs in YAML with all_to_all: or all_reduce: sizes, as docs/simulation.md"
                " shows"
            )
        return [None]
    if latency is None or bandwidth is None:
        missing = [name for name, value in (("latency", latency), ("bandwidth", bandwidth)) if value is None]
        raise PlanError(
            f"the costs have messages of so many bytes, but the network's {' and '.join(missing)} is not said; give"
            " --latency 5us --bandwidth 25GB/s, or write network: {latency: 5us, bandwidth: 25GB/s} into the file"
        )
    return [NetworkModel(latency, bandwidth, ranks) for ranks in options.ranks or _RANKS]


# ---------------------------------------------------------------------- predictions


def _simulate(options: argparse.Namespace) -> None:
    plans = [find_plan(name) for name in options.names]
    read = _read_costs(options.costs, list(plans[0].tasks))
    costs = read.costs
    cores = options.cores if options.cores is not None else costs.cores if costs.cores is not None else 1.0
    networks = _networks(options, costs)
    with named(options.costs):  # which may not fit the tasks
        machines = [
            Machine(cores, network=network, device_streams=costs.device_streams, between_periods=costs.between_periods)
            for network in networks
        ]
        predictions = [predict(plan, costs.tasks, machine) for plan in plans for machine in machines]
    ranks = [network.ranks for network in networks if network is not None]
    breaks = [first_break(plan, costs.tasks, machines[0], ranks[0], ranks[-1]) for plan in plans if len(ranks) > 1]
    most = {} if ranks else {plan.name: simulate(plan, costs.tasks, machines[0]).exposed for plan in plans}
    if options.format == "json":
        found = {
            "predictions": [asdict(one) for one in predictions],
            "breaks": [asdict(one) for one in breaks],
            "assumed": assumed_cores(cores),
            "notes": [read.note] if read.note else [],
        }
        print(json.dumps(found, indent=1))
        return
    report = simulation_report(predictions, breaks, most, costs, assumed_cores(cores), read.note)
    print_report(report)
