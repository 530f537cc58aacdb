"""Work that all ranks do together: one rank's error is raised on all, so that none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_pipe.engine.plans.errors import PipelineError, SetupError

__all__ = ["communicating_device", "gather", "on_all_ranks"]

T = TypeVar("T")


def on_all_ranks(work: Callable[[], T], failed: str, group: dist.ProcessGroup | None = None) -> T:
    """Do *work*, in which ranks do not wait for each other; raises on all ranks what went wrong on any.

    Args:
        work: this project's errors say all themselves.
        failed: what is not done, for the message of any other error.
        group: to say it through; the world's where there is none.
    """
    problem, cause = None, None
    try:
        result = work()
    except Exception as error:  # of the file system, or of what cannot be pickled
        problem, cause = _said(error, failed), error
    found = gather(problem, group)
    if any(found):
        # What all say alike is said once; else what each says that has failed.
        texts = {text: [rank for rank, one in enumerate(found) if one == text] for text in found if text is not None}
        everywhere = len(texts) == 1 and None not in found
        named = [text if everywhere else f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
        raise SetupError("\n".join(named)) from cause
    return result


def _said(error: Exception, failed: str) -> str:
    """What is said of an error: this project's say all themselves, the system's their kind."""
    if isinstance(error, PipelineError):
        return str(error)
    return f"{failed}: {error}" if isinstance(error, OSError) else f"{failed}: {type(error).__name__}: {error}"


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, on every rank; whatever can be pickled."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def communicating_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """*device*, if the group's backend takes its tensors; else one whose tensors it takes, the host's if it does."""
    types = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return device if device.type in types else torch.device("cpu" if "cpu" in types else types[0])
