"""PyTorch's flight recorder, a ring of the latest collectives of a process, and its analysis of several ranks' records.

Since PyTorch 2.14 it records Gloo's collectives too, but not its sends and receives.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

# Number of collectives in the ring. A newer PyTorch has 2000 by default, an older one 0.
_RING = "1000"


def turn_on(nccl_dump: str) -> str:
    """Turn the recorder on, and NCCL's own dump at a timeout, before the first process group is made.

    Variables that are set already are left unchanged. Returns the path in effect of NCCL's dump, to which NCCL appends
    the rank.
    """
    paths = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    for names, value in (sizes, _RING), (paths, nccl_dump), (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"):
        if not os.environ.keys() & set(names):  # PyTorch warns of an older name
            os.environ[names[0]] = value
    return next(os.environ[name] for name in paths if name in os.environ)


def recorded() -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Latest collectives, oldest first, and the number of completed ones by group; else empty.

    A collective of Gloo that failed counts as completed.
    """
    entries: list[dict[str, Any]] = []
    completed = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        found = json.loads(dump()) if dump is not None else {}
        entries += found.get("entries") or []
        for group, status in (found.get("pg_status") or {}).items():
            completed[group] = int(status["last_completed_collective"])
    return sorted(entries, key=lambda entry: entry["time_created_ns"]), completed


def process_groups() -> dict[str, dict[str, Any]]:
    """Description and global ranks of this process's groups, by name. The recorder's own list is incomplete."""
    names = list(dist.distributed_c10d._world.pg_names.items())
    return {name: {"desc": one.group_desc, "ranks": dist.get_process_group_ranks(one)} for one, name in names}


def find_mismatches(entries: Mapping[int, Any], groups: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """Find collectives that some ranks of a group did not start, or that differ between ranks, as PyTorch's objects.

    Args:
        entries: records of each rank, the first of each group being the same collective on all ranks.
        groups: result of :func:`process_groups` of each rank.

    Raises:
        Exception: of any class, if a record is not as PyTorch expects.
    """
    from torch.distributed.flight_recorder.components import fr_logger

    fr_logger.FlightRecorderLogger().set_log_level(logging.CRITICAL)
    from torch.distributed.flight_recorder.components import builder

    config = {
        rank: {name: {**one, "ranks": str(one["ranks"])} for name, one in found.items()}
        for rank, found in groups.items()
    }
    _, by_name, _, members, names = builder.build_groups_memberships(config)
    most = sum(map(len, entries.values()))
    _, found, _ = builder.build_collectives(dict(entries), by_name, members, names, "2.10", most)
    return [one for one in found if one.missing_ranks or one.mismatch_collectives]
