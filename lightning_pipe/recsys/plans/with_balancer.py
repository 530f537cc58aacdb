"""Where the tasks of a balancer run in plans that do not say so, and plans that say so without a balancer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from lightning_pipe.engine import TaskSchedule

__all__ = [
    "BALANCING",
    "balancing_schedule",
    "content_with_balancing",
    "names_once",
    "with_balancing",
    "without_tasks",
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


def content_with_balancing(content: dict[str, Any], balanced: bool) -> None:
    """Add to a plan the tasks of a balancer, or take them out. Anything wrong with the plan stays for its reader.

    Args:
        content: what a file says of the plan, changed in place.
        balanced: whether there is a balancer. If so, what the plan says of its tasks is left as it is.
    """
    tasks, order = content["tasks"], content.get("order")
    if not balanced:
        without_tasks(content, BALANCING)
        return
    copy, input_dist = (_options(tasks, name) for name in ("H2DAndShuffle", "EmbInputDistStart"))
    if any(name in tasks for name in BALANCING) or copy is None or input_dist is None:
        return
    for name in BALANCING:
        tasks[name] = {"stage": copy.get("stage", 0), "stream": input_dist.get("stream")}
    if names_once(order, "H2DAndShuffle", "EmbInputDistStart", "LossPostprocess"):
        ahead = copy.get("stage", 0) != input_dist.get("stage", 0)
        content["order"] = with_balancing(order, ahead)


def without_tasks(content: dict[str, Any], names: Sequence[str]) -> None:
    """Take tasks out of a plan, and all that names them.

    Args:
        content: what a file says of the plan, changed in place.
        names: of the tasks.
    """
    content["tasks"] = {name: options for name, options in content["tasks"].items() if name not in names}
    for part in ("order", "deps", "cross_iter_deps", "stale"):
        found = content.get(part)
        if isinstance(found, list):
            content[part] = [one for one in found if not _names_any(one, names)]


def names_once(order: Any, *names: str) -> TypeGuard[list[str]]:
    """Whether *order* is a list of names, none of them twice, with *names* among them."""
    if not (isinstance(order, list) and all(isinstance(one, str) for one in order)):
        return False
    return len(set(order)) == len(order) and set(order).issuperset(names)


def _names_any(entry: Any, names: Sequence[str]) -> bool:
    return any(one in names for one in (entry if isinstance(entry, list) else [entry]))


def _options(tasks: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    found = {} if tasks.get(name) is None else tasks[name]
    return found if isinstance(found, Mapping) else None
