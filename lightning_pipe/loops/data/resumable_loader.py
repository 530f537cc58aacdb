"""Resumable DataLoaders over map-style datasets, which continue in the middle of an epoch.

PyTorch's ``DataLoader`` has no state; the order of its batches follows from the random generators when its sampler
begins. After their states are restored, the batches given so far are skipped in the sampler, without loading them.
Worker processes are started again on resume, so random numbers that a dataset draws in workers start over.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterator, Sequence
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
    WeightedRandomSampler,
)

from lightning_pipe.engine import SetupError
from lightning_pipe.loops.data.random_streams import get_rng_states, pack_rng_states, set_rng_states, unpack_rng_states
from lightning_pipe.loops.data.sampler_state import SamplerState
from lightning_pipe.loops.data.shared_order import build_remaining_batches, get_distributed_sampler_state

LoaderState = dict[str, Any]

_CPU = torch.device("cpu")  # device of the generators that a sampler draws from
# Samplers that draw only with the first index of an iteration, or from their own generators.
_SAMPLERS = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def can_make_resumable(loader: Any) -> bool:
    """Return True if a loader is a DataLoader without its own state over a map-style dataset."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        # A class with its own __iter__ may load samples that the sampler does not select.
        and type(loader).__iter__ is DataLoader.__iter__
        and not hasattr(loader, "state_dict")
    )


def make_resumable(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of the loader with ``state_dict`` and ``load_state_dict``. The given loader is unchanged."""
    loader_class = _make_resumable_loader_class(type(loader))  # type: ignore[arg-type]
    loader_copy: DataLoader[Any] = loader_class.__new__(loader_class)
    vars(loader_copy).update(vars(loader))
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # DataLoader.__setattr__ refuses to set its sampler.
    vars(loader_copy)[name] = vars(loader_copy)["_indices"] = _ResumableSampler(vars(loader_copy)[name], loader)
    vars(loader_copy)["_iterator"] = None  # persistent workers of the given loader do not belong to the copy
    return loader_copy


def was_made_resumable(loader: Any) -> bool:
    """Return True if :func:`make_resumable` made the loader."""
    return isinstance(loader, _ResumableLoaderMixin)


def loader_leaves_global_rng_unchanged(loader: Any) -> bool:
    """Return True if a loader's workers fetch, and its sampler does not draw from this process's shared generators."""
    if type(loader) is not _make_resumable_loader_class(DataLoader) or not loader.num_workers:  # a user-defined class
        return False
    batches: Any = vars(loader)["_indices"]._inner
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    return type(sampler) in _SAMPLERS and getattr(sampler, "generator", None) is not torch.default_generator


def loaders_share_sampler_state(first: Any, second: Any) -> bool:
    """Return True if the samplers of two loaders of :func:`make_resumable` hold their state in the same objects."""
    return bool(first._indices.sampler_state.shares_with(second._indices.sampler_state))


def snapshot_loader(loader: Any) -> Callable[[], LoaderState]:
    """Record the current position of a loader, and return a function that gives the state at this position.

    The function returns the same state even after the loader has advanced.
    """
    if isinstance(loader, _ResumableLoaderMixin):
        return loader._indices.snapshot()
    # The loader may return an object that it modifies later.
    return make_constant_state_getter(copy.deepcopy(loader.state_dict()))


def make_constant_state_getter(state: LoaderState) -> Callable[[], LoaderState]:
    """Return a function that gives *state*, in place of a loader that would give its state."""
    return lambda: state


def get_epoch_end_loader_state(loader: Any) -> LoaderState | None:
    """Return the state of a loader at the end of an epoch, which a limit may have cut; None if it has no state."""
    if isinstance(loader, _ResumableLoaderMixin):
        return loader._indices.get_epoch_end_state()
    return snapshot_loader(loader)() if hasattr(loader, "state_dict") else None


def load_loader_states(loaders: Sequence[Any], states: Sequence[LoaderState | None]) -> None:
    """Load states into loaders, so that the next iteration of each loader continues from its state."""
    if len(states) != len(loaders):
        raise SetupError(
            f"The checkpoint has the states of {len(states)} train dataloader(s), got {len(loaders)} dataloader(s). Use"
            " the number of dataloaders that it was written with."
        )
    for loader, state in zip(loaders, states, strict=True):
        if state is not None and hasattr(loader, "load_state_dict"):
            # A user-defined loader may keep the state that it is given, and modify it.
            loader.load_state_dict(state if was_made_resumable(loader) else copy.deepcopy(state))


class _ResumableSampler:
    """Wraps a loader's sampler or batch sampler, which can continue from an earlier position."""

    def __init__(self, inner: Any, loader: DataLoader[Any]) -> None:
        self._inner = inner
        self._loader = loader
        self.sampler_state = SamplerState(loader)
        self._left: LoaderState | None = None
        self._resume: LoaderState | None = None
        self.returned = 0
        # States of all generators when an iteration began, and when its first index was drawn.
        self._created: LoaderState | None = None
        self._begun: LoaderState | None = None
        self._resumed: LoaderState | None = None
        # Checksums of the indices up to each position that has not been returned, and the checksum in a checkpoint.
        self._sums: dict[int, int | None] = {}
        self._expected: int | None = None

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up special methods before _inner exists
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        return self._from(self.returned, self._resumed)

    def begin(self) -> bool:
        """Begin an iteration of the loader, or continue one. Returns True if an iteration is continued."""
        resume, self._resume = self._resume, None
        self.returned, self._resumed, self._left = 0, None, None
        self._sums, self._expected = {0: 0}, None
        if resume is not None and "left" in resume:
            self._left, self.returned = resume, resume["given"]
            return False
        goes_on = resume is not None and "ended" not in resume
        if resume is not None and goes_on:
            self._set_random_states(resume["created"])
            self.returned, self._expected, self._resumed = resume["given"], resume["indices"], resume["begun"]
        elif resume is not None:
            self.sampler_state.set_state(resume["ended"])
        self._created, self._begun = self._get_random_states(), None
        return goes_on

    def _from(self, returned: int, begun: LoaderState | None) -> Iterator[Any]:
        if self._left is not None:
            yield from self.build_remaining_batches(self._left)[returned:]
            return
        before = get_rng_states(_CPU)
        if begun is not None:
            self._set_random_states(begun)
        self._begun = self._get_random_states()
        indices = iter(self._inner)
        total: int | None = 0
        for index in islice(indices, returned):
            total = _update_index_checksum(total, index)
        if returned and None not in (self._expected, total) and total != self._expected:
            raise SetupError(
                f"The sampler's first {returned} batches are not those of the run that wrote the checkpoint: samples"
                " would be trained twice, or never. Give the dataloader the same dataset, and a sampler that draws an"
                " epoch's order when its iteration begins; or resume from a checkpoint written at the end of an epoch."
            )
        self._sums[returned] = total
        if begun is not None:
            # The rest of the fetch does not belong to the sampler, and continues from the previous states.
            set_rng_states(before, _CPU)
        for position, index in enumerate(indices, returned + 1):
            self._sums[position] = total = _update_index_checksum(total, index)
            yield index

    def record_returned_batch(self) -> None:
        """Record that the loader has returned one more batch."""
        self._sums.pop(self.returned, None)
        self.returned += 1

    def build_remaining_batches(self, state: LoaderState) -> list[Any]:
        """Return this rank's batches of the rest of an epoch that was started with another number of ranks."""
        batches = self._loader.batch_sampler
        if batches is None:
            return build_remaining_batches(state, self._loader.dataset, None)
        assert isinstance(batches, BatchSampler)
        return build_remaining_batches(state, self._loader.dataset, batches.batch_size, batches.drop_last)

    def snapshot(self) -> Callable[[], LoaderState]:
        if self._left is not None:
            batch_size = self._loader.batch_size or 1
            order = self._left["left"] | {"batch": batch_size * self._left["world"]}
            left = self._left | {"given": self.returned, "order": order}
            return lambda: left
        if self._created is None:
            return dict
        total = self._sums.get(self.returned)
        return partial(
            _build_loader_state,
            self._created,
            self._begun,
            self.returned,
            get_distributed_sampler_state(self._loader),
            total,
        )

    def get_epoch_end_state(self) -> LoaderState:
        return {"ended": self.sampler_state.get_state(at_end=True)}

    def resume(self, state: LoaderState) -> None:
        self._resume = _unpack_loader_state(state) if state else None

    def _get_random_states(self) -> LoaderState:
        return {"common": get_rng_states(_CPU), "own": self.sampler_state.get_state()}

    def _set_random_states(self, where: LoaderState) -> None:
        set_rng_states(where["common"], _CPU)
        self.sampler_state.set_state(where["own"])


class _ResumableLoaderMixin:
    """Mixin that makes a class of loaders resumable."""

    _indices: _ResumableSampler

    def __iter__(self) -> Any:
        before = get_rng_states(_CPU)
        goes_on = self._indices.begin()
        iterator = super().__iter__()  # type: ignore[misc]
        if goes_on:
            # Creating the iterator repeated the draws of the beginning of the epoch.
            set_rng_states(before, _CPU)
        return _CountingIterator(iterator, self._indices)

    def state_dict(self) -> LoaderState:
        """Return the position of the loader as plain values and tensors."""
        return self._indices.snapshot()()

    def load_state_dict(self, state: LoaderState) -> None:
        """Let the next iteration continue from *state*. An empty state is the state of a new loader."""
        self._indices.resume(state)


class _CountingIterator(Iterator[Any]):
    """Iterator of a loader that counts returned batches, since workers are asked for more batches in advance."""

    def __init__(self, inner: Iterator[Any], indices: _ResumableSampler) -> None:
        self._inner = inner
        self._indices = indices

    def __next__(self) -> Any:
        batch = next(self._inner)
        self._indices.record_returned_batch()
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@cache
def _make_resumable_loader_class(base: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    loader_class: type[DataLoader[Any]] = type(
        base.__name__, (_ResumableLoaderMixin, base), {"__module__": base.__module__}
    )
    return loader_class


def _build_loader_state(
    created: LoaderState, begun: LoaderState | None, returned: int, order: LoaderState | None, indices: int | None
) -> LoaderState:
    packed = None if begun is None else _pack_random_states(begun)
    return {
        "created": _pack_random_states(created),
        "begun": packed,
        "given": returned,
        "order": order,
        "indices": indices,
    }


def _update_index_checksum(total: int | None, indices: Any) -> int | None:
    """Extend the checksum *total* by indices; None if *total* is None or an index is not an integer."""
    if total is None:
        return None
    try:
        return crc32(array("q", indices if isinstance(indices, (list, tuple)) else (indices,)), total)
    except (OverflowError, TypeError):
        return None


def _unpack_loader_state(state: LoaderState) -> LoaderState:
    """Unpack a state when it is loaded, since the next iteration is too late to report that it is damaged."""
    if "ended" in state or "left" in state:
        return state
    begun = None if state["begun"] is None else _unpack_random_states(state["begun"])
    return {**state, "created": _unpack_random_states(state["created"]), "begun": begun}


def _pack_random_states(where: LoaderState) -> LoaderState:
    return {"common": pack_rng_states(where["common"]), "own": where["own"]}


def _unpack_random_states(packed: LoaderState) -> LoaderState:
    return {"common": unpack_rng_states(packed["common"]), "own": packed["own"]}
