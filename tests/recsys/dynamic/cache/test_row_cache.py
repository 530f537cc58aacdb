"""What a cache of rows promises, one promise at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError, PlanError
from lightning_pipe.recsys.dynamic.cache.id_map import LAST_TICK
from lightning_pipe.recsys.dynamic.cache.ticket import PinnedCacheSlots
from tests.patience import HANG
from tests.recsys.dynamic.small_table import Table, first_values


def test_an_evicted_row_comes_back_as_it_was() -> None:
    table = Table()
    table.train(1, 7, 7, -(2**63))
    for step in range(2, 6):
        table.train(step, *range(step * 10, step * 10 + 4))
    assert table.look(7, -(2**63)) == [(8.0, 1.5), (float(-(2**63)), 1.5)]
    assert table.cache.stats.evicted >= 12
    assert table.stored()[7] == (1, 1)


def test_an_evaluation_neither_makes_nor_counts_rows() -> None:
    table = Table()
    assert table.look(1, 2, 3, 4) == [(1.0, 0.5), (2.0, 0.5), (3.0, 0.5), (4.0, 0.5)]
    assert table.look(5, 6, 7, 8)[0] == (5.0, 0.5)
    table.cache.flush()
    assert table.stored() == {}
    assert list(table.cache.flush_and_scan_rows()) == []


def test_an_id_is_trained_from_the_batch_on_in_which_it_has_occurred_often_enough() -> None:
    table = Table(admission_threshold=3)
    for step in (1, 2):
        table.train(step, 9, 9, 9)
        assert table.look(9) == [(9.0, 0.5)]
    table.train(3, 9)
    assert table.look(9) == [(10.0, 1.5)]
    assert table.cache.stats.held_back == 2


def test_a_row_that_nobody_saw_for_long_starts_anew() -> None:
    table = Table(ttl=2)
    table.train(1, 5)
    table.train(3, 5)
    assert table.look(5) == [(7.0, 2.5)]
    table.train(6, 5)
    assert table.look(5) == [(6.0, 1.5)]
    table.cache.flush()
    assert table.stored() == {5: (1, 6)}
    assert table.cache.stats.expired == 1


def test_an_evaluation_reads_initial_values_of_rows_that_have_expired() -> None:
    table = Table(ttl=2)
    table.train(1, 5)
    table.cache.flush()
    table.train(4, 6)
    ticket = table.prefetch(5)
    table.cache.reset_expired_rows(ticket, 4)
    assert table.weights[ticket.slots, 0].tolist() == [5.0]
    table.cache.end_untrained(ticket)
    table.cache.flush()
    assert table.stored() == {6: (1, 4)}


def test_purge_erases_what_has_expired_cached_or_not() -> None:
    table = Table(ttl=3)
    table.train(1, 1, 2, 3, 4)
    table.train(2, 11, 12, 13)  # the first four have left, one of them perhaps not
    table.train(5, 1)  # starts anew
    table.cache.flush()
    assert table.cache.erase_expired_rows(5) == 3
    table.cache.flush()
    assert sorted(table.stored()) == [1, 11, 12, 13]
    assert table.cache.erase_expired_rows(6) == 3
    table.cache.flush()
    assert table.stored() == {1: (1, 5)}
    assert table.look(11) == [(11.0, 0.5)]


def test_more_rows_in_use_than_slots_are_refused_and_nothing_is_lost() -> None:
    table = Table()
    table.train(1, 1, 2)
    first, second = table.prefetch(1), table.prefetch(2, 3)
    message = (
        "this batch and 2 others in flight use 6 rows at the same time, 3 of them not cached yet, but the cache has 4"
    )
    with pytest.raises(InputError, match=message):
        table.prefetch(3, 4, 5, 6)
    table.cache.end_untrained(first)
    table.cache.end_untrained(second)
    # No row of the batch that failed is pinned.
    assert table.look(4, 5, 6, 7)[0] == (4.0, 0.5)
    assert table.look(1, 2) == [(2.0, 1.5), (3.0, 1.5)]


def test_a_flush_writes_what_was_trained_and_nothing_of_batches_to_come() -> None:
    table = Table()
    table.train(1, 1)
    to_come, begun = table.prefetch(1, 2), table.prefetch(1, 3)
    table.cache.begin_batch_and_count_ids(begun, 2)
    table.cache.flush()
    assert table.stored() == {1: (1, 1)}
    table.backward(begun)
    table.cache.end_trained(begun)
    table.cache.end_untrained(to_come)
    written = table.cache.stats.written
    table.cache.flush()
    assert table.stored() == {1: (2, 2), 3: (1, 2)}
    assert table.cache.stats.written == written + 2
    table.cache.flush()
    assert table.cache.stats.written == written + 2


def test_after_forget_rows_come_from_the_store_and_tickets_have_ended() -> None:
    table = Table()
    table.train(1, 1)
    table.cache.flush()
    table.train(2, 1, 2)
    ticket = table.prefetch(1)
    table.cache.clear_without_writing()
    with pytest.raises(PlanError, match="rows of a batch in flight were replaced"):
        table.cache.begin_batch_and_count_ids(ticket, 3)
    table.cache.end_untrained(ticket)
    assert table.look(1, 2) == [(2.0, 1.5), (2.0, 0.5)]
    table.train(1, 1)


def test_a_batch_that_began_and_was_discarded_was_not_seen() -> None:
    table = Table(ttl=5)
    table.train(1, 1)
    ticket = table.prefetch(1, 2)
    table.cache.begin_batch_and_count_ids(ticket, 2)
    table.backward(ticket)
    table.cache.end_untrained(ticket)
    table.cache.end_untrained(ticket)
    # What backward did to a row that was there stays; a row that was not there is not.
    assert table.look(1, 2) == [(3.0, 2.5), (2.0, 0.5)]
    table.cache.flush()
    assert table.stored() == {1: (1, 1)}


def test_a_ticket_that_is_forgotten_is_discarded() -> None:
    table = Table()
    table.cache.begin_batch_and_count_ids(table.prefetch(1, 2, 3, 4), 1)
    gc.collect()
    assert table.look(5, 6, 7, 8)[0] == (5.0, 0.5)
    table.cache.flush()
    assert table.stored() == {}


def test_a_discard_in_a_finalizer_that_interrupts_the_cache_does_not_wait() -> None:
    held: list[PinnedCacheSlots] = []

    def interrupting(ids: Tensor) -> Tensor:
        if held:
            table.cache.end_untrained(held.pop())
        return first_values(ids)

    table = Table(initial=interrupting, ttl=1)
    table.train(1, 5)
    held.append(table.prefetch(6))
    table.train(3, 5)  # starts anew: begin() calls the function of initial values, and holds the lock
    assert not held
    assert table.look(1, 2, 3, 4)[3] == (4.0, 0.5)


def test_rows_are_all_rows_once_as_they_were_at_the_call() -> None:
    table = Table(ttl=10)
    for step in range(1, 6):
        table.train(step, step, step + 1)
    found = table.cache.flush_and_scan_rows(chunk=2)
    table.train(6, 1)
    chunks = list(found)
    assert [chunk.ids.tolist() for chunk in chunks] == [[1, 2], [3, 4], [5, 6]]
    assert torch.cat([chunk.counts for chunk in chunks]).tolist() == [1, 2, 2, 2, 2, 1]
    assert torch.cat([chunk.last_seen for chunk in chunks]).tolist() == [1, 2, 3, 4, 5, 5]
    weights = torch.cat([chunk.columns[0] for chunk in chunks])
    assert weights[:, 0].tolist() == [2, 4, 5, 6, 7, 7]
    assert torch.cat([chunk.columns[1] for chunk in chunks]).tolist() == [1.5, 2.5, 2.5, 2.5, 2.5, 1.5]
    assert [key for chunk in table.cache.flush_and_scan_rows(since=5) for key in chunk.ids.tolist()] == [1, 5, 6]


@pytest.mark.parametrize("through", ["flush", "eviction"])
def test_rows_with_nan_are_not_stored_where_that_is_asked_for(through: str) -> None:
    table = Table(check_nan=True)
    ticket = table.prefetch(-3, 4)
    table.cache.begin_batch_and_count_ids(ticket, 1)
    table.states[ticket.slots[:1]] = float("nan")
    table.cache.end_trained(ticket)
    with pytest.raises(InputError, match=r"table 't': 1 row\(s\) contain NaN, with ids -3; "):
        table.cache.flush() if through == "flush" else table.prefetch(5, 6, 7, 8)
    assert table.stored() == {}
    table.states[ticket.slots[:1]] = 0.0
    table.look(5, 6, 7, 8)
    assert sorted(table.stored()) == [-3, 4]


@pytest.mark.parametrize("method", ["read", "write"])
def test_an_error_of_the_store_leaves_the_cache_as_it_was(method: str) -> None:
    table = Table()
    table.train(1, 1, 2, 3, 4)
    table.store.failing.add(method)
    for _ in range(2):
        with pytest.raises(OSError, match=f"{method} fails"):
            table.prefetch(4, 5, 6, 7)
    table.store.failing.clear()
    assert table.look(4, 5, 6, 7) == [(5.0, 1.5), (5.0, 0.5), (6.0, 0.5), (7.0, 0.5)]
    assert table.look(1, 2, 3, 4) == [(2.0, 1.5), (3.0, 1.5), (4.0, 1.5), (5.0, 1.5)]


def test_a_function_of_initial_values_that_fails_leaves_the_cache_as_it_was() -> None:
    calls: list[int] = []

    def fails_once(ids: Tensor) -> Tensor:
        calls.append(1)
        return first_values(ids) if len(calls) > 1 else ids

    table = Table(initial=fails_once)
    with pytest.raises(InputError, match="function of initial values"):
        table.prefetch(1, 2, 3, 4)
    assert table.look(5, 6, 7, 8)[0] == (5.0, 0.5)


def test_a_time_to_live_that_ends_before_a_batch_that_has_begun_is_trained_is_refused() -> None:
    table = Table(ttl=2)
    tickets = [table.prefetch(step) for step in (1, 2, 3, 4)]
    for step in (1, 2, 3):
        table.cache.begin_batch_and_count_ids(tickets[step - 1], step)
    with pytest.raises(PlanError, match=r"ttl=2, and batch 4 begins before batch 1 is trained.* at least 3"):
        table.cache.begin_batch_and_count_ids(tickets[3], 4)
    table.cache.end_trained(tickets[0])
    table.cache.begin_batch_and_count_ids(tickets[3], 4)


def test_use_is_noted_for_ever(way: str) -> None:
    table = Table()
    table.train(1, 1, 2, 3)
    table.cache._slots._tick = LAST_TICK - 1
    for step in range(2, 6):
        table.train(step, 1)
    table.train(6, 2, 3, 4)
    # The least recently used one leaves.
    table.train(7, 5)
    assert table.cache.stats.hits == 6
    table.train(8, 2, 3, 4)
    assert table.cache.stats.hits == 9


def test_training_goes_on_while_a_prefetch_waits_for_the_disk() -> None:
    table = Table(capacity=8)
    table.train(1, 1, 2)
    reading, go_on = threading.Event(), threading.Event()
    read: Callable[..., Any] = table.store.read

    def slow(name: str, keys: Any) -> Any:
        reading.set()
        assert go_on.wait(HANG)
        return read(name, keys)

    ticket = table.prefetch(1)
    table.store.read = slow  # type: ignore[method-assign, assignment]
    found: list[PinnedCacheSlots] = []
    worker = threading.Thread(target=lambda: found.append(table.prefetch(1, 3)))
    worker.start()
    assert reading.wait(HANG)
    # The worker is at the disk. A batch is trained meanwhile.
    table.cache.begin_batch_and_count_ids(ticket, 2)
    table.backward(ticket)
    table.cache.end_trained(ticket)
    go_on.set()
    worker.join(HANG)
    table.cache.begin_batch_and_count_ids(found[0], 3)
    assert table.weights[found[0].slots, 0].tolist() == [3.0, 3.0]


# ---------------------------------------------------------------------- repeated training


def test_repeated_training_reads_the_rows_of_a_batch_each_time_and_leaves_the_cache_as_it_was() -> None:
    table = Table(capacity=6)
    for step, id in enumerate((1, 2, 3, 4, 5, 6, 7)):
        table.train(step + 1, id)
    waiting = table.prefetch(7)
    before = [table.look(id) for id in (7, 6, 1)], table.stored()
    shared = table.shared
    shared.buffer_writes()
    table.cache.set_repeated_training(True)
    kept = table.cache.snapshot()
    reads = []
    for step in range(8, 12):
        ids, read = (1, 2, 7) if step % 2 else (3, 7), table.cache.stats.read
        table.cache.evict_before_repeated_prefetch(torch.tensor(ids))
        table.train(step, *ids)
        reads.append(table.cache.stats.read - read)
    assert reads[2:] == reads[:2] != [0, 0]
    again = table.cache.stats.read
    for _ in range(2):
        table.cache.end_untrained(table.cache.prefetch(torch.tensor([1, 2, 7])))
    assert table.cache.stats.read == again
    table.cache.restore(kept)
    table.cache.set_repeated_training(False)
    shared.discard_writes()
    assert ([table.look(id) for id in (7, 6, 1)], table.stored()) == before
    table.cache.begin_batch_and_count_ids(waiting, 8)
    table.backward(waiting)
    table.cache.end_trained(waiting)
    table.cache.flush()
    assert table.stored()[7] == (2, 8)
