"""Runs a body that may deadlock, so that a deadlock is a failed test and not a suite that hangs."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Hang(BaseException):
    """Not an ``Exception``, which hypothesis would provoke again and again to find a smaller example."""


def within(seconds: float, body: Callable[[], T], what: object = "") -> T:
    """The value of *body*, run in a thread of its own."""
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(body())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = "\n".join(
            f"--- {names.get(ident)}\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )
        raise Hang(f"still running after {seconds} s: {what}\n{stacks}")
    if errors:
        raise errors[0]
    return values[0]
