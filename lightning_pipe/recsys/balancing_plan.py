"""Where the tasks of a balancer run in plans that do not say so, and plans that say so without a balancer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from lightning_pipe.engine import TaskSchedule

__all__ = [
    "BALANCING",
    "balancing_schedule",
    "plain_node",
    "plain_value",
    "with_balancing",
    "without_tasks",
    "yaml_with_balancing",
]

BALANCING = ("BalanceStart", "BalanceFinish")


def balancing_schedule(stage: int, stream: str | None) -> dict[str, TaskSchedule]:
    """As far ahead as the copy; on the stream of the input dist.

    Args:
        stage: of ``H2DAndShuffle``.
        stream: of ``EmbInputDistStart``.
    """
    return dict.fromkeys(BALANCING, TaskSchedule(stage, stream))


def with_balancing(order: Sequence[str], ahead: bool) -> list[str]:
    """*order* with the tasks of a balancer: the gather directly behind the copy; the exchange behind the dense forward.

    So ranks send their workloads, and find the partition, beside the forward pass of another batch. Where the order
    leaves no room for that, the exchange is in front of the input dist, or, if that comes in a later period, last.

    Args:
        order: of a period, without these tasks.
        ahead: whether the input dist of a batch comes in a later period than its copy.
    """
    order = list(order)
    start = order.index("H2DAndShuffle") + 1
    end = len(order) if ahead else order.index("EmbInputDistStart")
    behind_forward = order.index("LossPostprocess")
    finish = behind_forward if start <= behind_forward < end else end
    return [*order[:start], BALANCING[0], *order[start:finish], BALANCING[1], *order[finish:]]


def yaml_with_balancing(plan: yaml.MappingNode, balanced: bool) -> None:
    """Add to a plan the tasks of a balancer, or take them out. Anything wrong with the plan stays for its reader.

    Args:
        plan: as it was read, changed in place.
        balanced: whether there is a balancer. If so, what the plan says of its tasks is left as it is.
    """
    parts = {key.value: value for key, value in plan.value}
    tasks, order = parts.get("tasks"), parts.get("order")
    if not isinstance(tasks, yaml.MappingNode):
        return
    if not balanced:
        without_tasks(parts, tasks, BALANCING)
        return
    said = {key.value: plain_value(value) for key, value in tasks.value}
    copy, input_dist = (_options(said.get(name)) for name in ("H2DAndShuffle", "EmbInputDistStart"))
    if any(name in said for name in BALANCING) or copy is None or input_dist is None:
        return
    for name in BALANCING:
        options = {"stage": copy.get("stage", 0), "stream": input_dist.get("stream")}
        tasks.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", name), plain_node(options)))
    if isinstance(order, yaml.SequenceNode) and order.value:
        nodes = {node.value: node for node in order.value if isinstance(node, yaml.ScalarNode)}
        if {"H2DAndShuffle", "EmbInputDistStart", "LossPostprocess"} <= set(nodes) and len(nodes) == len(order.value):
            ahead = copy.get("stage", 0) != input_dist.get("stage", 0)
            order.value = [
                nodes.get(name, yaml.ScalarNode("tag:yaml.org,2002:str", name))
                for name in with_balancing(list(nodes), ahead)
            ]


def without_tasks(parts: Mapping[str, yaml.Node], tasks: yaml.MappingNode, names: Sequence[str]) -> None:
    """Take tasks out of a plan in YAML, and all that names them.

    Args:
        parts: of the plan, by key, changed in place.
        tasks: the one that lists tasks.
        names: of the tasks.
    """
    tasks.value = [entry for entry in tasks.value if entry[0].value not in names]
    for part in ("order", "deps", "cross_iter_deps", "stale"):
        found = parts.get(part)
        if isinstance(found, yaml.SequenceNode):
            found.value = [one for one in found.value if not _names_any(one, names)]


def _names_any(node: yaml.Node, names: Sequence[str]) -> bool:
    named = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return any(one.value in names for one in named)


def _options(found: Any) -> Mapping[str, Any] | None:
    found = {} if found is None else found
    return found if isinstance(found, Mapping) else None


def plain_value(node: yaml.Node) -> Any:
    """A part of a plan that was read as a value of plain types."""
    return SafeConstructor().construct_document(node)


def plain_node(value: Any) -> yaml.Node:
    """A value of plain types as a part of a plan that was read."""
    node = yaml.compose(yaml.safe_dump(value), yaml.SafeLoader)
    assert node is not None
    return node
