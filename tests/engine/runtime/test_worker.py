from __future__ import annotations

import gc
import threading
import weakref

from lightning_pipe.engine.runtime.worker import Worker
from tests.engine.within import within
from tests.patience import HANG


class Held:
    def __call__(self) -> None:
        pass


def test_calls_run_in_order_in_a_thread_named_after_the_group() -> None:
    worker = Worker("w")
    log: list[tuple[int, str]] = []
    for index in range(5):
        worker.submit(lambda index=index: log.append((index, threading.current_thread().name)))  # type: ignore[misc]
    assert within(HANG, worker.close)
    assert log == [(index, "lightning_pipe-w") for index in range(5)]


def test_closing_ends_the_thread_and_may_be_repeated() -> None:
    worker = Worker("w")
    assert within(HANG, worker.close)
    assert within(HANG, worker.close)
    assert "lightning_pipe-w" not in [thread.name for thread in threading.enumerate()]


def test_a_call_that_has_run_is_not_kept_until_the_next_comes() -> None:
    worker = Worker("w")
    held = Held()
    freed = threading.Event()
    weakref.finalize(held, freed.set)
    worker.submit(held)
    del held
    assert freed.wait(HANG)
    worker.close()


def test_a_worker_that_is_forgotten_ends_its_thread() -> None:
    worker = Worker("forgotten")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "lightning_pipe-forgotten"]
    del worker
    gc.collect()
    within(HANG, thread.join)
