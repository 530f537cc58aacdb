"""Two calls that take turns, so that one computes while the other waits for its messages.

A forward and a backward each run in a thread. One of them runs at a time, until it has sent a message that it will have
to wait for, and passes the turn::

    forward   attention, send tokens ─┐                    ┌─ wait, experts, send results ─┐           ┌─ wait ...
    backward                          └─ head, send grads ─┘                               └─ wait ... ┘

The order depends on the model alone. All ranks therefore send in the same order, and results are those of one call
after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from itertools import pairwise

import torch

from lightning_pipe.engine.runtime.thread_state import get_thread_state, use_thread_state

_FIRST, _SECOND = range(2)


class _OtherCallFailed(BaseException):
    """Ends a call whose other call has failed. Not an Exception, which a stage would report as its own failure."""


class ForwardBackwardOverlap:
    """Two calls that take turns. They share the caller's random state, which the second call must not advance."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._changed = threading.Condition()
        self._turn = _FIRST
        self._ended = [False, False]
        self._failures: list[BaseException | None] = [None, None]
        self._passes: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
        self._random: list[torch.Tensor] = []  # at the end of the first call

    def run(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Run both calls, the first in this thread."""
        global _current
        assert _current is None
        stream = None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)
        state = get_thread_state()

        def run_second() -> None:
            if stream is not None:
                torch.accelerator.set_device_index(self._device)
                torch.accelerator.set_stream(stream)
            # At the end of the outermost autocast of a thread, the casts that all threads share are dropped.
            torch.autocast_increment_nesting()
            with use_thread_state(state):
                second()

        thread = threading.Thread(
            target=copy_context().run,
            args=(self._run_call_in_turn, _SECOND, run_second),
            name="overlapped backward",
            daemon=True,
        )
        _current = self
        try:
            thread.start()
            self._run_call_in_turn(_FIRST, first)
            thread.join()
            _restore_random_state(self._device, self._random)
        finally:
            _current = None
        for failure in self._failures:
            if failure is not None and not isinstance(failure, _OtherCallFailed):
                raise failure

    def yield_to_other(self) -> None:
        """Let the other call run until it passes the turn back, or ends."""
        side = self._turn  # only the call that has the turn runs
        if self._ended[1 - side]:
            return
        random = _random_state(self._device)
        released, regained = self._passes[side]
        released.append(self._clock())
        self._pass_turn(1 - side)
        self._wait_for_turn(side)
        regained.append(self._clock())
        _restore_random_state(self._device, random)
        failure = self._failures[1 - side]
        if failure is not None:
            raise _OtherCallFailed

    def cut_pauses_from_span(self, start: float, end: float) -> list[tuple[float, float]]:
        """Parts of a span of the call that has the turn, without those in which the other call ran."""
        released, regained = self._passes[self._turn]
        pauses = [pause for pause in zip(released, regained, strict=True) if pause[0] >= start]
        times = [start, *(moment for pause in pauses for moment in pause), end]
        return list(pairwise(times))[::2]

    def _run_call_in_turn(self, side: int, call: Callable[[], object]) -> None:
        self._wait_for_turn(side)
        try:
            if self._failures[1 - side] is None:
                call()
        except BaseException as error:
            self._failures[side] = error
        finally:
            if side == _FIRST:
                self._random = _random_state(self._device)
            self._ended[side] = True
            self._pass_turn(1 - side)

    def _pass_turn(self, side: int) -> None:
        with self._changed:
            self._turn = side
            self._changed.notify_all()

    def _wait_for_turn(self, side: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == side)


_current: ForwardBackwardOverlap | None = None


def yield_to_overlapped_pass() -> None:
    """Let the other of two calls that take turns run, after a message was sent and before it is waited for."""
    if _current is not None:
        _current.yield_to_other()


def exclude_other_call_time(start: float, end: float) -> list[tuple[float, float]]:
    """Parts of a span of a call, without those in which the call that it takes turns with ran."""
    return [(start, end)] if _current is None else _current.cut_pauses_from_span(start, end)


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _restore_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)
