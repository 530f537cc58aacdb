"""Finds races between the streams of a device that is not there.

Real tasks run on CPU tensors, each on its thread's current stream of a fake device (`tests.engine.device_tensors`).
Every operator reports which storages it reads and writes, and PyTorch's own sanitizer, which is plain Python, tells
whether the accesses of two streams are ordered::

    operator ──► accesses to storages ──┐
    records and waits of events ────────┼──► torch.cuda._sanitizer.EventHandler ──► findings
    host reads, signals of threads ─────┘    last write and reads of each storage; a clock of all streams for each

A thread of the host is a stream as well: work that it submits is ordered after all that it has done and waited for. A
thread receives the clock of another one only where the engine submits work or sets a signal. So the findings do not
depend on the speed of threads.

The detector also finds waits for events without a record, which return at once, and memory that PyTorch's caching
allocator would give to another tensor too early (see `Detector._allocated`). Host reads are listed in `Detector.syncs`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch.cuda import _sanitizer

from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.ranks.current_tasks import current_tasks
from tests.engine.findings import Finding, Site, Span, Storage, Sync, Use, overlap, span_of

# Frames of these modules say nothing about where an access comes from.
_BETWEEN = (
    "torch.",
    "tests.engine.race_detector",
    "tests.engine.device_tensors",
    "tests.engine.operators",
    "contextlib",
    "functools",
    "unittest",
)


class FakeStream:
    """Stream of the fake device, with a number in the sanitizer."""

    def __init__(self, detector: Detector, device: Any = None, name: str = "") -> None:
        self._detector = detector
        self.number = self.cuda_stream = next(detector.numbers)
        self.device = torch.device("cuda", index_of(device))
        self.name = name or f"stream {self.number}"
        detector.handler._handle_stream_creation(self.number)

    def wait_event(self, event: FakeEvent) -> None:
        self._detector.wait(self.number, event)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self._detector)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._detector.synced(self, "Stream.synchronize")


class FakeEvent:
    """Event of the fake device. Times are all the same."""

    def __init__(self, detector: Detector, enable_timing: bool = False) -> None:
        self._detector = detector
        self.number = next(detector.numbers)
        self.recorded: FakeStream | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self._detector.current_stream()
        with self._detector.lock:
            self._detector.submitted(stream.number)
            self._detector.handler._handle_event_record(self.number, stream.number)
        self.recorded = stream

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self._detector.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._detector.wait(self._detector.host(), self)
        if self.recorded is not None:
            self._detector.note_sync(self.recorded, "Event.synchronize")

    def elapsed_time(self, later: FakeEvent) -> float:
        return 0.0


class Detector:
    """Fake streams, the accesses to storages, and what was found."""

    def __init__(self) -> None:
        self.handler = _sanitizer.EventHandler()
        self.lock = threading.RLock()
        self.numbers = count(1)
        self.findings: list[Finding] = []
        self.syncs: list[Sync] = []
        self.listening = True
        self._storages: dict[int, Storage] = {}
        self._free: dict[int, list[Storage]] = {}
        self._local = threading.local()
        self._default: dict[int, FakeStream] = {}

    # ------------------------------------------------------------------ streams and the host

    def default_stream(self, device: Any = None) -> FakeStream:
        with self.lock:
            index = index_of(device)
            if index not in self._default:
                self._default[index] = FakeStream(self, index, f"default {index}" if index else "default")
            return self._default[index]

    def current_stream(self, device: Any = None) -> FakeStream:
        """The calling thread's."""
        stream: FakeStream | None = getattr(self._local, "streams", {}).get(index_of(device))
        return stream or self.default_stream(device)

    def enter_stream(self, stream: FakeStream) -> None:
        """Make it the calling thread's current one."""
        self._local.streams = {**getattr(self._local, "streams", {}), stream.device.index: stream}

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        before = getattr(self._local, "streams", {})
        if stream is not None:
            self.enter_stream(stream)
        try:
            yield
        finally:
            self._local.streams = before

    def host(self) -> int:
        """The calling thread's number as a stream."""
        if not hasattr(self._local, "host"):
            with self.lock:
                self._local.host = -next(self.numbers)
                self.handler._handle_stream_creation(self._local.host)
        number: int = self._local.host
        return number

    def clock(self) -> dict[int, int]:
        """Last work of each stream that the calling thread's next work is ordered after."""
        with self.lock:
            return dict(self.handler.syncs.current_sync_states[self.host()])

    def learn(self, clock: dict[int, int]) -> None:
        """Order the calling thread's next work after the work in a clock of another thread."""
        with self.lock:
            self.handler.syncs._state_wait_for_other(self.handler.syncs.current_sync_states[self.host()], clock)

    def submitted(self, stream: int) -> None:
        """Order the work that the calling thread submits to a stream after what the thread has done."""
        states = self.handler.syncs.current_sync_states
        self.handler.syncs._state_wait_for_other(states[stream], states[self.host()])

    def wait(self, stream: int, event: FakeEvent) -> None:
        with self.lock:
            if event.recorded is None:
                here = self.site()
                self._found(Finding("wait without a record", "it returns at once", here, here))
            else:
                self.handler._handle_event_wait(event.number, stream)

    def synced(self, stream: FakeStream, operator: str) -> None:
        """The host waits for all work of a stream."""
        with self.lock:
            self.submitted(stream.number)
            states = self.handler.syncs.current_sync_states
            self.handler.syncs._state_wait_for_other(states[self.host()], states[stream.number])
        self.note_sync(stream, operator)

    def note_sync(self, stream: FakeStream, operator: str) -> None:
        if self.listening:
            self.syncs.append(Sync(self.site(), operator, stream.name))

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all streams."""
        with self.lock:
            states = self.handler.syncs.current_sync_states
            for state in list(states.values()):
                self.handler.syncs._state_wait_for_other(states[self.host()], state)
        self.note_sync(self.current_stream(), "synchronize")

    # ------------------------------------------------------------------ storages

    def storage(self, tensor: torch.Tensor, place: int | None = None, new: bool = False) -> Storage | None:
        """The storage of a tensor; None if it has no memory."""
        try:
            memory = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a subclass that has no memory
            return None
        if memory.nbytes() == 0:
            return None
        with self.lock:
            key = memory._cdata
            found = self._storages.get(key)
            if found is None:
                place = 0 if place is None else place
                stream = self.current_stream(place) if new and place >= 0 else None
                if stream is not None:
                    self._allocated(stream)
                found = self._storages[key] = Storage(place, stream, self.site())
                weakref.finalize(memory, self._freed, key, found)
            return found

    def uses_of(self, tensor: torch.Tensor) -> list[Use]:
        found = self.storage(tensor)
        return [] if found is None else [(found, span_of(tensor))]

    def put(self, tensor: torch.Tensor, place: int) -> None:
        """Say where the memory of a tensor is."""
        if (found := self.storage(tensor, place)) is not None:
            found.place = place

    def access(self, stream: int, reads: Iterable[Use], writes: Iterable[Use], operator: str) -> None:
        """Report an operator that runs on a stream, or on the host if that is a thread's number."""
        if not self.listening:
            return
        with self.lock:
            self.submitted(stream)
            written, read = self._touched(writes), self._touched(reads)
            spans: dict[int, Any] = {**read, **written}
            errors = self.handler._handle_kernel_launch(
                stream, set(read) - set(written), set(written), set(), operator, spans
            )
            here = self.site()
            for storage, _ in (*reads, *writes):
                storage.uses[stream], storage.user = (self.handler.seq_num, here), self.host()
            for error in errors:
                assert isinstance(error, _sanitizer.UnsynchronizedAccessError)
                first, second = error.previous_access, error.current_access
                # The order of the host's threads is the engine's, and not all of their hand-overs are known here.
                on_device = first.stream > 0 or second.stream > 0
                if on_device and any(overlap(one, other) for one in first.aliases for other in second.aliases):  # type: ignore[arg-type]
                    what = f"{first.operator} is {first.type} what {second.operator} is {second.type}"
                    sites: Any = first.stack_trace[0], second.stack_trace[0]
                    self._found(Finding("race", what, *sites))

    def _touched(self, uses: Iterable[Use]) -> dict[int, list[Span]]:
        """The sanitizer's numbers of all parts of storages that overlap with the used ones, which go with them."""
        found: dict[int, list[Span]] = {}
        for storage, span in uses:
            if span not in storage.spans:
                storage.spans[span] = next(self.numbers)
            for other, number in storage.spans.items():
                if overlap(span, other):
                    found.setdefault(number, []).append(span)
        return found

    def recorded(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """``Tensor.record_stream``."""
        if (found := self.storage(tensor)) is not None:
            found.recorded.add(stream.number)

    def _freed(self, key: int, storage: Storage) -> None:
        with self.lock:
            del self._storages[key]
            for number in storage.spans.values():
                self.handler._handle_memory_deallocation(number)
            if storage.stream is not None:
                # Uses that the thread has waited for are complete. Gloo's threads may hold memory longest, unlike
                # NCCL's: the thread that used it last then stands for them.
                thread = self.host() if hasattr(self._local, "host") else storage.user
                over = self.handler.syncs.current_sync_states.get(thread, {})
                storage.uses = {one: use for one, use in storage.uses.items() if use[0] > over.get(one, -1)}
                self._free.setdefault(storage.stream.number, []).append(storage)

    def _allocated(self, stream: FakeStream) -> None:
        """Apply the caching allocator's rule: freed memory is given to the next tensor of the stream that it is of.

        Uses on another stream must be over by then: either that stream was recorded, and the allocator waits for it,
        or the memory's own stream has waited for the use, or the thread that freed it, or the one that allocates.
        """
        after = (stream.number, self.host())
        for storage in self._free.pop(stream.number, ()):
            for other, (sequence, site) in storage.uses.items():
                if other < 0 or other == stream.number or other in storage.recorded:
                    continue
                if not any(self.handler.syncs.is_ordered_after(one, sequence, other) for one in after):
                    what = f"memory of {stream.name} used on another stream without record_stream"
                    self._found(Finding("reused too early", what, storage.made, site))

    def _found(self, finding: Finding) -> None:
        if self.listening:
            self.findings.append(finding)

    # ------------------------------------------------------------------ where

    @contextmanager
    def task(self, name: str, traced: bool = False) -> Iterator[None]:
        """Stand in for the engine's ``profiler_range``."""
        before = getattr(self._local, "task", "")
        self._local.task = name
        try:
            yield
        finally:
            self._local.task = before

    def _task(self) -> str:
        """Task of the calling thread. A task without waits is called directly, outside :meth:`task`."""
        task: str = getattr(self._local, "task", "")
        if task or threading.current_thread() is not threading.main_thread() or MAIN not in current_tasks:
            return task
        name, _, has_ended = current_tasks[MAIN]
        return "" if has_ended else name

    def site(self) -> Site:
        frame: Any = sys._getframe(1)
        innermost = ""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if not module.startswith(_BETWEEN) and module != "torch":
                # The function around a comprehension, which has a frame of its own before Python 3.12.
                names = [part for part in frame.f_code.co_qualname.split(".") if not part.startswith("<")]
                name = names[-1] if names else frame.f_code.co_name
                here = f"{module.removeprefix('lightning_pipe.')}.{name}:{frame.f_lineno}"
                innermost = innermost or here
                if module.startswith("lightning_pipe"):
                    return Site(self._task(), innermost, here)
            frame = frame.f_back
        return Site(self._task(), innermost, innermost)


class _Stacks:
    """Stands in for ``traceback`` in the sanitizer, whose stack of each access would take most of the time."""

    def __init__(self, site: Callable[[], Site]) -> None:
        self._site = site
        self.StackSummary = self

    def walk_stack(self, frame: Any) -> Any:
        return frame

    def extract(self, frames: Any, lookup_lines: bool = True) -> list[Site]:
        return [self._site()]


@contextmanager
def cheap_stacks(detector: Detector) -> Iterator[None]:
    with mock.patch.object(_sanitizer, "traceback", _Stacks(detector.site)):
        yield


def index_of(device: Any) -> int:
    """Index of a device that is given in any of PyTorch's ways."""
    if isinstance(device, int):
        return device
    return 0 if device is None else torch.device(device).index or 0
