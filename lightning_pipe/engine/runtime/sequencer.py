"""One order of submission for tasks of different threads, the same on every rank.

Collectives of one process group must be submitted in the same order everywhere. Tickets are handed out in the plan's
order; a task holds its turn while it submits and passes it on *before* it waits, since a turn held across a wait would
make the other threads wait too.
"""

from __future__ import annotations

import threading

_current = threading.local()


class SubmissionSequencer:
    """Hands turns from ticket to ticket, in order."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._issued = 0
        self._turn = 0
        self._passed: set[int] = set()

    def issue(self) -> int:
        """The next ticket; called by the one thread that submits tasks."""
        ticket = self._issued
        self._issued += 1
        return ticket

    def begin(self, ticket: int) -> None:
        """Wait until it is *ticket*'s turn, and hold it in this thread until :func:`submitted` or :meth:`end`."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn >= ticket)
        _current.turn = (self, ticket)

    def end(self, ticket: int) -> None:
        """Pass *ticket*'s turn on, if that was not done yet; also for a task that failed or was skipped."""
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
    """Say from inside a globally ordered task that it has submitted all its collectives and will only wait from here.

    Anywhere else it does nothing.
    """
    turn = getattr(_current, "turn", None)
    if turn is not None:
        sequencer, ticket = turn
        sequencer.end(ticket)
