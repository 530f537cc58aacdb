"""Common submission order for collectives of different threads, the same on every rank.

Collectives of one process group must be submitted in the same order on all ranks. Tickets are issued in the plan's
order. A task holds its turn while it submits collectives and ends it *before* it waits for them; a turn held during the
wait would block the other threads.
"""

from __future__ import annotations

import threading

_current = threading.local()


class SubmissionSequencer:
    """Gives turns to tickets in the order in which they were issued."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._issued = 0
        self._turn = 0
        self._passed: set[int] = set()

    def issue_ticket(self) -> SubmissionTicket:
        """Issue the next ticket. Only the thread that submits tasks calls this."""
        number = self._issued
        self._issued += 1
        return SubmissionTicket(self, number)

    def begin(self, number: int) -> None:
        """Wait for the turn of the ticket *number*."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn >= number)

    def end(self, number: int) -> None:
        """End the turn of the ticket *number*; repeated calls do nothing."""
        with self._condition:
            if number < self._turn:
                return
            self._passed.add(number)
            while self._turn in self._passed:
                self._passed.remove(self._turn)
                self._turn += 1
            self._condition.notify_all()


class SubmissionTicket:
    """Place of one run of a task in the order of submissions."""

    __slots__ = ("_number", "_sequencer")

    def __init__(self, sequencer: SubmissionSequencer, number: int) -> None:
        self._sequencer = sequencer
        self._number = number

    def begin(self) -> None:
        """Wait for the turn. The calling thread then holds it until :func:`end_submission_turn` or :meth:`end`."""
        self._sequencer.begin(self._number)
        _current.ticket = self

    def end(self) -> None:
        """End the turn. Also called for tasks that failed or were skipped; repeated calls do nothing."""
        _current.ticket = None
        self._sequencer.end(self._number)


def end_submission_turn() -> None:
    """End the turn of the calling task, which has submitted all its collectives and will only wait from here.

    Does nothing outside a globally ordered task.
    """
    ticket = getattr(_current, "ticket", None)
    if ticket is not None:
        ticket.end()
