from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_pipe.loops.ledger import InFlightLedger, LedgerEntry


def numbered(count: int) -> Callable[[], tuple[int, bool]]:
    remaining = iter(range(count))

    def fetch() -> tuple[int, bool]:
        batch = next(remaining)
        return batch, batch == count - 1

    return fetch


def test_a_batch_is_in_flight_from_its_fetch_until_it_is_trained() -> None:
    ledger = InFlightLedger(numbered(3))
    assert [next(ledger), next(ledger)] == [0, 1]
    assert (ledger.fetched, ledger.in_flight, ledger.trained) == (2, 2, 0)
    assert ledger.retire() == LedgerEntry(0, is_last=False)
    assert (ledger.fetched, ledger.in_flight, ledger.trained) == (2, 1, 1)


def test_the_last_batch_is_known_when_it_is_the_oldest_and_not_when_it_is_fetched() -> None:
    ledger = InFlightLedger(numbered(2))
    next(ledger), next(ledger)
    assert not ledger.oldest.is_last
    ledger.retire()
    assert ledger.oldest.is_last


def test_an_end_of_the_data_changes_nothing_in_the_ledger() -> None:
    ledger = InFlightLedger(numbered(1))
    next(ledger)
    with pytest.raises(StopIteration):
        next(ledger)
    assert (ledger.fetched, ledger.in_flight) == (1, 1)


def test_what_is_given_up_is_counted_and_was_not_trained() -> None:
    ledger = InFlightLedger(numbered(3))
    for _ in range(3):
        next(ledger)
    ledger.retire()
    assert ledger.give_up() == 2
    assert (ledger.fetched, ledger.in_flight, ledger.trained) == (3, 0, 1)


def test_a_fetch_that_raises_leaves_no_batch_behind() -> None:
    def broken() -> tuple[int, bool]:
        raise OSError("unreadable")

    ledger = InFlightLedger(broken)
    with pytest.raises(OSError, match="unreadable"):
        next(ledger)
    assert (ledger.fetched, ledger.in_flight) == (0, 0)
