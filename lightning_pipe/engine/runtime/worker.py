"""Worker thread of a thread group other than main. It takes tasks from a queue, in order."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_this_thread = threading.local()

JOIN_TIMEOUT = 60.0
# Seconds between two checks that the thread is still alive.
_LOOK = 1.0
# Maximum time (seconds) that the interpreter's exit waits for all workers together.
_EXIT_TIMEOUT = 5.0

# Queue of each thread that has not ended, also of those whose worker has been collected.
_queues: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Callable[[], None] | None]]
_queues = weakref.WeakKeyDictionary()


class Worker:
    """Daemon thread that runs submitted functions in order. The functions must not raise."""

    def __init__(self, group: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The thread only refers to the queue, so an unused worker can be collected, which ends its thread.
        self._thread = threading.Thread(
            target=_run_queued_calls, args=(self._queue,), name=f"lightning_pipe-{group}", daemon=True
        )
        weakref.finalize(self, self._queue.put, None)
        self._thread.start()
        _queues[self._thread] = self._queue

    def submit(self, call: Callable[[], None]) -> None:
        """Queue *call*."""
        self._queue.put(call)

    def wait_until_idle(self) -> None:
        """Wait until all functions queued so far have run, or the thread has ended."""
        done = threading.Event()
        self._queue.put(done.set)
        while self._thread.is_alive() and not done.wait(_LOOK):
            pass

    def close(self) -> bool:
        """Run the remaining functions and end the thread; False if it is stuck, for example in a collective."""
        self._queue.put(None)
        self._thread.join(JOIN_TIMEOUT)
        return not self._thread.is_alive()


def is_worker_thread() -> bool:
    """Return True if the calling thread is a worker's."""
    return getattr(_this_thread, "serves", False)


def _run_queued_calls(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    _this_thread.serves = True
    while (call := queue.get()) is not None:
        call()
        # Otherwise the last function, and the iteration it refers to, would stay alive until the next one arrives.
        del call


@atexit.register
def _end_worker_threads_at_exit() -> None:
    """End the workers of unclosed pipelines, which would abort the process if PyTorch returned to Python later."""
    queues, deadline = dict(_queues), time.monotonic() + _EXIT_TIMEOUT
    for queue in queues.values():
        queue.put(None)
    for thread in queues:
        thread.join(max(0.0, deadline - time.monotonic()))
