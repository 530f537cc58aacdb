"""Copies of a batch's ids between device and host: one in each direction, for all tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from lightning_pipe.recsys.batches.transfer import move_tensor_to_device
from lightning_pipe.recsys.dynamic.cache.id_map import DeviceIdMap
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.ticket import PinnedCacheSlots


def prefetch_with_device_lookup(
    parts: Sequence[tuple[RowCache, DeviceIdMap, Tensor]], tickets: list[tuple[RowCache, PinnedCacheSlots]]
) -> list[Tensor]:
    """Cache and pin the rows of a batch whose ids are looked up on their device."""
    with ExitStack() as stack:
        for cache, _, _ in parts:
            stack.enter_context(cache.row_lock)
        lookups = [ids.lookup(values) for _, ids, values in parts]
        summaries = copy_ids_to_host(torch.cat([summary for _, summary in lookups])).split(
            [len(summary) for _, summary in lookups]
        )
        for (cache, _, _), summary in zip(parts, summaries, strict=True):
            tickets.append((cache, cache.pin(summary)))
        changes = [[ticket.slots, *ids.changes()] for (_, ticket), (_, ids, _) in zip(tickets, parts, strict=True)]
        flat = [tensor for tensors in changes for tensor in tensors]
        copies = iter(
            move_tensor_to_device(torch.cat(flat), parts[0][2].device).split([len(tensor) for tensor in flat])
        )
        for (slots, _), (_, ids, _) in zip(lookups, parts, strict=True):
            slots.masked_scatter_(slots < 0, next(copies))
            ids.apply(next(copies), next(copies), next(copies))
    return [slots for slots, _ in lookups]


def copy_ids_to_host(ids: Tensor) -> Tensor:
    """Ids on the host; a copy from a GPU is in pinned memory, so that it does not wait for other work of the host."""
    if not ids.is_cuda:
        return ids.detach()
    copy = torch.empty_like(ids, device="cpu", pin_memory=True)
    copy.copy_(ids.detach(), non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return copy
