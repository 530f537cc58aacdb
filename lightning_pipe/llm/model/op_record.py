"""Record of a constructor's operations on tensors and random generators, which can be replayed in part.

The record is organised by storage. A tensor is a view of a storage, so views need no replay, and the reads and writes
of an operation are sets of storages. `deferred` fills the record while a model is built without memory, and requests
the storages that a rank holds. The record then walks back to find the operations that these storages depend on, and
replays only them. States of random generators are values like storages: a random operation consumes one state and
produces the next. A random operation whose numbers are not requested therefore still runs, into scratch memory, if a
later random operation is requested.

The idea of a partial replay comes from torchdistx's `deferred_init`. It replays in the order of requests, so that
values depend on the requests. Here they do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_pipe._compat.torch import schema_of, storage_key, tree_leaves, tree_map_only
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.random_track import RandomTrack

# Operations that do not read the previous values of their destination, which is their first argument.
_OVERWRITING = {
    *("aten::bernoulli_", "aten::cauchy_", "aten::copy_", "aten::exponential_", "aten::fill_", "aten::geometric_"),
    *("aten::log_normal_", "aten::normal_", "aten::random_", "aten::uniform_", "aten::zero_"),
}
# Operations that use only the shape, dtype and layout of their first argument, not its values.
_SHAPE_ONLY = {
    *("aten::empty_like", "aten::full_like", "aten::ones_like", "aten::rand_like", "aten::randint_like"),
    *("aten::randn_like", "aten::zeros_like", "aten::new_empty", "aten::new_empty_strided", "aten::new_full"),
    *("aten::new_ones", "aten::new_zeros"),
}


@dataclass(frozen=True, slots=True)
class View:
    """Layout of a tensor in its storage. Strides and offset count elements of `dtype`, as in PyTorch."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that has this layout in `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor

    def layout(self) -> tuple[object, ...]:
        """Return the parts that determine the position of each element. Strides of dimensions of size 1 do not."""
        empty = 0 in self.size
        strides = () if empty else tuple(s for n, s in zip(self.size, self.stride, strict=True) if n > 1)
        return self.dtype, self.size, strides, self.offset, self.conjugated, self.negated


def view_of(tensor: torch.Tensor, storage: int) -> View:
    """Return the layout of `tensor` in its storage, which has the number `storage`."""
    size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
    return View(storage, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())


@dataclass(frozen=True, slots=True)
class _DataFlow:
    """Storages that an operation reads and writes.

    Attributes:
        values: storages whose values the operation reads.
        writes: storages that the operation writes to.
        overwrites: subset of `writes` that is overwritten completely, so that earlier values do not matter.
    """

    values: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Operation:
    """Recorded call, with views in place of its tensors. `creates` maps positions in its outputs to new storages."""

    func: OpOverload
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    creates: dict[int, View]
    flow: _DataFlow
    default_dtype: torch.dtype
    draw: _Draw | None

    @property
    def touches(self) -> set[int]:
        return {view.storage for view in tree_leaves((self.arguments, self.creates)) if isinstance(view, View)}

    @property
    def changes(self) -> set[int]:
        return {view.storage for view in self.creates.values()} | self.flow.writes


@dataclass(frozen=True, slots=True)
class _Draw:
    """Change of the generator of `track` by an operation, from one numbered state to another."""

    track: RandomTrack
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class _Step:
    """Operation to replay. Afterwards storages in `dead` are no longer needed, and storages in `done` are final."""

    operation: _Operation
    dead: set[int]
    done: set[int]


class OpRecord:
    """Operations in order, the storages that they use and the generators that they draw from."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._numbers: dict[int, int] = {}  # address of a storage -> its number
        self._storages: list[torch.UntypedStorage] = []  # held, so that no address is reused
        self._sizes: list[int] = []  # bytes
        self._outside: dict[int, tuple[torch.Tensor, int | None]] = {}  # real tensors, their versions at first use
        self._tracks = {id(torch.default_generator): RandomTrack(torch.default_generator)}
        self._ends: list[tuple[RandomTrack, int]] = []  # final states of the generators

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the storage of `tensor`; None if the storage is not in the record."""
        return self._numbers.get(storage_key(tensor))

    def view(self, tensor: torch.Tensor) -> View:
        """Return `tensor` as a view of its storage, which must be in the record."""
        number = self.number(tensor)
        assert number is not None
        return view_of(tensor, number)

    def add_outside(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """Use `real`, made outside the record, as the value of the storage of the fake `tensor`. No copy is made."""
        if self.number(tensor) is None:
            self._outside[self._add_storage(tensor)] = (real, _version(real))

    def is_outside(self, storage: int) -> bool:
        """Return True if the storage belongs to a real tensor made outside the record."""
        return storage in self._outside

    def before_random(self, func: OpOverload, arguments: Sequence[object]) -> RandomTrack | None:
        """Return the track of the generator that `func` is about to draw from; None if `func` is not random."""
        generators = [argument for argument in arguments if isinstance(argument, torch.Generator)]
        if not generators and torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        generator = generators[0] if generators else torch.default_generator
        if generator.device.type != "cpu":
            raise SetupError(
                f"{func} draws from a generator on {generator.device} inside deferred_init(), expected one on the CPU."
                " Pass the model's device to materialise() instead"
            )
        if id(generator) not in self._tracks:
            self._tracks[id(generator)] = RandomTrack(generator)
        return self._tracks[id(generator)]

    def add(
        self,
        func: OpOverload,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        tensors: Iterable[torch.Tensor],
        outputs: object,
        track: RandomTrack | None,
    ) -> None:
        """Record a call that was made on fake tensors."""
        for tensor in tensors:
            number = self.number(tensor)
            if number is None or tensor.untyped_storage().nbytes() != self._sizes[number]:
                raise SetupError(
                    f"{func} changed the size of a tensor's memory inside deferred_init(), which cannot be replayed."
                    " Create a new tensor of the required size instead"
                )
        flow = self._data_flow(func, *arguments)
        creates = {}
        for position, output in enumerate(tree_leaves(outputs)):
            if isinstance(output, torch.Tensor) and self.number(output) is None:
                creates[position] = view_of(output, self._add_storage(output))
        if not (creates or flow.writes or track):
            return  # it made a view, or read a shape
        draw = _Draw(track, track.current(), track.drawn()) if track is not None else None
        self._operations.append(_Operation(func, arguments, creates, flow, torch.get_default_dtype(), draw))

    def close(self) -> None:
        """End the record, and reset the generators to their first states, since no numbers have been drawn yet."""
        for track in self._tracks.values():
            self._ends.append((track, track.current()))
            track.rewind()

    def values(self, views: Sequence[View]) -> list[torch.Tensor]:
        """Return the values of `views` after the operations recorded so far. They must not be written to.

        Each call replays the operations that the values depend on. It does not run other random operations just to
        advance a generator.
        """
        wanted = {view.storage for view in views}
        with unset_fake_temporarily():
            storages = self._run(self._plan(wanted, []), wanted, torch.device("cpu"))
            return [view.of(storages[view.storage]) for view in views]

    def replay(self, wanted: set[int], device: torch.device) -> dict[int, torch.UntypedStorage]:
        """Replay the operations that the values of `wanted` depend on, and advance the generators.

        Memory at any time holds: the requested storages that already exist, the storages that a later operation still
        reads, and the storages of the running operation.
        """
        storages = self._run(self._plan(wanted, self._ends), wanted, device)
        for track, number in self._ends:
            track.generator.set_state(track.states[number])
        return storages

    def _add_storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        self._sizes.append(storage.nbytes())
        number = self._numbers[storage_key(storage)] = len(self._sizes) - 1
        return number

    def _data_flow(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _DataFlow:
        name = schema_of(func).name
        values, writes, overwrites = set(), set(), set()
        for position, argument in enumerate(schema_of(func).arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            written = written and torch.Tag.inplace_view not in func.tags  # these change the view, not its values
            unread = argument.is_out or (position == 0 and name in (_OVERWRITING if written else _SHAPE_ONLY))
            for view in (leaf for leaf in tree_leaves(value) if isinstance(leaf, View)):
                if not unread:
                    values.add(view.storage)
                if written:
                    writes.add(view.storage)
                if written and unread and self._covers(view):
                    overwrites.add(view.storage)
        return _DataFlow(frozenset(values), frozenset(writes), frozenset(overwrites))

    def _covers(self, view: View) -> bool:
        """Return True if each byte of the storage belongs to exactly one element of the view."""
        elements = 1
        for size, stride in sorted(zip(view.size, view.stride, strict=True), key=lambda dimension: dimension[1]):
            if size != 1 and stride != elements:
                return False
            elements *= size
        return elements * view.dtype.itemsize == self._sizes[view.storage]

    def _plan(self, wanted: set[int], ends: Iterable[tuple[RandomTrack, int]]) -> list[_Step]:
        """Return the operations, in order, that the values of `wanted` and the generator states `ends` depend on."""
        needed, seen = wanted - self._outside.keys(), set[int]()
        states = {(track, number) for track, number in ends if number not in track.states}
        steps = []
        for operation in reversed(self._operations):
            if not needed and not states:
                break
            draw = operation.draw
            used = not needed.isdisjoint(operation.changes)
            if not used and not (draw and (draw.track, draw.after) in states):
                continue
            touches = operation.touches
            steps.append(_Step(operation, dead=touches - needed, done=(touches & wanted) - seen))
            seen |= touches
            if used:
                created = {view.storage for view in operation.creates.values()}
                needed = (needed | operation.flow.writes) - created - operation.flow.overwrites
            # Also if only the generator state is needed, because the number of draws may depend on these values.
            needed |= operation.flow.values - self._outside.keys()
            if draw:
                states.discard((draw.track, draw.after))
                if draw.before not in draw.track.states:
                    states.add((draw.track, draw.before))
        return steps[::-1]

    def _run(self, steps: list[_Step], wanted: set[int], device: torch.device) -> dict[int, torch.UntypedStorage]:
        live: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), ExitStack() as restored:
            restored.callback(torch.set_default_dtype, torch.get_default_dtype())
            for track in self._tracks.values():
                restored.callback(track.generator.set_state, track.generator.get_state())
            for step in steps:
                draw = step.operation.draw
                if draw is not None:
                    draw.track.generator.set_state(draw.track.states[draw.before])
                self._call(step.operation, live)
                if draw is not None:
                    draw.track.states[draw.after] = draw.track.generator.get_state()
                for number in step.dead:
                    live.pop(number, None)
                for number in step.done:
                    live[number] = _moved(live[number], device)
            for number in wanted - live.keys():  # no operation uses it: it is a real tensor from outside
                live[number] = _moved(self._real(number), device)
        return {number: live[number] for number in wanted}

    def _call(self, operation: _Operation, live: dict[int, torch.UntypedStorage]) -> None:
        def tensor(view: View) -> torch.Tensor:
            if view.storage not in live:
                live[view.storage] = self._real(view.storage)
            return view.of(live[view.storage])

        args, kwargs = tree_map_only(View, tensor, operation.arguments)
        torch.set_default_dtype(operation.default_dtype)
        outputs = tree_leaves(operation.func(*args, **kwargs))
        taken = {storage_key(storage) for storage in live.values()}
        for position, view in operation.creates.items():
            found = view_of(outputs[position], view.storage)
            storage = outputs[position].untyped_storage()
            if found.layout() != view.layout() or storage_key(storage) in taken:
                raise SetupError(
                    f"{operation.func} returned a tensor with the layout {found}, expected {view} as without memory,"
                    " so the values could differ. Compute this tensor before deferred_init() and use it inside"
                )
            live[view.storage] = storage
            taken.add(storage_key(storage))

    def _real(self, number: int) -> torch.UntypedStorage:
        """Return memory for a storage that no replayed operation made: uninitialised, or that of the outside tensor."""
        if number not in self._outside:
            return torch.empty(self._sizes[number], dtype=torch.uint8, device="cpu").untyped_storage()
        tensor, version = self._outside[number]
        if _version(tensor) != version:
            raise SetupError(
                f"a tensor of shape {tuple(tensor.shape)} that the model was built from has been changed since: it is"
                f" at version {_version(tensor)}, expected {version}. Use a copy of it in deferred_init()"
            )
        return tensor.untyped_storage()


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _moved(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    if storage.device == device:
        return storage
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).to(device).untyped_storage()
