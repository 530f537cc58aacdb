"""Where the average of replicas of tables runs in plans that do not say so, and plans that say so without replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_pipe.recsys.plans.with_balancer import names_once, without_tasks

__all__ = ["AVERAGING", "content_with_replicas", "stale_with_replicas", "with_replicas"]

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


def content_with_replicas(content: dict[str, Any], replicated: bool) -> None:
    """Add the average to a plan, or take it out. Anything wrong with the plan stays for its reader.

    Args:
        content: what a file says of the plan, changed in place.
        replicated: whether there are replicas. If so, a plan that names the average is left as it is.
    """
    tasks, order, stale = (content.get(name) for name in ("tasks", "order", "stale"))
    assert isinstance(tasks, dict)
    if not replicated:
        without_tasks(content, (AVERAGING,))
        return
    if AVERAGING in tasks or "EmbBackward" not in tasks:
        return
    tasks[AVERAGING] = {}
    if names_once(order, "EmbBackward"):
        content["order"] = with_replicas(order)
    if isinstance(stale, list):
        content["stale"] = [*stale_with_replicas([entry for entry in stale if isinstance(entry, list)]), *stale]
