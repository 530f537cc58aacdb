"""DataLoaders over map-style datasets that can be taken up where they were left, in the middle of an epoch.

PyTorch's ``DataLoader`` has no state. What decides the order of its batches is the state of the random generators when
its sampler begins; with that, the batches given since are skipped in the sampler, without loading them. So a loader
becomes one that Lightning takes for stateful, and that gives the very batches that it would have given.

What a dataset draws in worker processes begins anew where training is taken up: workers are.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import printable, shown
from lightning_pipe.loops.data.random_streams import get_states, pack_states, set_states, unpack_states
from lightning_pipe.loops.data.sampler_state import SamplerState
from lightning_pipe.loops.data.shared_order import MOST, batches_left, order_of

__all__ = [
    "State",
    "can_resume",
    "draws_nothing",
    "end_of_epoch",
    "is_resumable",
    "load_states",
    "resumable",
    "share_samplers",
    "snapshot",
]

State = dict[str, Any]

_CPU = torch.device("cpu")  # what a sampler draws from
# They draw with the first index of an iteration, or from generators of their own.
_SAMPLERS = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
# Modules of the classes of numbers, texts, arrays and tensors.
_WITHOUT_CODE = ("builtins", "numpy", "torch")
_MOST_ITEMS = 100_000
_RANKS = 2**20  # more than any run has


def can_resume(loader: Any) -> bool:
    """Whether a loader is one of PyTorch's own over a map-style dataset, and has no state of its own."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        # What iterates in a way of its own may load what the sampler never names.
        and type(loader).__iter__ is DataLoader.__iter__
        and not hasattr(loader, "state_dict")
    )


def resumable(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader with ``state_dict`` and ``load_state_dict``; the given one stays as it is.

    Args:
        loader: for which :func:`can_resume` holds.
    """
    made = _resumable_class(type(loader))  # type: ignore[arg-type]
    same: DataLoader[Any] = made.__new__(made)
    vars(same).update(vars(loader))
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # A DataLoader refuses to have it set.
    vars(same)[name] = vars(same)["_indices"] = _Indices(vars(same)[name], loader)
    vars(same)["_iterator"] = None  # workers that wait for the given one's next epoch are not this one's
    return same


def is_resumable(loader: Any) -> bool:
    """Whether a loader is one that :func:`resumable` made."""
    return isinstance(loader, _Resumable)


def draws_nothing(loader: Any) -> bool:
    """Return whether fetches after the first one leave this process's shared random generators alone.

    They do if a loader of :func:`resumable` runs only PyTorch's code in this process: it has workers, or its dataset is
    a list, tuple or ``TensorDataset`` of items without code of their own.
    """
    if type(loader) is not _resumable_class(DataLoader):  # of the user's own class
        return False
    batches: Any = vars(loader)["_indices"]._inner
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    own = type(sampler) in _SAMPLERS and getattr(sampler, "generator", None) is not torch.default_generator
    return own and (loader.num_workers > 0 or _is_plain(loader))


def _is_plain(loader: DataLoader[Any]) -> bool:
    data = loader.dataset.tensors if type(loader.dataset) is TensorDataset else loader.dataset
    if type(data) not in (list, tuple) or loader.collate_fn not in (default_collate, default_convert):
        return False
    left: list[Any] = [data]
    for _ in range(_MOST_ITEMS):
        if not left:
            return True
        item = left.pop()
        kind = type(item)
        if kind in (list, tuple, dict):
            if len(item) > _MOST_ITEMS:
                return False
            left += item.values() if kind is dict else item
        # A collection of the user's may draw where it is read; for any class there may be a function that collates.
        elif kind.__module__ not in _WITHOUT_CODE and (
            loader.collate_fn is default_collate or isinstance(item, (Mapping, Sequence, torch.Tensor))
        ):
            return False
    return False  # too many to look at before an epoch


def share_samplers(one: Any, other: Any) -> bool:
    """Return whether two loaders of :func:`resumable` share whatever state their samplers hold."""
    shared: bool = one._indices.held.shares_with(other._indices.held)
    return shared


def snapshot(loader: Any) -> Callable[[], State]:
    """Where a loader with a state is now; its state is given when the result is called, however far it has come.

    Args:
        loader: of :func:`resumable`, for which a snapshot costs next to nothing, or any with a ``state_dict``.
    """
    if isinstance(loader, _Resumable):
        return loader._indices.snapshot()
    # What its method returns may be its own and change.
    state: State = copy.deepcopy(loader.state_dict())
    return lambda: state


def end_of_epoch(loader: Any) -> State | None:
    """The state of a loader that has given all of an epoch, or all that is wanted of it; None for one without."""
    if isinstance(loader, _Resumable):
        return loader._indices.ended()
    return snapshot(loader)() if hasattr(loader, "state_dict") else None


def load_states(loaders: Sequence[Any], states: Sequence[State | None]) -> None:
    """Let the next iteration of each loader begin where its state says.

    Args:
        loaders: those of which a checkpoint has the states.
        states: one each; None for one that had none.

    Raises:
        SetupError: there are more of them, or fewer; one is damaged.
    """
    if not isinstance(states, Sequence) or len(states) != len(loaders):
        raise SetupError(
            f"the checkpoint has the states of {len(states) if isinstance(states, Sequence) else 'no'} train"
            f" dataloader(s), and there are {len(loaders)}; needed are as many as it was written with"
        )
    for loader, state in zip(loaders, states, strict=True):
        if state is not None and hasattr(loader, "load_state_dict"):
            # A loader of the user's may keep what it gets, and change it.
            loader.load_state_dict(state if is_resumable(loader) else copy.deepcopy(state))


class _Indices:
    """A loader's sampler, or batch sampler, that can begin where an earlier one was."""

    def __init__(self, inner: Any, loader: DataLoader[Any]) -> None:
        self._inner = inner
        self._loader = loader
        self.held = SamplerState(loader)
        self._left: State | None = None
        self._resume: State | None = None
        self.given = 0
        # Where all generators were when an iteration began, and when its first index was drawn.
        self._created: State | None = None
        self._begun: State | None = None
        self._resumed: State | None = None
        # Checksums of the indices up to each batch that is due, by its position, and what a checkpoint says of them.
        self._sums: dict[int, int | None] = {}
        self._expected: int | None = None

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for theirs before there is an _inner
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        return self._from(self.given, self._resumed)

    def begin(self) -> bool:
        """Begin an iteration of the loader, or go on with one; returns whether it goes on."""
        resume, self._resume = self._resume, None
        self.given, self._resumed, self._left = 0, None, None
        self._sums, self._expected = {0: 0}, None
        if resume is not None and "left" in resume:
            self._left, self.given = resume, int(resume["given"])
            return False
        goes_on = resume is not None and "ended" not in resume
        if resume is not None and goes_on:
            self._put(_unpack(resume["created"]))
            self.given, self._expected = int(resume["given"]), resume.get("indices")
            self._resumed = None if resume["begun"] is None else _unpack(resume["begun"])
        elif resume is not None:
            self.held.put(resume["ended"])
        self._created, self._begun = self._where(), None
        return goes_on

    def _from(self, given: int, begun: State | None) -> Iterator[Any]:
        if self._left is not None:
            yield from self.batches_left(self._left)[given:]
            return
        before = get_states(_CPU)
        if begun is not None:
            self._put(begun)
        self._begun = self._where()
        indices = iter(self._inner)
        total: int | None = 0
        for one in islice(indices, given):
            total = _checksum(total, one)
        if given and None not in (self._expected, total) and total != self._expected:
            raise SetupError(
                f"The sampler's first {given} batches are not those of the run that wrote the checkpoint: samples would"
                " be trained twice, or never. Give the dataloader the same dataset, and a sampler that draws an epoch's"
                " order when its iteration begins; or resume from a checkpoint written at the end of an epoch."
            )
        self._sums[given] = total
        if begun is not None:
            # What comes next in the fetch is not the sampler's, and goes on from where it was.
            set_states(before, _CPU)
        for position, one in enumerate(indices, given + 1):
            self._sums[position] = total = _checksum(total, one)
            yield one

    def count(self) -> None:
        """Note that the loader has given one batch more."""
        self._sums.pop(self.given, None)
        self.given += 1

    def batches_left(self, state: State) -> list[Any]:
        """Of an epoch that other ranks have begun."""
        batches = self._loader.batch_sampler
        if batches is None:
            return batches_left(state, self._loader.dataset, None)
        assert isinstance(batches, BatchSampler)
        return batches_left(state, self._loader.dataset, batches.batch_size, batches.drop_last)

    def snapshot(self) -> Callable[[], State]:
        if self._left is not None:
            batch_size = self._loader.batch_size or 1
            order = self._left["left"] | {"batch": batch_size * self._left["world"]}
            left = self._left | {"given": self.given, "order": order}
            return lambda: left
        if self._created is None:
            return dict
        total = self._sums.get(self.given)
        return partial(_state, self._created, self._begun, self.given, order_of(self._loader), total)

    def ended(self) -> State:
        return {"ended": self.held.get(at_end=True)}

    def resume(self, state: State) -> None:
        try:
            for own in _check(state):
                self.held.check(own)
        except SetupError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {printable(str(error)[:200])}"
            raise SetupError(
                f"the checkpoint's state of a train dataloader is damaged ({said}); resume from another checkpoint"
            ) from error
        self._resume = state or None

    def _where(self) -> State:
        return {"common": get_states(_CPU), "own": self.held.get()}

    def _put(self, where: State) -> None:
        set_states(where["common"], _CPU)
        self.held.put(where["own"])


class _Resumable:
    """What is added to a class of loaders."""

    _indices: _Indices

    def __iter__(self) -> Any:
        before = get_states(_CPU)
        goes_on = self._indices.begin()
        iterator = super().__iter__()  # type: ignore[misc]
        if goes_on:
            # It drew again what was drawn when the epoch began.
            set_states(before, _CPU)
        return _Counted(iterator, self._indices)

    def state_dict(self) -> State:
        """Where the loader is, as numbers and text."""
        return self._indices.snapshot()()

    def load_state_dict(self, state: State) -> None:
        """Let the next iteration begin there; an empty state is where any loader begins."""
        self._indices.resume(state)


class _Counted(Iterator[Any]):
    """A loader's iterator; counts what it gives, which is less than what workers have been asked for."""

    def __init__(self, inner: Iterator[Any], indices: _Indices) -> None:
        self._inner = inner
        self._indices = indices

    def __next__(self) -> Any:
        batch = next(self._inner)
        self._indices.count()
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@cache
def _resumable_class(base: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    made: type[DataLoader[Any]] = type(base.__name__, (_Resumable, base), {"__module__": base.__module__})
    return made


def _state(created: State, begun: State | None, given: int, order: State | None, indices: int | None) -> State:
    packed = None if begun is None else _pack(begun)
    return {"created": _pack(created), "begun": packed, "given": given, "order": order, "indices": indices}


def _checksum(total: int | None, indices: Any) -> int | None:
    """Checksum of indices after that of those before; None once there was one that is no integer."""
    if total is None:
        return None
    try:
        return crc32(array("q", indices if isinstance(indices, (list, tuple)) else (indices,)), total)
    except (OverflowError, TypeError):
        return None


def _check(state: Any) -> Iterator[list[str]]:
    """Read a state as the next iteration will, which is too late to say that it is damaged; gives samplers' states."""
    if not isinstance(state, dict):
        raise TypeError(f"expected its numbers by their names, got {shown(state)}")
    if "ended" in state:
        yield _texts(state["ended"])
    elif "left" in state:
        names = ("seed", "epoch", "shuffle", "trained")
        found = [state[name] for name in ("rank", "world", "given")] + [state["left"][name] for name in names]
        counted = all(isinstance(one, int) and 0 <= one <= MOST for one in found)
        if not counted or not state["rank"] < state["world"] <= _RANKS:
            raise ValueError(f"of an epoch that other ranks have begun it has {shown(state)}")
    elif state:
        for where in (state["created"], state["begun"]):
            if where is not None:
                yield _texts(_unpack(where)["own"])
        if state["created"] is None or type(state["given"]) is not int or not 0 <= state["given"] <= MOST:
            raise ValueError(f"it has given {shown(state['given'])} batches")
        if not isinstance(state.get("indices"), int | None):
            raise TypeError(f"expected a number for its indices, got {shown(state['indices'])}")


def _texts(states: Any) -> list[str]:
    if not isinstance(states, list) or not all(isinstance(one, str) for one in states):
        raise TypeError(f"expected the states of samplers as texts, got {shown(states)}")
    return states


def _pack(where: State) -> State:
    return {"common": pack_states(where["common"]), "own": where["own"]}


def _unpack(packed: State) -> State:
    return {"common": unpack_states(packed["common"]), "own": packed["own"]}
