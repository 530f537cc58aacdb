"""Reports which memory each operator reads and writes: from its schema, or by a description where that does not say.

The mode runs below autograd, so it sees every operator. `tests.engine.device_tensors` imitates the GPU.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, ArgumentHandler, zip_arguments
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.findings import PAGEABLE, PINNED, Storage, Use, span_of
from tests.engine.race_detector import Detector, FakeEvent, FakeStream

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


class Accelerator(Detector):
    """Takes the place of ``torch.cuda``. Inside `watched`, all operators of its threads are reported."""

    def __init__(self) -> None:
        super().__init__()
        self.of_collectives: WeakKeyDictionary[Any, list[FakeEvent]] = WeakKeyDictionary()
        self.of_groups: dict[str, FakeStream] = {}
        self.here = _Here()

    # As torch.cuda spells them.
    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        return FakeStream(self, device)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def is_available(self) -> bool:
        return False  # PyTorch itself would call the driver

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Do nothing: the state of the device is that of the host here, which is set as well."""

    def on_host(self, batch: Any) -> Any:
        """The batch, whose tensors are in pinned memory of the host."""
        for tensor in tensors_of(batch):
            self.put(tensor, PINNED)
        return batch


class _Here(threading.local):
    """State of the calling thread's current call."""

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
            made = accelerator.storage(tensor, place, new=True) if isinstance(tensor, Tensor) else None
            # Memory of an input that is not declared to be written: a view, whatever its schema says.
            if made is not None and made not in given.inputs:
                given.writes.append((made, span_of(tensor)))
        reads, writes = given.reads, given.writes
        if not devices:
            if reads or writes:
                accelerator.access(accelerator.host(), reads, writes, name)
            return
        # A copy between two devices runs on the stream of its source, and is ordered on both.
        source = [storage.place for storage, _ in reads if storage.place >= 0]
        stream = accelerator.current_stream(source[-1] if name in _COPIES and source else max(devices))
        others = [accelerator.current_stream(one) for one in devices if one != stream.device.index]
        for other in others:
            stream.wait_stream(other)
        # Pageable memory is read by the host, as is a number on the host that an operator of the device takes.
        by_host = {PAGEABLE} if name in _COPIES else {PAGEABLE, PINNED}
        if by_them := [use for use in (*reads, *writes) if use[0].place in by_host]:
            accelerator.access(accelerator.host(), by_them, [], name)
        read, written = ([use for use in uses if use[0].place not in by_host] for uses in (reads, writes))
        accelerator.access(stream.number, read, written, name)
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
