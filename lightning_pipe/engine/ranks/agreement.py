"""Comparison of configurations between ranks. A difference raises an error that names it, instead of a later hang."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import PipelineError, PlanError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, collective_device, is_alone

Entry = tuple[str, str]


def check_agreement(
    description: Sequence[Entry],
    what: str,
    group: dist.ProcessGroup | None,
    *,
    error_class: type[PipelineError] = PlanError,
    advice: str = "",
) -> None:
    """Raise an error on every rank if descriptions differ, at the cost of 32 bytes per rank if they do not."""
    if group is None or is_alone(group):
        return
    digest = hashlib.sha256(json.dumps(description).encode()).digest()
    local_digest = torch.tensor(list(digest), dtype=torch.uint8, device=collective_device(group, torch.device("cpu")))
    digests = [torch.empty_like(local_digest) for _ in range(group.size())]
    dist.all_gather(digests, local_digest, group=group)
    if bool((torch.stack(digests) == local_digest).all()):
        return
    raise error_class(_describe_first_difference(all_gather_objects(list(description), group), what) + advice)


def _describe_first_difference(descriptions: list[list[Entry]], what: str) -> str:
    """Error message with the first difference, identical on all ranks because each has all descriptions."""
    differing = next(entries for entries in zip_longest(*descriptions) if len(set(entries)) > 1)
    differing_rank = next(rank for rank, entry in enumerate(differing) if entry != differing[0])
    return (
        f"the {what} differs between ranks: {_describe_rank_entry(0, differing[0])}, but"
        f" {_describe_rank_entry(differing_rank, differing[differing_rank])}. Give every rank the same {what}"
    )


def _describe_rank_entry(rank: int, entry: Entry | None) -> str:
    if entry is None:
        return f"rank {rank} has no more entries"
    name, value = entry
    return f"rank {rank} has {name!r}" + (f" = {value!r}" if value else "")
