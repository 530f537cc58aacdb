"""A cache that is too small for its table trains as a table without one: to the bit, whatever is prefetched when."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from lightning_pipe.recsys.dynamic.cache import host_rows, row_slots
from lightning_pipe.recsys.dynamic.cache.eviction import Policy
from lightning_pipe.recsys.dynamic.cache.host_rows import HostRows
from lightning_pipe.recsys.dynamic.cache.id_map import DeviceIdMap
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues, Normal
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.ticket import PinnedCacheSlots
from lightning_pipe.recsys.dynamic.store import buffered_store
from lightning_pipe.recsys.dynamic.store.buffered_store import Change, SharedStore, TableStore
from lightning_pipe.recsys.dynamic.tables.batch_ids import prefetch_with_device_lookup
from tests.patience import HANG
from tests.recsys.dynamic.memory_store import MemoryStore
from tests.recsys.dynamic.reference import OPTIMIZERS, Begun, Reference, columns_of
from tests.tiers import sampled

STEPS = 50
BATCH = 12


def _score(keys: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray:
    return (counts * 3 + last - keys % 5).astype(np.float32)


@dataclass
class Settings:
    """What a run is like."""

    policy: Policy
    optimizer: str
    depth: int
    threshold: int
    ttl: int | None
    capacity: int
    ahead: bool
    host_rows: int
    spread: bool
    ids_on_device: bool

    @classmethod
    def random(cls, chance: random.Random) -> Settings:
        depth, ahead = chance.randrange(4), chance.random() < 0.3
        return cls(
            policy=chance.choice(["lru", "lfu", _score]),
            optimizer=chance.choice(list(OPTIMIZERS)),
            depth=depth,
            threshold=chance.choice([1, 1, 2, 4]),
            # Longer than two batches that have begun are apart.
            ttl=chance.choice([None, None, 6, 10] if ahead else [None, None, 1, 3, 10]),
            # The batches in flight, those begun too early, and one that is evaluated: more or less room beside them.
            capacity=BATCH * (depth + 3) + chance.choice([0, 1, 7, 50]),
            ahead=ahead,
            # From fewer than a batch has to more than leave the cache between two commits.
            host_rows=chance.choice([0, 1, 5, 20, 200]),
            spread=chance.random() < 0.7,
            ids_on_device=chance.random() < 0.5,
        )


@dataclass
class Run:
    """The same batches, with a cache and without."""

    settings: Settings
    store: MemoryStore = field(init=False)
    columns: list[Tensor] = field(init=False)
    cache: RowCache = field(init=False)
    shared: SharedStore = field(init=False)
    copied: tuple[list[Change], dict[int, bytes]] | None = None
    prefetches: int = 0

    def __post_init__(self) -> None:
        initial = InitialValues("t", 3, Normal(0.0, 1.0), seed=5)
        one = self.settings
        self.reference = Reference(initial, one.optimizer, one.ttl, one.threshold)
        self.open_cache(None)

    def open_cache(self, store: MemoryStore | None) -> None:
        """A cache without rows over what a store has."""
        one = self.settings
        self.columns = columns_of(one.optimizer, one.capacity)
        if store is None:
            store = MemoryStore({"t": 16 + sum(c[0].numel() * c.element_size() for c in self.columns)})
        self.store = store
        self.shared = SharedStore(store)
        below = TableStore(self.shared, "t")
        if one.host_rows:
            below = HostRows(one.host_rows, store.widths["t"], self.shared, "t")
        self.cache = RowCache(
            "t",
            self.columns,
            below,
            initial=InitialValues("t", 3, Normal(0.0, 1.0), seed=5),
            state_fill=[fill for fill, _, _ in OPTIMIZERS[one.optimizer][1]],
            policy=one.policy,
            admission_threshold=one.threshold,
            ttl=one.ttl,
            ids=DeviceIdMap(one.capacity, torch.device("cpu")) if one.ids_on_device else None,
        )

    def prefetch(self, ids: Sequence[int]) -> PinnedCacheSlots:
        """On the device as batches are; in one of three calls as the cache alone does it."""
        keys = torch.tensor(ids, dtype=torch.int64)
        self.prefetches += 1
        if self.cache.ids is None or self.prefetches % 3 == 0:
            return self.cache.prefetch(keys)
        tickets: list[tuple[RowCache, PinnedCacheSlots]] = []
        (slots,) = prefetch_with_device_lookup([(self.cache, self.cache.ids, keys)], tickets)
        ticket = tickets[0][1]
        ticket.slots = slots
        return ticket

    def begin(self, ids: list[int], ticket: PinnedCacheSlots, step: int) -> Begun:
        self.cache.begin_batch_and_count_ids(ticket, step)
        return self.reference.begin(ids, step)

    def looked_up(self, ids: list[int], ticket: PinnedCacheSlots) -> None:
        if ids:
            assert torch.equal(self.columns[0][ticket.slots], self.reference.weights(ids))

    def train(self, ids: list[int], ticket: PinnedCacheSlots, begun: Begun) -> None:
        """What a fused backward does: the columns of the batch's distinct rows change in place."""
        place = dict(zip(ids, ticket.slots.tolist(), strict=True))
        slots = torch.tensor([place[key] for key in begun.ids], dtype=torch.int64)
        gradients = self.columns[0][slots] * 0.3 + _noise(begun)
        after = OPTIMIZERS[self.settings.optimizer][0]([column[slots] for column in self.columns], gradients)
        for column, values in zip(self.columns, after, strict=True):
            column[slots] = values
        self.cache.end_trained(ticket)
        self.reference.train(begun, gradients)

    def evaluate(self, ids: list[int], step: int) -> None:
        ticket = self.prefetch(ids)
        self.cache.reset_expired_rows(ticket, step)
        self.reference.expire(ids, step)
        self.looked_up(ids, ticket)
        self.cache.end_untrained(ticket)

    def copy(self) -> None:
        """Begin a commit in the background; one of earlier rows ends first."""
        self.keep(1.0)
        self.copied = self.cache.copy_changes(), self.reference.records()
        self.shared.buffer_writes()

    def keep(self, share: float) -> None:
        """Write what was copied, or only some of it, as if the store failed then."""
        if self.copied is None:
            return
        (changes, expected), self.copied = self.copied, None
        for change in changes[: round(share * len(changes))]:
            self.cache.write_changes(change)
        if share == 1.0:
            assert self.store.tables["t"] == expected
            self.cache.mark_stored()
        self.shared.flush_writes()

    def check_store(self) -> None:
        self.keep(1.0)
        self.cache.flush()
        assert self.store.tables["t"] == self.reference.records()


def _noise(begun: Begun) -> Tensor:
    ids = torch.tensor(begun.ids, dtype=torch.int64).remainder(1000).unsqueeze(1)
    return torch.sin((ids * 7 + begun.step).double() + torch.arange(3)).float()


def _batch(chance: random.Random, spread: bool) -> list[int]:
    """Some ids often, many rarely, some of them far away; or all of them leave the cache and return."""
    ids = [chance.randrange(120) if spread else int(chance.paretovariate(0.7)) % 500 for _ in range(BATCH)]
    return [one - 2**63 if one % 7 == 3 else one for one in ids][: chance.randrange(BATCH + 1)]


@pytest.mark.parametrize("seed", sampled(range(100), lambda seed: seed < 40))
def test_any_order_of_calls_trains_as_a_table_without_a_cache(
    seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (buffered_store, row_slots, host_rows):
        monkeypatch.setattr(module, "_CHUNK", 5)
    chance = random.Random(seed)
    run = Run(Settings.random(chance))
    to_come: deque[tuple[list[int], PinnedCacheSlots]] = deque()
    begun: deque[tuple[list[int], PinnedCacheSlots, Begun]] = deque()
    step = last = 0
    for _ in range(STEPS):
        # Any number of batches ahead, from none to all.
        while len(to_come) <= chance.randrange(run.settings.depth + 1):
            ids = _batch(chance, run.settings.spread)
            to_come.append((ids, run.prefetch(ids)))
        if chance.random() < 0.3:
            run.evaluate(_batch(chance, run.settings.spread) or [0], last)
        ids, ticket = to_come.popleft()
        if chance.random() < 0.1:  # skipped
            run.cache.end_untrained(ticket)
            continue
        step += 1
        found = run.begin(ids, ticket, step)
        run.looked_up(ids, ticket)
        if chance.random() < 0.1:  # its forward failed
            _abandon(chance, run, ticket)
            run.reference.undo(found)
            # Its number is free again.
            step -= chance.randrange(2)
            continue
        begun.append((ids, ticket, found))
        # One batch begins before the one before it is trained, where such is the plan.
        while len(begun) > (1 if run.settings.ahead else 0):
            ids, ticket, found = begun.popleft()
            run.train(ids, ticket, found)
            last = found.step
        if chance.random() < 0.1:
            _checkpoint(chance, run, to_come, begun)
        elif chance.random() < 0.1:
            run.keep(chance.choice([0.0, 0.5, 1.0]))
    while begun:
        run.train(*begun.popleft())
    run.check_store()


def _abandon(chance: random.Random, run: Run, ticket: PinnedCacheSlots) -> None:
    if chance.random() < 0.5:
        run.cache.end_untrained(ticket)
    else:
        ticket.__del__()


def _checkpoint(
    chance: random.Random,
    run: Run,
    to_come: deque[tuple[list[int], PinnedCacheSlots]],
    begun: deque[tuple[list[int], PinnedCacheSlots, Begun]],
) -> None:
    """The store has what was trained, and training goes on: with the cache, or from the store with another."""
    for _, _, found in reversed(begun):
        run.reference.undo(found)
    in_background = chance.random() < 0.5
    if in_background:
        run.copy()
    else:
        run.check_store()
    if not in_background and chance.random() < 0.5:
        if chance.random() < 0.5:
            run.cache.clear_without_writing()
        else:
            run.open_cache(run.store)
        again = [(ids, run.prefetch(ids)) for ids, _ in to_come]
        to_come.clear()
        to_come.extend(again)
        for at, (ids, _, found) in enumerate(begun):
            ticket = run.prefetch(ids)
            begun[at] = (ids, ticket, run.begin(ids, ticket, found.step))
    else:
        for at, (ids, ticket, found) in enumerate(begun):
            begun[at] = (ids, ticket, run.reference.begin(ids, found.step))


class _Worker:
    """Prefetches in a thread of its own, at most so many batches ahead."""

    def __init__(
        self, prefetch: Callable[[list[int]], PinnedCacheSlots], batches: Sequence[list[int]], depth: int
    ) -> None:
        self._prefetch, self._batches = prefetch, batches
        self._tickets: list[PinnedCacheSlots | BaseException | None] = [None] * len(batches)
        self._ready = [threading.Event() for _ in batches]
        self._room = threading.Semaphore(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Worker:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._room.release()
        self._thread.join(HANG)

    def _run(self) -> None:
        for at, ids in enumerate(self._batches):
            self._room.acquire()
            if self._closed:
                return
            try:
                self._tickets[at] = self._prefetch(ids)
            except BaseException as error:
                self._tickets[at] = error
            self._ready[at].set()

    def ticket(self, at: int) -> PinnedCacheSlots:
        assert self._ready[at].wait(HANG)
        found, self._tickets[at] = self._tickets[at], None
        assert isinstance(found, PinnedCacheSlots), found
        return found

    def room(self) -> None:
        """For one more batch."""
        self._room.release()


@pytest.mark.parametrize("seed", sampled(range(8), lambda seed: seed < 4))
def test_a_worker_that_prefetches_beside_training_changes_nothing(seed: int, way: str) -> None:
    chance = random.Random(seed)
    one = Settings.random(chance)
    one.depth = chance.randrange(1, 4)
    one.capacity = BATCH * (one.depth + 2)
    run = Run(one)
    batches = [_batch(chance, run.settings.spread) for _ in range(300)]
    with _Worker(run.prefetch, batches, one.depth) as worker:
        for at, ids in enumerate(batches):
            ticket = worker.ticket(at)
            if at % 11 == 5:
                run.cache.end_untrained(ticket)
            else:
                begun = run.begin(ids, ticket, at)
                run.looked_up(ids, ticket)
                run.train(ids, ticket, begun)
            if at % 37 == 20:
                run.check_store()
            elif at % 11 == 7:
                run.copy()
            elif at % 11 == 0:
                run.keep(chance.choice([0.0, 1.0]))
            worker.room()
    run.check_store()
