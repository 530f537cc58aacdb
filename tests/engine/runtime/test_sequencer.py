from __future__ import annotations

import threading

from lightning_pipe.engine.runtime.sequencer import SubmissionSequencer, SubmissionTicket, submitted
from tests.engine.within import within
from tests.patience import HANG


def test_turns_come_in_the_order_of_issue_whatever_thread_asks_first() -> None:
    sequencer = SubmissionSequencer()
    tickets = [sequencer.issue() for _ in range(4)]
    log: list[SubmissionTicket] = []
    started = threading.Barrier(len(tickets))

    def take(ticket: SubmissionTicket) -> None:
        started.wait()
        ticket.begin()
        log.append(ticket)
        ticket.end()

    threads = [threading.Thread(target=take, args=(ticket,)) for ticket in reversed(tickets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        within(HANG, thread.join)
    assert log == tickets


def test_a_turn_passed_on_by_submitted_lets_the_next_submit_while_the_first_goes_on() -> None:
    sequencer = SubmissionSequencer()
    first, second = sequencer.issue(), sequencer.issue()
    second_has_submitted = threading.Event()

    def take_second() -> None:
        second.begin()
        second_has_submitted.set()
        second.end()

    def run() -> None:
        thread = threading.Thread(target=take_second)
        thread.start()
        first.begin()
        assert not second_has_submitted.is_set()
        submitted()
        second_has_submitted.wait()
        first.end()  # once more does no harm
        thread.join()

    within(HANG, run)


def test_a_ticket_that_is_never_taken_is_skipped_once_it_is_ended() -> None:
    sequencer = SubmissionSequencer()
    first, second, third = (sequencer.issue() for _ in range(3))
    second.end()
    first.end()
    within(HANG, third.begin)


def test_submitted_outside_an_ordered_task_does_nothing() -> None:
    submitted()
