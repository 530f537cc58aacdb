"""Ranks share values and errors: one rank's error is raised on all, so that none waits for it.

Every rank of a group calls these functions in the same order, from one thread. A group is None for this process alone,
and ``dist.group.WORLD`` for all ranks.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import InputError, PipelineError, SetupError

__all__ = [
    "any_of",
    "communicating_device",
    "from_rank",
    "gather",
    "gather_or_raise",
    "gather_to_first",
    "is_alone",
    "on_all_ranks",
    "place_of_process",
    "raise_gathered",
    "raise_together",
    "shares_host",
]

T = TypeVar("T")
Group = dist.ProcessGroup | None
Kind = type[PipelineError]


def is_alone(group: Group) -> bool:
    """Whether this process has no other rank to talk to in *group*."""
    return group is None or not dist.is_initialized() or group.size() == 1


# ---------------------------------------------------------------------- values


def gather(value: T, group: Group) -> list[T]:
    """Every rank's value, on every rank; whatever can be pickled.

    Raises:
        SetupError: on every rank, if the value of any cannot be pickled.
    """
    if is_alone(group):
        return [value]
    own: bytes | str
    error: Exception | None = None
    try:
        own = pickle.dumps(value)
    except Exception as raised:  # of whatever kind: the others wait
        error, own = raised, _said(raised, "a value cannot be sent to the other ranks")
    found = [own] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group)
    texts = [one if isinstance(one, str) else None for one in found]
    if any(texts):
        _raise(texts, error, SetupError)
    return [pickle.loads(one) for one in found if isinstance(one, bytes)]


def gather_to_first(value: T, group: Group) -> list[T]:
    """Every rank's value, on the first rank; the others have their own alone.

    Raises:
        SetupError: on every rank, if the value of any cannot be pickled.
    """
    if is_alone(group):
        return [value]
    own = on_all_ranks(lambda: pickle.dumps(value), "a value cannot be sent to the other ranks", group)
    found = [own] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(own, found, group=group, group_dst=0)
    return [value] if found is None else [pickle.loads(one) for one in found]


def any_of(flags: Sequence[bool], group: Group) -> list[bool]:
    """For each flag, whether it is set on any rank: one small all-reduce."""
    if group is None or is_alone(group) or not flags:
        return list(flags)
    device = communicating_device(group, torch.device("cpu"))
    found = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]


# ---------------------------------------------------------------------- errors


def from_rank(work: Callable[[], T], failed: str, group: Group, rank: int = 0, kind: Kind = SetupError) -> T:
    """Do *work* on one rank alone; every rank returns its result, which can be pickled.

    Args:
        work: called on *rank*.
        failed, group, kind: as for :func:`on_all_ranks`.
        rank: in the group, by default the first.

    Raises:
        SetupError: or *kind*, on every rank, if the work raised anything.
    """
    if is_alone(group):
        return on_all_ranks(work, failed, None, kind)
    found: list[Any] = [None, None]
    result: Any = None
    error: Exception | None = None
    if own := dist.get_rank(group) == rank:
        try:
            result = work()
            found[0] = pickle.dumps(result)
        except Exception as raised:  # of whatever kind: the others wait
            error, found[1] = raised, _said(raised, failed)
    dist.broadcast_object_list(found, group=group, group_src=rank)
    if found[1] is not None:
        _raise([found[1]], error, kind)
    return cast(T, result if own else pickle.loads(found[0]))


def on_all_ranks(work: Callable[[], T], failed: str, group: Group, kind: Kind = SetupError) -> T:
    """Do *work*, in which ranks do not wait for each other; raises on all ranks what went wrong on any.

    Args:
        work: called on each rank.
        failed: what is not done, for the message of an error that is not this project's; may be empty.
        kind: class of what is raised. Where it is InputError, a rank whose own error is not this project's raises
            that: users expect to catch what they raised.

    Raises:
        SetupError: or *kind*, on every rank.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # of whatever kind: the others wait
        error = raised
    raise_together(error, failed, group, kind)
    return result


def raise_together(error: Exception | None, failed: str, group: Group, kind: Kind = SetupError) -> None:
    """Raise on every rank if any has an *error*: one small collective if none has. See :func:`on_all_ranks`."""
    if any_of([error is not None], group)[0]:
        raise_gathered(error, failed, group, kind)


def raise_gathered(error: Exception | None, failed: str, group: Group, kind: Kind = SetupError) -> NoReturn:
    """Raise the errors of all ranks, where all know already that one of them has one. See :func:`on_all_ranks`."""
    gather_or_raise(None, error, failed, group, kind)
    raise AssertionError("no rank has an error")


def gather_or_raise(value: T, error: Exception | None, failed: str, group: Group, kind: Kind = SetupError) -> list[T]:
    """Every rank's value, on every rank; raises on every rank if any has an *error*. See :func:`on_all_ranks`."""
    found = gather((value, None if error is None else _said(error, failed)), group)
    texts = [text for _, text in found]
    if any(text is not None for text in texts):
        _raise(texts, error, kind)
    return [one for one, _ in found]


def _said(error: Exception, failed: str) -> str:
    """The text of an error: this project's are complete, and the class of any other belongs to its text."""
    try:
        text = str(error)
    except Exception as without_text:  # the others wait
        text = f"its text cannot be read: {type(without_text).__name__}"
    if isinstance(error, PipelineError):
        return text
    if not (isinstance(error, OSError) and failed):
        text = f"{type(error).__name__}: {text}"
    return f"{failed}: {text}" if failed else text


def _raise(found: Sequence[str | None], error: Exception | None, kind: Kind) -> NoReturn:
    if error is not None and kind is InputError and (len(found) == 1 or not isinstance(error, InputError)):
        raise error
    texts = {text: [rank for rank, one in enumerate(found) if one == text] for text in found if text is not None}
    everywhere = len(texts) == 1 and None not in found
    named = [text if everywhere else f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
    raise kind("\n".join(named)) from error


# ---------------------------------------------------------------------- where


def communicating_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """*device*, if the group's backend takes its tensors; else one whose tensors it takes, the host's if it does."""
    types = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return device if device.type in types else torch.device("cpu" if "cpu" in types else types[0])


def shares_host(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of *group* reach each other without a network."""
    return len(set(gather(place_of_process(), group))) == 1


def place_of_process() -> tuple[str, int]:
    """The boot of this process's machine, and its network namespace: processes with both need no network.

    Processes that share the first alone may share memory.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat("/proc/self/ns/net").st_ino
    except OSError:  # no Linux
        return socket.gethostname(), 0
