"""CPU tensors in place of a GPU's tensors: the package takes them for tensors on ``cuda``.

A function mode stands where a device is named: factories, copies and ``Tensor.device``. A dispatch mode stands below
autograd, and sees every operator with what it reads and writes (`tests.engine.race_detector`). The engine gives both
modes to its workers.

Place of memory
    of a factory      on the device, if the call names ``cuda``, or the device of a library's module. On the host, if
                      the call names no device, or "cpu" as a string.
    of an operator    on the device, if any input is.
    of `on_host`      on the host, pinned: batches of a loader.
    of anything else  on the device since before all work: parameters, tables.

Artifacts of the CPU, which are no findings
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
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from lightning_pipe.engine.runtime import executor
from lightning_pipe.engine.runtime.worker import Worker
from tests.engine.findings import PAGEABLE, PINNED
from tests.engine.operators import Accelerator, Operators, tensors_of
from tests.engine.race_detector import FakeEvent, FakeStream, cheap_stacks

# These name the CPU only where they mean the host, such as for messages between hosts.
_FOR_THE_HOST = ("lightning_pipe.engine.ranks", "lightning_pipe.llm", "torch.distributed")
_BACK = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class Devices(TorchFunctionMode):
    """Lets CPU tensors be on a device, for the threads that have entered it."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._handled: dict[Any, Callable[..., Any]] = {
            Tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
            Tensor.device.__get__: self._device,
            Tensor.to: self._to,
            Tensor.cuda: lambda func, tensor, *args, **kwargs: self._to(Tensor.to, tensor, "cuda", **kwargs),
            Tensor.cpu: lambda func, tensor, *args, **kwargs: self._to(Tensor.to, tensor, "cpu", **kwargs),
            Tensor.pin_memory: lambda func, tensor, *args: self._copied(tensor, PINNED, waits=False),
            **dict.fromkeys(_BACK, self._read),
            **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), self._from_host),
            Tensor.__setitem__: self._set,
            Tensor.new_tensor: lambda func, tensor, data, **kwargs: self._from_host(
                torch.tensor, data, **{"dtype": tensor.dtype, "device": tensor.device, **kwargs}
            ),
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
        names = ["device", "dtype", "non_blocking", "copy"]
        if args and isinstance(args[0], Tensor):
            args = (args[0], args[0].dtype, *args[1:])
        elif args and isinstance(args[0], torch.dtype):
            names = names[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        place = self._named(given.pop("device", None))
        made = func(tensor, **{name: value for name, value in given.items() if value is not None} or {"copy": False})
        if place is None or place == self._place(made):
            return made
        non_blocking = given.get("non_blocking", False)
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

    def _set(self, func: Any, tensor: Tensor, index: Any, value: Any) -> None:
        if isinstance(index, (int, slice)) and isinstance(value, (int, float)):
            tensor[index].fill_(value)  # as for a tensor on a device; a tensor of the value would be nowhere
        else:
            func(tensor, index, value)

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
        pending: list[Any] = [one.grad_fn for one in tensors_of(value)]
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


def left_out(*_: Any) -> None:
    """Stands for a function that a planted fault leaves out. A mock would hold its arguments, tensors among them."""


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
    """An event between threads of the engine. Waiting for it also receives the clock of the thread that set it."""

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
    run_backward, from_numpy = torch.autograd._engine_run_backward, torch.from_numpy
    wait, submit, settle, close = dist.Work.wait, Worker.submit, Worker.wait_until_idle, Worker.close
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

    def closed(worker: Worker) -> bool:
        ended = close(worker)
        accelerator.learn(done.get(worker, {}))
        return ended

    def numbers(array: Any) -> Tensor:
        made = from_numpy(array)
        accelerator.put(made, PAGEABLE)
        return made

    def module_of(device: Any = None) -> Any:
        return accelerator if device is not None and torch.device(device).type == "cuda" else get_device_module(device)

    signal = type("_SignalHere", (_Signal,), {"accelerator": accelerator})
    threads = SimpleNamespace(Event=signal)
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
            (Worker, "wait_until_idle", settled),
            (Worker, "close", closed),
            (executor, "profiler_range", accelerator.task),
            (executor, "threading", threads),
        ):
            stack.enter_context(mock.patch.object(of, name, stand_in))
        stack.enter_context(cheap_stacks(accelerator))
        collects = gc.isenabled()
        gc.disable()  # its runs would free memory at times that differ
        if collects:
            stack.callback(gc.enable)
        stack.enter_context(mode)
        stack.enter_context(Operators(accelerator))
        try:
            yield accelerator
        finally:
            accelerator.listening = False
