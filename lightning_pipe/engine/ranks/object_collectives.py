"""Exchange of values and errors between ranks. An error of one rank is raised on all ranks, so that no rank hangs.

Every rank of a group calls these functions in the same order, from one thread. The group is None for a single process
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

from lightning_pipe.engine.common.errors import InputError, PipelineError, SetupError, get_error_text

T = TypeVar("T")
Group = dist.ProcessGroup | None
Kind = type[PipelineError]


def is_alone(group: Group) -> bool:
    """Return True if *group* has no other rank than this process."""
    return group is None or not dist.is_initialized() or group.size() == 1


# ---------------------------------------------------------------------- values


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Gather the values of all ranks on every rank. Values must be picklable."""
    if is_alone(group):
        return [value]
    payload: bytes | str
    error: Exception | None = None
    try:
        payload = pickle.dumps(value)
    except Exception as raised:  # any exception, since the other ranks wait
        error, payload = raised, _describe_error(raised, "a value cannot be sent to the other ranks")
    payloads = [payload] * dist.get_world_size(group)
    dist.all_gather_object(payloads, payload, group)
    texts = [payload_of_rank if isinstance(payload_of_rank, str) else None for payload_of_rank in payloads]
    if any(texts):
        _raise_rank_errors(texts, error, SetupError)
    return [pickle.loads(payload_of_rank) for payload_of_rank in payloads if isinstance(payload_of_rank, bytes)]


def gather_objects_on_first_rank(value: T, group: Group) -> list[T]:
    """Gather the values of all ranks on the first rank. Other ranks return only their own value."""
    if is_alone(group):
        return [value]
    payload = run_on_all_ranks(lambda: pickle.dumps(value), "a value cannot be sent to the other ranks", group)
    payloads = [payload] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(payload, payloads, group=group, group_dst=0)
    return [value] if payloads is None else [pickle.loads(payload_of_rank) for payload_of_rank in payloads]


def all_reduce_any(flags: Sequence[bool], group: Group) -> list[bool]:
    """Return for each flag True if it is set on any rank. Costs one small all-reduce."""
    if group is None or is_alone(group) or not flags:
        return list(flags)
    device = collective_device(group, torch.device("cpu"))
    combined = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(combined, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in combined.tolist()]


def all_reduce_any_async(flag: bool, group: Group) -> Callable[[], bool]:
    """Submit the all-reduce of :func:`all_reduce_any` for one flag. Call the result to wait for it."""
    if group is None or is_alone(group):
        return lambda: flag
    combined = torch.tensor([flag], dtype=torch.int32, device=collective_device(group, torch.device("cpu")))
    work = dist.all_reduce(combined, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def wait() -> bool:
        work.wait()
        return bool(combined.tolist()[0])

    return wait


# ---------------------------------------------------------------------- errors


def run_on_rank(work: Callable[[], T], failed: str, group: Group, rank: int = 0, error_class: Kind = SetupError) -> T:
    """Call *work* on one rank only. Every rank returns its result, which must be picklable."""
    if is_alone(group):
        return run_on_all_ranks(work, failed, None, error_class)
    message: list[Any] = [None, None]
    result: Any = None
    error: Exception | None = None
    if is_source := dist.get_rank(group) == rank:
        try:
            result = work()
            message[0] = pickle.dumps(result)
        except Exception as raised:  # any exception, since the other ranks wait
            error, message[1] = raised, _describe_error(raised, failed)
    dist.broadcast_object_list(message, group=group, group_src=rank)
    if message[1] is not None:
        _raise_rank_errors([message[1]], error, error_class)
    return cast(T, result if is_source else pickle.loads(message[0]))


def run_on_all_ranks(work: Callable[[], T], failed: str, group: Group, error_class: Kind = SetupError) -> T:
    """Call *work*, which must not wait for other ranks, on all ranks; raise the errors of all ranks on every rank."""
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:  # any exception, since the other ranks wait
        error = raised
    raise_together(error, failed, group, error_class)
    return result


def raise_together(error: Exception | None, failed: str, group: Group, error_class: Kind = SetupError) -> None:
    """Raise on every rank if any rank has an *error*, see :func:`run_on_all_ranks`; otherwise a small all-reduce."""
    if all_reduce_any([error is not None], group)[0]:
        raise_gathered(error, failed, group, error_class)


def raise_gathered(error: Exception | None, failed: str, group: Group, error_class: Kind = SetupError) -> NoReturn:
    """Raise the errors of all ranks, which already know that one rank has an error. See :func:`run_on_all_ranks`."""
    all_gather_or_raise(None, error, failed, group, error_class)
    raise AssertionError("no rank has an error")


def all_gather_or_raise(
    value: T, error: Exception | None, failed: str, group: Group, error_class: Kind = SetupError
) -> list[T]:
    """Gather the values of all ranks, or raise on every rank if any has an *error*. See :func:`run_on_all_ranks`."""
    entries = all_gather_objects((value, None if error is None else _describe_error(error, failed)), group)
    texts = [text for _, text in entries]
    if any(text is not None for text in texts):
        _raise_rank_errors(texts, error, error_class)
    return [gathered for gathered, _ in entries]


def _describe_error(error: Exception, failed: str) -> str:
    """Text of an error. Errors from outside this project are prefixed with *failed* and their class."""
    text = get_error_text(error)
    if isinstance(error, PipelineError):
        return text
    if not (isinstance(error, OSError) and failed):
        text = f"{type(error).__name__}: {text}"
    return f"{failed}: {text}" if failed else text


def _raise_rank_errors(rank_errors: Sequence[str | None], error: Exception | None, error_class: Kind) -> NoReturn:
    # Users expect to catch their own exceptions of a batch.
    if error is not None and error_class is InputError and (len(rank_errors) == 1 or not isinstance(error, InputError)):
        raise error
    texts = {
        text: [rank for rank, rank_error in enumerate(rank_errors) if rank_error == text]
        for text in rank_errors
        if text is not None
    }
    everywhere = len(texts) == 1 and None not in rank_errors
    named = [text if everywhere else f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
    # An error of this project is complete: its own traceback would print the same message a second time.
    raise error_class("\n".join(named)) from (error.__cause__ if isinstance(error, PipelineError) else error)


# ---------------------------------------------------------------------- where


def collective_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return *device* if the group's backend supports it, otherwise the CPU or another supported device."""
    types = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return device if device.type in types else torch.device("cpu" if "cpu" in types else types[0])


def is_single_host(group: dist.ProcessGroup) -> bool:
    """Return True if the ranks of *group* reach each other without a network."""
    return len(set(all_gather_objects(host_id(), group))) == 1


def host_id() -> tuple[str, int]:
    """Boot id of the machine and network namespace: processes for which both are equal need no network."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat("/proc/self/ns/net").st_ino
    except OSError:  # not Linux
        return socket.gethostname(), 0
