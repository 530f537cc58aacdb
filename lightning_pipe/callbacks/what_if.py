"""Simulated iteration times for changed tasks, plans, networks and numbers of ranks, from measured task times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_pipe.engine import PipelinePlan
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.network import Message
from lightning_pipe.engine.planning.simulation import simulate

_FACTORS = (0.5, 2, 4, 10)
_RANKS = tuple(2**power for power in range(1, 13))
_NETWORK, _NUMBER = "another network", "another number of ranks"
# Questions whose answers are shown in the given order instead of sorted by time.
IN_ORDER = (_NETWORK, _NUMBER)
_SMALL = 0.005  # share of an iteration below which tasks are left out


@dataclass(frozen=True)
class WhatIf:
    """Predicted iteration times.

    Args:
        seconds: iteration time in seconds of the current setup.
        otherwise: iteration time in seconds by question and, within each question, by the changed setting.
        one_host: True if all ranks share a host (default False).
    """

    seconds: float
    otherwise: Mapping[str, Mapping[str, float]]
    one_host: bool = False


def ask_what_if(
    plan: PipelinePlan,
    costs: Mapping[str, TaskCost],
    machine: Machine,
    *,
    other_plans: Sequence[PipelinePlan] = (),
    one_host: bool = False,
) -> WhatIf:
    """Simulate *plan* as it is, with faster tasks, another network, more ranks, and the other plans.

    Questions without an answer are left out: another network if no task uses one, and other numbers of ranks if the
    costs contain no message sizes.

    Args:
        plan: current plan.
        costs: costs of its tasks.
        machine: resources that the tasks share.
        other_plans: other plans for the same tasks (default none).
        one_host: True if all ranks share a host and need no network (default False).

    Raises:
        PlanError: If the costs do not match the tasks.
    """

    def seconds(of: PipelinePlan = plan, with_costs: Mapping[str, TaskCost] = costs, on: Machine = machine) -> float:
        return simulate(of, with_costs, on).seconds_per_iteration

    now = seconds()
    large = [name for name, cost in costs.items() if cost.seconds + _background(cost, machine) > _SMALL * now]

    def of_each(factor: float) -> dict[str, float]:
        return {name: seconds(with_costs={**costs, name: _faster(costs[name], factor)}) for name in large}

    otherwise = {
        "a task takes half its time": of_each(2),
        "a task takes no time": of_each(float("inf")),
        "another plan": {one.name: seconds(of=one) for one in other_plans if one.name != plan.name},
    }
    if not one_host and any(_on_network(cost) for cost in costs.values()):
        otherwise[_NETWORK] = {
            f"{factor:g} times as fast": seconds(
                with_costs={name: _faster(cost, factor, network=True) for name, cost in costs.items()},
                on=_with_network(machine, factor),
            )
            for factor in _FACTORS
        }
    network = machine.network
    if network is not None and any(isinstance(cost.background, Message) for cost in costs.values()):
        otherwise[_NUMBER] = {
            f"{ranks} ranks": seconds(on=replace(machine, network=replace(network, ranks=ranks))) for ranks in _RANKS
        }
    if machine.between_periods:
        otherwise["hooks and the data loader take no time"] = {
            "no hooks, no loader": seconds(on=replace(machine, between_periods=0.0))
        }
    return WhatIf(now, {question: answers for question, answers in otherwise.items() if answers}, one_host)


def _background(cost: TaskCost, machine: Machine) -> float:
    if isinstance(cost.background, Message):
        return 0.0 if machine.network is None else machine.network.seconds(cost.background)
    return cost.background


def _on_network(cost: TaskCost) -> bool:
    return cost.resource == "network" or (cost.background_resource == "network" and bool(cost.background))


def _faster(cost: TaskCost, factor: float, *, network: bool = False) -> TaskCost:
    """Cost of a task that is *factor* times as fast; with *network*, only its network part is faster."""
    if not network or cost.resource == "network":
        cost = replace(cost, seconds=cost.seconds / factor, launch=cost.launch / factor)
    if isinstance(cost.background, Message):
        # With `network` the message stays unchanged, because the network model is made faster instead.
        return (
            cost
            if network
            else replace(cost, background=replace(cost.background, bytes=cost.background.bytes / factor))
        )
    if not network or cost.background_resource == "network":
        cost = replace(cost, background=cost.background / factor)
    return cost


def _with_network(machine: Machine, factor: float) -> Machine:
    network = machine.network
    if network is None:
        return machine
    return replace(
        machine, network=replace(network, latency=network.latency / factor, bandwidth=network.bandwidth * factor)
    )
