"""What a batch's ids cost in copies, counted on a double of a GPU, and what happens where a batch fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import copy_kjt_with_tensors
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.dynamic.cache.id_map import DeviceIdMap
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.store.buffered_store import SharedStore, TableStore
from lightning_pipe.recsys.dynamic.tables.row_tables import BatchRows, RowTables
from tests.recsys.dynamic.far_device import FAR, Traffic, far, on_far
from tests.recsys.dynamic.memory_store import MemoryStore
from tests.recsys.dynamic.small_table import first_values

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the double is for machines without a GPU")
CAPACITY = 6


class Tables:
    """Two tables of two weights a row, whose rows are on the CPU; only ids are on the device."""

    def __init__(self, device: torch.device | None) -> None:
        names = ("t", "u")
        self.weights = {name: torch.zeros(CAPACITY, 2) for name in names}
        self.store = MemoryStore(dict.fromkeys(names, 16 + 8))
        shared, initial = SharedStore(self.store), InitialValues("t", 2, first_values)
        caches = {
            name: RowCache(
                name,
                [self.weights[name]],
                TableStore(shared, name),
                initial=initial,
                ids=None if device is None else DeviceIdMap(CAPACITY, device),
            )
            for name in names
        }
        group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        self.rows = RowTables(caches, ["t", "t", "u"], store=shared, group=group, description={})

    def prefetch(self, t: list[int], s: list[int], u: list[int], traffic: Traffic | None = None) -> BatchRows:
        ids = torch.tensor([*t, *s, *u])
        features = KeyedJaggedTensor(["t", "s", "u"], ids, lengths=torch.tensor([len(t), len(s), len(u)])).sync()
        if traffic is not None:
            features = copy_kjt_with_tensors(features, values=on_far(ids))
            traffic.to_host.clear()
            traffic.to_device.clear()
        return self.rows.prefetch(features)

    def first_weights(self, batch: BatchRows) -> list[float]:
        """Of the rows of the batch's ids: here the ids themselves."""
        assert batch.error is None
        assert batch.features is not None
        slots: Tensor = batch.features.values()
        slots = getattr(slots, "near", slots)
        begin = batch.features.offset_per_key()[2]
        return [*self.weights["t"][slots[:begin], 0].tolist(), *self.weights["u"][slots[begin:], 0].tolist()]


@without_a_gpu
@pytest.mark.parametrize("id_map_device", ["host", "device"])
def test_a_batch_is_one_copy_in_each_direction_for_all_tables(id_map_device: str) -> None:
    with far() as traffic:
        tables = Tables(FAR if id_map_device == "device" else None)
        # First without any row, then with all, with some, and with evictions.
        for t, s, u in [([1, 2, 1], [3], [7]), ([3], [2, 2], [7, 7]), ([1], [5, 1], [8]), ([11, 12], [13, 14], [9])]:
            batch = tables.prefetch(t, s, u, traffic)
            assert tables.first_weights(batch) == [*t, *s, *u]
            ids = len(t) + len(s) + len(u)
            # With ids on the device, also two numbers for each table.
            assert traffic.to_host == [ids if id_map_device == "host" else ids + 4]
            assert len(traffic.to_device) == 1
            if id_map_device == "device" and t == [3]:
                assert traffic.to_device == [0]
            batch.release(trained=False)
            del batch


def test_changes_of_a_batch_that_failed_are_made_with_the_next(way: str) -> None:
    tables = Tables(torch.device("cpu"))
    tables.prefetch([1, 2], [3, 4], [7]).release(trained=False)
    # The first table evicts and creates rows; the second one has too few.
    failed = tables.prefetch([5, 6, 1], [2, 8], list(range(7)))
    assert isinstance(failed.error, InputError)
    for t, s, u in [([5, 3, 9], [1], [7]), ([4, 2], [8, 6], [0, 7])]:
        batch = tables.prefetch(t, s, u)
        assert tables.first_weights(batch) == [*t, *s, *u]
        batch.release(trained=False)


@pytest.mark.parametrize("method", ["read", "write"])
def test_ids_on_the_device_are_looked_up_again_after_the_store_has_failed(method: str) -> None:
    tables = Tables(torch.device("cpu"))
    for first in (1, 11, 21):
        batch = tables.prefetch([first, first + 1], [first + 2], [first])
        batch.begin_batch_and_count_ids()
        batch.release(trained=True)
        tables.store.failing = {method}
        failed = tables.prefetch([first + 5, first + 6, first + 7], [first + 8], [first])
        assert isinstance(failed.error, OSError)
        tables.store.failing = set()
    again = tables.prefetch([21, 1], [12], [11])
    assert tables.first_weights(again) == [21, 1, 12, 11]
