from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_pipe.loops.data.batch_source import BatchSource, Fetched
from lightning_pipe.loops.data.ledger import InFlightLedger, LedgerEntry


def numbered(count: int) -> Callable[[], Fetched]:
    remaining = iter(range(count))

    def fetch() -> Fetched:
        batch = next(remaining)
        return batch, batch == count - 1, {"given": batch + 1}

    return fetch


def test_a_batch_is_in_flight_from_its_fetch_until_it_is_trained() -> None:
    ledger = InFlightLedger(numbered(3))
    assert [next(ledger), next(ledger)] == [0, 1]
    assert (ledger.fetched, ledger.num_in_flight, ledger.trained) == (2, 2, 0)
    assert ledger.retire() == LedgerEntry(0, is_last=False, after={"given": 1})
    assert (ledger.fetched, ledger.num_in_flight, ledger.trained) == (2, 1, 1)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_batches_that_are_skipped_are_done_too(skipped: int) -> None:
    ledger = InFlightLedger(numbered(3))
    for index in range(3):
        next(ledger)
        (ledger.skip if index == skipped else ledger.retire)()
    assert ledger.done_before is not None
    assert ledger.last_done is not None
    assert [ledger.done_before.after, ledger.last_done.after] == [{"given": 2}, {"given": 3}]


def test_what_is_abandoned_comes_first_in_the_next_ledger() -> None:
    ledger = InFlightLedger(numbered(5), keeps_batches=True)
    for _ in range(3):
        next(ledger)
    ledger.retire()
    following = InFlightLedger(BatchSource(ledger._fetch, ledger.abandon()))
    assert list(following) == [1, 2, 3, 4]
    assert following.oldest.after == {"given": 2}


def test_a_batch_that_is_skipped_is_neither_trained_nor_abandoned() -> None:
    ledger = InFlightLedger(numbered(3), keeps_batches=True)
    next(ledger), next(ledger)
    ledger.skip()
    assert (ledger.num_in_flight, ledger.trained) == (1, 0)
    assert [fetch()[0] for fetch in ledger.abandon()] == [1]


def test_a_batch_that_was_abandoned_is_not_transferred_any_more() -> None:
    ledger = InFlightLedger(numbered(3))
    next(ledger), next(ledger)
    ledger.abandon()
    assert ledger.pop_next_transfer() is None
    next(ledger)
    entry = ledger.pop_next_transfer()
    assert entry is not None
    assert entry.index == 2
