"""Where the average of replicas of tables runs in plans that do not say so, and plans that say so without replicas."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from lightning_pipe.recsys.balancing_plan import plain_node, without_tasks

__all__ = ["AVERAGING", "with_replicas", "yaml_with_replicas"]

AVERAGING = "SyncReplicas"
_STALE = ("EmbBackward", "EmbForward")


def with_replicas(order: Sequence[str]) -> list[str]:
    """*order* with the average directly behind the tables' backward: in front of every lookup that follows."""
    behind = list(order).index("EmbBackward") + 1
    return [*order[:behind], AVERAGING, *order[behind:]]


def stale_with_replicas(stale: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """What a plan gives up, where there are replicas: a lookup that does not wait for the tables' backward does not
    wait for the average either."""
    found = [tuple(entry) for entry in stale]
    # First: the backward's place in front of the lookup follows from the average's until that is given up.
    added = [(AVERAGING, *entry[1:]) for entry in found if entry[:2] == _STALE]
    return [*(entry for entry in added if entry not in found), *found]


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
        entries = [
            [one.value for one in node.value] if isinstance(node, yaml.SequenceNode) else [] for node in stale.value
        ]
        added = stale_with_replicas([entry for entry in entries if len(entry) >= 2])
        known = [tuple(entry) for entry in entries]
        stale.value = [*(plain_node(list(entry)) for entry in added if entry not in known), *stale.value]
