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

    def issue(self) -> int:
        """Issue the next ticket. Only the thread that submits tasks calls this."""
        ticket = self._issued
        self._issued += 1
        return ticket

    def begin(self, ticket: int) -> None:
        """Wait for the turn of *ticket*. This thread holds the turn until :func:`submitted` or :meth:`end`."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn >= ticket)
        _current.turn = (self, ticket)

    def end(self, ticket: int) -> None:
        """End the turn of *ticket*. Also called for tasks that failed or were skipped; repeated calls do nothing."""
        _current.turn = None
        with self._condition:
            if ticket < self._turn:
                return
            self._passed.add(ticket)
            while self._turn in self._passed:
                self._passed.remove(self._turn)
                self._turn += 1
            self._condition.notify_all()


def submitted() -> None:
    """End the turn of the calling task, which has submitted all its collectives and will only wait from here.

    Does nothing outside a globally ordered task.
    """
    turn = getattr(_current, "turn", None)
    if turn is not None:
        sequencer, ticket = turn
        sequencer.end(ticket)
