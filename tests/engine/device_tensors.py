"""CPU tensors that play those of a GPU: for the package they are on ``cuda``, and their accesses are reported.

A function mode stands where a device is named: factories, copies and ``Tensor.device``. A dispatch mode stands below
autograd, and sees every operator with what it reads and writes (`tests.engine.race_detector`). The engine gives both
modes to its workers.

Where memory is
    of a factory      on the device, if one is named: ``cuda``, or the device of a library's module. On the host, if
                      none is, or "cpu" as a string.
    of an operator    on the device, if any input is.
    of `on_host`      on the host, pinned: batches of a loader.
    of anything else  on the device since before all work: parameters, tables.

Artefacts of the CPU, which are no findings
    - TorchRec and FBGEMM are built for the CPU, so their own branches for CUDA do not run, and they see CPU tensors.
    - Autograd of a GPU runs a node on the stream of its forward, and orders streams between nodes. Here one thread
      runs all nodes, and hooks do the same (`_on_stream_of_forward`).
    - A collective runs on a stream of its process group, as with NCCL, and not on Gloo's threads.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, ArgumentHandler, zip_arguments
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_pipe.engine.runtime import executor
from lightning_pipe.engine.runtime.worker import Worker
from tests.engine.race_detector import (
    PAGEABLE,
    PINNED,
    Detector,
    FakeEvent,
    FakeStream,
    Storage,
    Use,
    cheap_stacks,
    span_of,
)

# Arguments that collectives write and read, by position. Their schemas do not say.
_COLLECTIVES = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"), ((0,), (0,))),
    **dict.fromkeys(("allgather_", "_allgather_base_", "allgather_coalesced_", "gather_"), ((0,), (1,))),
    **dict.fromkeys(("alltoall_", "alltoall_base_", "reduce_scatter_", "_reduce_scatter_base_"), ((0,), (1,))),
    **{"scatter_": ((0,), (1,)), "send": ((), (0,)), "recv_": ((0,), ()), "barrier": ((), ())},
}
# Operators whose result the host needs: a number, or the size of the output.
_HOST_NEEDS = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"),
    *("aten::unique_consecutive", "aten::unique_dim", "aten::bincount"),
}
_COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy"}
# Messages between hosts: their device is the CPU where the backend has one.
_FOR_THE_HOST = ("lightning_pipe.engine.ranks", "torch.distributed")
_BACK = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class Accelerator(Detector):
    """Takes the place of ``torch.cuda``. Inside `watched`, all operators of its threads are reported."""

    def __init__(self) -> None:
        super().__init__()
        self.of_collectives: WeakKeyDictionary[Any, list[FakeEvent]] = WeakKeyDictionary()
        self.of_groups: dict[str, FakeStream] = {}
        self.here = _Here()

    # As torch.cuda spells them.
    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:  # noqa: N802
        return FakeStream(self, device)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, enable_timing)

    def is_available(self) -> bool:
        return False  # PyTorch itself would call the driver

    def on_host(self, batch: Any) -> Any:
        """The batch, whose tensors are in pinned memory of the host."""
        for tensor in tensors_of(batch):
            self.put(tensor, PINNED)
        return batch


class _Here(threading.local):
    """What the current call of this thread is about.

    Attributes:
        place: where a factory allocates; None if its inputs say so.
        waits: whether the host waits for a copy.
        group: process group of a collective.
        submitted: events of the collectives that the call has submitted.
    """

    place: int | None = None
    waits: bool = True
    group: str = "world"
    submitted: list[FakeEvent] | None = None


class _Arguments(ArgumentHandler):
    """Storages that an operator reads and writes, from its schema."""

    def __init__(self, accelerator: Accelerator, place: int | None = None) -> None:
        super().__init__()
        self._accelerator, self._place = accelerator, place
        self.inputs: list[Storage] = []
        self.reads: list[Use] = []
        self.writes: list[Use] = []

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if isinstance(value, Tensor) and (found := self._accelerator.storage(value, self._place)) is not None:
            self.inputs.append(found)
            if is_write:
                self.writes.append((found, span_of(value)))
            elif not metadata_only:
                self.reads.append((found, span_of(value)))


class Operators(TorchDispatchMode):
    """Reports each operator of the threads that have entered it."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("profiler::"):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if name.startswith("c10d::"):
                return self._collective(name, func, args, kwargs)
            # Numbers that torch.tensor has put into memory without an operator.
            place = self._accelerator.here.place if name == "aten::lift_fresh" else None
            given = _Arguments(self._accelerator, place)
            is_factory = bool(FACTORY_FUNCTION_REGEX.match(name.removeprefix("aten::")))
            given.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
            if any(storage.rows for storage in given.inputs):
                named = {argument.name: value for argument, value in zip_arguments(func._schema, args, kwargs)}
                given.reads = [use for one in given.reads for use in used_rows(name, named, one)]
                given.writes = [use for one in given.writes for use in used_rows(name, named, one)]
            out = func(*args, **kwargs)
            self._report(name, given, out, args, kwargs)
            return out

    def _report(self, name: str, given: _Arguments, out: Any, args: Any, kwargs: Any) -> None:
        accelerator, here = self._accelerator, self._accelerator.here
        places = [one.place for one in given.inputs]
        place = here.place
        if place is None:
            # Without inputs: a factory of C++, such as autograd's zeros, which are on the device.
            place = max(places, default=0)
        devices = {one for one in (*places, place) if one >= 0}
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and (made := accelerator.storage(tensor, place, new=True)) is not None:
                # Memory of an input that is not declared to be written: a view, whatever its schema says.
                if made not in given.inputs:
                    given.writes.append((made, span_of(tensor)))
        reads, writes = given.reads, given.writes
        if not devices:
            if reads or writes:
                accelerator.access(accelerator.host(), reads, writes, name)
            return
        stream = accelerator.current_stream(max(devices))
        others = [accelerator.current_stream(one) for one in devices if one != stream.device.index]
        for other in others:  # a copy between two devices is ordered on both
            stream.wait_stream(other)
        # Pageable memory is read by the host, as is a number on the host that an operator of the device takes.
        by_host = {PAGEABLE} if name in _COPIES else {PAGEABLE, PINNED}
        if by_them := [use for use in (*reads, *writes) if use[0].place in by_host]:
            accelerator.access(accelerator.host(), by_them, [], name)
        left = [[use for use in uses if use[0].place not in by_host] for uses in (reads, writes)]
        accelerator.access(stream.number, *left, name)
        for other in others:
            other.wait_stream(stream)
        if self._host_waits(name, reads, writes, args, kwargs):
            accelerator.synced(stream, name.removeprefix("aten::"))

    def _host_waits(self, name: str, reads: Any, writes: Any, args: Any, kwargs: Any) -> bool:
        if name in _COPIES:
            if all(storage.place >= 0 for storage, _ in (*reads, *writes)):
                return False
            if name == "aten::copy_":
                non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))
            else:
                non_blocking = not self._accelerator.here.waits
            to_pageable = any(storage.place == PAGEABLE for storage, _ in writes)
            return to_pageable or not non_blocking
        if name == "aten::index" and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]):
            return True
        if name == "aten::repeat_interleave":
            return kwargs.get("output_size") is None
        return name in _HOST_NEEDS and any(storage.place >= 0 for storage, _ in reads)

    def _collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        accelerator, here = self._accelerator, self._accelerator.here
        written, read = (
            [use for index in indices for tensor in tensors_of(args[index]) for use in accelerator.uses_of(tensor)]
            for indices in _COLLECTIVES[name.removeprefix("c10d::")]
        )
        out = func(*args, **kwargs)
        if all(storage.place < 0 for storage, _ in (*written, *read)):
            accelerator.access(accelerator.host(), read, written, name)  # of a group for the host
            return out
        with accelerator.lock:
            if here.group not in accelerator.of_groups:
                accelerator.of_groups[here.group] = FakeStream(accelerator, name=f"group {here.group}")
        stream = accelerator.of_groups[here.group]
        stream.wait_stream(accelerator.current_stream())
        accelerator.access(stream.number, read, written, name)
        for storage, _ in (*written, *read):
            storage.recorded.add(stream.number)  # the backend holds them until the work is waited for
        if here.submitted is not None:
            here.submitted.append(stream.record_event())
        else:
            accelerator.current_stream().wait_stream(stream)
        return out


class Devices(TorchFunctionMode):
    """Lets CPU tensors be on a device, for the threads that have entered it."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._handled: dict[Any, Callable[..., Any]] = {
            Tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
            Tensor.device.__get__: self._device,  # type: ignore[attr-defined]
            Tensor.to: self._to,
            Tensor.cuda: lambda func, tensor, *args, **kwargs: self._to(Tensor.to, tensor, "cuda", **kwargs),
            Tensor.cpu: lambda func, tensor, *args, **kwargs: self._to(Tensor.to, tensor, "cpu", **kwargs),
            Tensor.pin_memory: lambda func, tensor, *args: self._copied(tensor, PINNED, waits=False),
            **dict.fromkeys(_BACK, self._read),
            **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), self._from_host),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (handled := self._handled.get(func)) is not None:
            result = handled(func, *args, **kwargs)
        elif "device" in kwargs or "pin_memory" in kwargs or func in _device_constructors():
            result = self._make(func, *args, **kwargs)
        elif getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
            return self._communicate(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._tag((args, result))
        return result

    # ------------------------------------------------------------------ devices

    def _is_cuda(self, func: Any, tensor: Tensor) -> bool:
        return self._shows_device(tensor) or bool(func(tensor))

    def _device(self, func: Any, tensor: Tensor) -> torch.device:
        place = self._place(tensor)
        shown: torch.device = torch.device("cuda", place) if self._shows_device(tensor) else func(tensor)
        return shown

    def _shows_device(self, tensor: Tensor) -> bool:
        # Libraries that are built for the CPU would look for kernels of CUDA.
        return _caller().startswith(("lightning_pipe", "tests")) and self._place(tensor) >= 0

    def _place(self, tensor: Tensor) -> int:
        found = self._accelerator.storage(tensor)
        return 0 if found is None else found.place

    def _named(self, device: Any) -> int | None:
        """The place of a device that a call names; None if it names none."""
        if device is None or isinstance(device, Tensor):
            return None if device is None else self._place(device)
        if device == "cpu" or (torch.device(device).type == "cpu" and _caller().startswith(_FOR_THE_HOST)):
            return PAGEABLE
        # A module of a library that is built for the CPU names its own device so.
        return torch.device(device).index or 0

    def _make(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        here = self._accelerator.here
        place = self._named(kwargs.pop("device", None))
        if place is None and func in _device_constructors():
            place = PAGEABLE
        if kwargs.pop("pin_memory", False):
            place = PINNED
        before, here.place = here.place, place
        try:
            return func(*args, **kwargs)
        finally:
            here.place = before

    def _from_host(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.tensor`` of numbers: they are on the host first."""
        place = self._named(kwargs.pop("device", None))
        made = self._make(func, *args, **kwargs)
        return made if place is None or place < 0 or self._place(made) == place else self._copied(made, place)

    def _to(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", None)
        if args and (isinstance(args[0], (str, torch.device, Tensor)) or type(args[0]) is int):
            device, args = args[0], args[1:]
            dtype = device.dtype if isinstance(device, Tensor) else None
            args = (dtype, *args) if dtype is not None else args
        non_blocking = kwargs.get("non_blocking", args[1] if len(args) > 1 else False)
        place = self._named(device)
        made = func(tensor, *args, **{"dtype": None, **kwargs} if not args else kwargs)
        if place is None or place == self._place(made):
            return made
        if place == PAGEABLE and non_blocking:
            place = PINNED  # PyTorch allocates so for an asynchronous copy
        return self._copied(made, place, waits=not non_blocking)

    def _copied(self, tensor: Tensor, place: int, waits: bool = True) -> Tensor:
        here = self._accelerator.here
        before, here.place, here.waits = (here.place, here.waits), place, waits
        try:
            return tensor.clone()
        finally:
            here.place, here.waits = before

    def _read(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        accelerator = self._accelerator
        found = accelerator.storage(tensor)
        if found is not None and found.place >= 0:
            stream = accelerator.current_stream(found.place)
            accelerator.access(stream.number, accelerator.uses_of(tensor), [], func.__name__)
            accelerator.synced(stream, func.__name__)
        elif found is not None:
            accelerator.access(accelerator.host(), accelerator.uses_of(tensor), [], func.__name__)
        return func(tensor, *args, **kwargs)

    # ------------------------------------------------------------------ collectives and autograd

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        here = self._accelerator.here
        group = next((one for one in (*args, *kwargs.values()) if isinstance(one, dist.ProcessGroup)), None)
        before = here.group, here.submitted
        here.group, here.submitted = "world" if group is None else group.group_name, []
        try:
            work = func(*args, **kwargs)
            if isinstance(work, dist.Work):
                self._accelerator.of_collectives[work] = here.submitted
            else:
                _wait_for(self._accelerator, here.submitted)
            return work
        finally:
            here.group, here.submitted = before

    def _tag(self, value: Any) -> None:
        """Note the stream of the nodes of autograd that were made now."""
        if not torch.is_grad_enabled():
            return
        pending = [one.grad_fn for one in tensors_of(value) if one.grad_fn is not None]
        stream = self._accelerator.current_stream()
        while pending:
            node = pending.pop()
            if node is not None and "stream" not in node.metadata:
                node.metadata["stream"] = stream.number
                pending.extend(following for following, _ in node.next_functions)
                if stream is not self._accelerator.default_stream():
                    _on_stream_of_forward(self._accelerator, node, stream)


def _on_stream_of_forward(accelerator: Accelerator, node: Any, stream: FakeStream) -> None:
    """Run the backward of a node as autograd's engine does: after its caller's work, which then waits for it."""
    callers: list[FakeStream] = []

    def before(gradients: Any) -> None:
        callers.append(accelerator.current_stream())
        stream.wait_stream(callers[-1])
        accelerator.enter_stream(stream)

    def after(inputs: Any, outputs: Any) -> None:
        accelerator.enter_stream(callers[-1])
        callers.pop().wait_stream(stream)

    node.register_prehook(before)
    node.register_hook(after)


def used_rows(name: str, named: dict[str, Any], use: Use) -> list[Use]:
    """What an operator uses of a storage whose rows are used independently: the rows of its index, or of its ids."""
    storage, (start, _) = use
    indexed = name in ("aten::index_copy_", "aten::index_fill_", "aten::index_select") and named.get("dim") == 0
    if not storage.rows or not (indexed or "split_embedding" in name):
        return [use]
    if indexed:
        table = named["self"]
        tables, parts = [(start, table[:1].numel() * table.element_size())], [named["index"]]
    else:  # FBGEMM: ids of all features, one feature after the other
        tables, offsets = storage.rows, named["offsets"].tolist()
        bags = (len(offsets) - 1) // len(tables)
        parts = [named["indices"][offsets[at * bags] : offsets[(at + 1) * bags]] for at in range(len(tables))]
    spans = {
        (first + row * size, first + (row + 1) * size)
        for (first, size), rows in zip(tables, parts, strict=True)
        for row in rows.tolist()
    }
    return [(storage, span) for span in sorted(spans)]


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors in collections, objects with attributes among them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [one for part in value.values() for one in tensors_of(part)]
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in tensors_of(part)]
    if isinstance(value, (str, int, float, bytes, type)) or value is None or not hasattr(value, "__dict__"):
        return []
    return tensors_of(vars(value)) if type(value).__name__.endswith(("Batch", "JaggedTensor")) else []


def _caller() -> str:
    """Module that called into PyTorch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name != __name__ and name != "torch" and not name.startswith("torch."):
            return name
        frame = frame.f_back
    return ""


def _wait_for(accelerator: Accelerator, events: list[FakeEvent]) -> None:
    for event in events:
        accelerator.current_stream().wait_event(event)


class _Signal(threading.Event):
    """An event between threads of the engine, which hands over what its setter has done."""

    accelerator: Accelerator

    def __init__(self) -> None:
        super().__init__()
        self._clock: dict[int, int] = {}

    def set(self) -> None:
        self._clock = self.accelerator.clock()
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        there = super().wait(timeout)
        self.accelerator.learn(self._clock)
        return there


@contextmanager
def watched() -> Iterator[Accelerator]:
    """Pipelines built and run in the body on ``device="cuda"`` are watched. Threads end before the body does."""
    accelerator = Accelerator()
    mode = Devices(accelerator)
    get_device_module = torch.get_device_module
    run_backward, from_numpy = torch.autograd._engine_run_backward, torch.from_numpy  # type: ignore[attr-defined]
    wait, submit, settle = dist.Work.wait, Worker.submit, Worker.settle
    done: WeakKeyDictionary[Worker, dict[int, int]] = WeakKeyDictionary()

    def backward(*args: Any, **kwargs: Any) -> Any:
        # Hooks and Python functions inside name devices, too, and a mode is off while its own call is handled.
        with nullcontext() if torch._C._len_torch_function_stack() else mode:
            return run_backward(*args, **kwargs)

    def waited(work: Any, *args: Any) -> Any:
        with _disable_current_modes():  # Gloo copies results here that NCCL writes where they belong
            result = wait(work, *args)
        _wait_for(accelerator, accelerator.of_collectives.get(work, []))
        return result

    def handed(worker: Worker, call: Callable[[], None]) -> None:
        clock = accelerator.clock()

        def run() -> None:
            accelerator.learn(clock)
            call()
            done[worker] = accelerator.clock()

        submit(worker, run)

    def settled(worker: Worker) -> None:
        settle(worker)
        accelerator.learn(done.get(worker, {}))

    def numbers(array: Any) -> Tensor:
        made = from_numpy(array)
        accelerator.put(made, PAGEABLE)
        return made

    def module_of(device: Any = None) -> Any:
        return accelerator if device is not None and torch.device(device).type == "cuda" else get_device_module(device)

    signal = type("_SignalHere", (_Signal,), {"accelerator": accelerator})
    threads = mock.Mock(wraps=threading, Event=signal)
    cuda: dict[str, Any] = {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        **{name: getattr(accelerator, name) for name in ("Stream", "Event", "stream", "current_stream")},
        **{name: getattr(accelerator, name) for name in ("default_stream", "synchronize")},
    }
    with ExitStack() as stack:
        for name, stand_in in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        for of, name, stand_in in (
            (torch, "get_device_module", module_of),
            (torch, "from_numpy", numbers),
            (torch.autograd, "_engine_run_backward", backward),
            (Tensor, "record_stream", lambda tensor, stream: accelerator.recorded(tensor, stream)),
            (dist.Work, "wait", waited),
            (Worker, "submit", handed),
            (Worker, "settle", settled),
            (executor, "task_range", accelerator.task),
            (executor, "threading", threads),
        ):
            stack.enter_context(mock.patch.object(of, name, stand_in))
        stack.enter_context(cheap_stacks(accelerator))
        collects = gc.isenabled()
        gc.disable()  # what is freed when must not depend on it
        if collects:
            stack.callback(gc.enable)
        stack.enter_context(mode)
        stack.enter_context(Operators(accelerator))
        try:
            yield accelerator
        finally:
            accelerator.listening = False
