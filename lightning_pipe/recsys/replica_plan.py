"""Where the average of replicas of tables runs in plans that do not say so, and plans that say so without replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from lightning_pipe.recsys.balancing_plan import plain_node, plain_value, without_tasks

__all__ = ["AVERAGING", "stale_with_replicas", "with_replicas", "yaml_with_replicas"]

AVERAGING = "SyncReplicas"
_STALE = ("EmbBackward", "EmbForward")


def with_replicas(order: Sequence[str]) -> list[str]:
    """*order* with the average directly behind the tables' backward: in front of every lookup that follows."""
    behind = list(order).index("EmbBackward") + 1
    return [*order[:behind], AVERAGING, *order[behind:]]


def stale_with_replicas(stale: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """What a plan gives up in front of *stale*, where there are replicas.

    A lookup that does not wait for the tables' backward does not wait for the average either, and that it is behind the
    backward follows from the average until that is given up.
    """
    return [(AVERAGING, *entry[1:]) for entry in stale if tuple(entry[:2]) == _STALE]


def yaml_with_replicas(plan: yaml.MappingNode, replicated: bool) -> None:
    """Add the average to a plan, or take it out. Anything wrong with the plan stays for its reader.

    Args:
        plan: as it was read, changed in place.
        replicated: whether there are replicas. If so, a plan that names the average is left as it is.
    """
    parts = {key.value: value for key, value in plan.value}
    tasks, order, stale = (parts.get(name) for name in ("tasks", "order", "stale"))
    if not isinstance(tasks, yaml.MappingNode):
        return
    if not replicated:
        without_tasks(parts, tasks, (AVERAGING,))
        return
    names = [key.value for key, _ in tasks.value]
    if AVERAGING in names or "EmbBackward" not in names:
        return
    tasks.value.append((plain_node(AVERAGING), plain_node({})))
    if isinstance(order, yaml.SequenceNode):
        nodes = {node.value: node for node in order.value if isinstance(node, yaml.ScalarNode)}
        if "EmbBackward" in nodes and len(nodes) == len(order.value):
            order.value = [nodes.get(name) or plain_node(name) for name in with_replicas(list(nodes))]
    if isinstance(stale, yaml.SequenceNode):
        entries = [entry for entry in plain_value(stale) if isinstance(entry, list)]
        stale.value = [*(plain_node(list(entry)) for entry in stale_with_replicas(entries)), *stale.value]
