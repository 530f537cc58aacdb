"""A thread group other than main: one thread that takes its tasks from a queue, in order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

JOIN_TIMEOUT = 60.0
# Seconds between two looks at whether a thread still lives.
_LOOK = 1.0


class Worker:
    """A daemon thread that calls what it is given, in the order given. The callables must not raise.

    Args:
        group: the thread group's name; the thread is called ``lightning_pipe-<group>``.
    """

    def __init__(self, group: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The thread holds the queue only: a worker that is forgotten is still collected, and that ends its thread.
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=f"lightning_pipe-{group}", daemon=True)
        weakref.finalize(self, self._queue.put, None)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Queue *call*."""
        self._queue.put(call)

    def settle(self) -> None:
        """Wait until all calls queued so far have run, or the thread has ended."""
        done = threading.Event()
        self._queue.put(done.set)
        while self._thread.is_alive() and not done.wait(_LOOK):
            pass

    def close(self) -> bool:
        """Let the queue run empty, end the thread and wait for it; may be called again.

        Returns:
            Whether the thread has ended; a call that is stuck in a peer's collective can outlast a wait of 60 seconds.
        """
        self._queue.put(None)
        self._thread.join(JOIN_TIMEOUT)
        return not self._thread.is_alive()


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := queue.get()) is not None:
        call()
        # Without this the last call, and the iteration it holds, would live until the next one comes.
        del call
