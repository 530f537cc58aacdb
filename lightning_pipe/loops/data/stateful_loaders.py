"""Dataloaders with their own ``state_dict``, such as torchdata's ``StatefulDataLoader``.

The state of such a loader contains the position of its current iterator. After ``load_state_dict`` the next ``iter``
returns an iterator that continues from there. The state lacks four things, which this module records:

* An iterator has ended only after it was asked for one batch too many, which does not happen if the length of an epoch
  is known. If such a loader continued at the end of an epoch, its next epoch would have no batches.
* A limit, or a hook that skips the rest of an epoch, leaves an unfinished iterator that the next epoch replaces.
* A short loader in a ``CombinedLoader`` of mode "max_size" can end within an epoch. Its iterator then gives no more
  batches, but a loader that continues from this state would begin its next epoch.
* An iterator draws from the shared random generators when it is created. A sampler without a state draws its order
  from them or from a separate generator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_pipe.loops.data.random_streams import (
    RNGStates,
    get_rng_states,
    pack_rng_states,
    set_rng_states,
    unpack_rng_states,
)
from lightning_pipe.loops.data.resumable_loader import (
    LoaderState,
    get_epoch_end_loader_state,
    make_constant_state_getter,
    snapshot_loader,
    was_made_resumable,
)
from lightning_pipe.loops.data.sampler_state import SamplerState
from lightning_pipe.loops.data.torchdata_samplers import is_instance_from_package

# States of the loaders, and of their iterators, in the same order.
Positions = tuple[list[Any], list["IteratorState | None"]]

_NONE = object()
_CPU = torch.device("cpu")  # device of the generators that a sampler draws from


@dataclass(frozen=True)
class IteratorState:
    """State of a loader's iterator that the loader's own state does not contain.

    Attributes:
        ended: True if the iterator was asked for a batch after its last one (default False).
        replaced: True if the next batch belongs to a new epoch, which replaces the iterator (default False).
        rng_states: states of the shared random generators just before the iterator was created; None if unknown.
        generator: state of the loader's own generator, uint8; None if it has no generator.
        samplers: states of the loader's samplers just before the iterator was created, as ``SamplerState`` reads them.
        before_last: state of the loader before its last batch, if the iterator is replaced; None if unknown.
    """

    ended: bool = False
    replaced: bool = False
    rng_states: RNGStates | None = None
    generator: torch.Tensor | None = None
    samplers: list[Any] = field(default_factory=list)
    before_last: Any = None

    def packed(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        return {**vars(self), "rng_states": None if self.rng_states is None else pack_rng_states(self.rng_states)}

    @staticmethod
    def from_packed(packed: dict[str, Any]) -> IteratorState:
        """Restore the state from the result of :meth:`packed`."""
        rng_states = packed["rng_states"]
        return IteratorState(**{**packed, "rng_states": None if rng_states is None else unpack_rng_states(rng_states)})


def track_iterators(combined: CombinedLoader) -> None:
    """Record the iterators that a combined loader creates from now on from loaders with their own state."""
    earlier = {id(watched.loader): watched for watched in _get_watched_loaders(combined) if watched is not None}
    stateful = [loader if _is_stateful_loader(loader) else None for loader in combined.flattened]
    if any(loader is not None for loader in stateful):
        watched_loaders = [
            None if loader is None else earlier.get(id(loader), _WatchedLoader(loader)) for loader in stateful
        ]
        if not _get_watched_loaders(combined):
            combined.__class__ = _make_watching_loader_class(type(combined))
        vars(combined)["_lightning_pipe_watched"] = watched_loaders


def iterator_states(combined: CombinedLoader) -> list[IteratorState | None]:
    """Return the state of each loader's iterator; None for a loader without its own state."""
    watched = _get_watched_loaders(combined) or [None] * len(combined.flattened)
    return [None if loader is None else loader.get_iterator_state() for loader in watched]


def loader_states(combined: CombinedLoader) -> list[Callable[[], LoaderState] | None]:
    """Return functions that give the present state of each loader; None for a loader without a state."""
    watched = _get_watched_loaders(combined) or [None] * len(combined.flattened)
    states: list[Callable[[], LoaderState] | None] = []
    for watched_loader, loader in zip(watched, combined.flattened, strict=True):
        # Until its next batch, litdata's loader gives the state of a first epoch.
        if watched_loader is not None and watched_loader.is_loaded:
            states.append(make_constant_state_getter(watched_loader.loaded))
        else:
            states.append(snapshot_loader(loader) if hasattr(loader, "state_dict") else None)
    return states


def positions_at_end(combined: CombinedLoader) -> Positions:
    """Return the positions of loaders and iterators if their epoch is over or has not begun."""
    watched = _get_watched_loaders(combined) or [None] * len(combined.flattened)
    # To return its state, torchdata's loader would create the pending iterator, and draw random numbers.
    positions = [
        (
            get_epoch_end_loader_state(loader),
            None if watched_loader is None else replace(watched_loader.get_iterator_state(), replaced=True),
        )
        if watched_loader is None or watched_loader.due is None
        else (watched_loader.loaded, watched_loader.due)
        for watched_loader, loader in zip(watched, combined.flattened, strict=True)
    ]
    return [loader for loader, _ in positions], [iterator for _, iterator in positions]


def get_positions_after_last_batch(
    combined: CombinedLoader, last: dict[str, Any], before: dict[str, Any], *, cut: bool
) -> Positions:
    """Return the positions of loaders and iterators at the end of an epoch, after its last batch."""
    states, iterators = positions_at_end(combined)
    for place, (present, after) in enumerate(zip(iterators, last["iterators"], strict=False)):
        if present is None or after is None or after.ended:
            continue
        if cut or present.ended:
            # When a run continues, the iterator is run to its end again, which may not work from its state at the end.
            states[place] = last["loaders"][place]()
        earlier = before["iterators"][place] if before["iterators"] else None
        is_known = earlier is not None and not earlier.replaced and not earlier.ended
        iterators[place] = replace(
            after if cut else present,
            replaced=True,
            ended=present.ended and not cut,
            before_last=before["loaders"][place]() if is_known else None,
        )
    return states, iterators


def load_iterator_states(
    combined: CombinedLoader, loaders: Sequence[Any], iterators: Sequence[IteratorState | None]
) -> None:
    """Let the next iteration of each loader with its own state continue from the position of its iterator."""
    for watched, loader, iterator in zip(_get_watched_loaders(combined), loaders, iterators, strict=False):
        if watched is not None and loader is not None and iterator is not None:
            watched.load_iterator_state(loader, iterator)


def get_states_of_next_iterators(combined: CombinedLoader) -> dict[str, list[Any]]:
    """Return the states of the iterators that will be created next, in the format of a ledger's entries."""
    positions = [
        None if loader is None else loader.get_state_of_next_iterator() for loader in _get_watched_loaders(combined)
    ] or [None] * len(combined.flattened)
    return {
        "loaders": [None if position is None else make_constant_state_getter(position[0]) for position in positions],
        "iterators": [None if position is None else position[1] for position in positions],
    }


class _WatchedLoader:
    """Wrapper of a loader over which the combined loader iterates, and which records its iterators."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.due: IteratorState | None = None
        self.ended = False
        self.is_loaded = False  # True from a load until the next batch is asked for
        self._made_with: tuple[RNGStates | None, list[Any]] = (None, [])
        self._peeked_with: tuple[RNGStates | None, list[Any]] | None = None
        self.loaded: Any = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        due, self.due = self.due, None
        if due is not None:
            continued = self._recreate_iterator(due)
            if not due.replaced:
                self.ended, self._made_with = due.ended, (due.rng_states, due.samplers)
                return iter(()) if due.ended else _WatchedIterator(continued, self)
        self.ended = self.is_loaded = False
        if is_instance_from_package("litdata", self.loader):
            self.loader.restore = False  # else it continues the epoch of a load, until it is run beyond the last batch
        self._made_with = self._random_states() if self._peeked_with is None else self._peeked_with
        self._peeked_with = None
        return _WatchedIterator(iter(self.loader), self)

    def _recreate_iterator(self, due: IteratorState) -> Any:
        """Create the iterator of the checkpoint again, without changes to the random generators."""
        if due.samplers and is_instance_from_package("torchdata", self.loader):
            SamplerState(self.loader).set_state(due.samplers)
        with ExitStack() as restored:
            restored.callback(set_rng_states, get_rng_states(_CPU), _CPU)
            if due.rng_states is not None:
                set_rng_states(due.rng_states, _CPU)
            continued = iter(self.loader)
            # The batch is fetched again, so that its changes to the dataset are made before the next epoch.
            if due.replaced and due.before_last is not None and next(continued, _NONE) is _NONE:
                # The last batch was the first batch of a short loader that had been restarted.
                if due.rng_states is not None:
                    set_rng_states(due.rng_states, _CPU)
                continued = iter(self.loader)
                next(continued, None)
            if due.ended and next(continued, _NONE) is not _NONE:
                # From its state at the end, this loader begins the next epoch on the next iteration.
                self.loader.load_state_dict(copy.deepcopy(self.loaded))
                self.loader.state_dict()  # torchdata's loader creates an iterator here, and draws random numbers
        if due.generator is not None and (generator := _get_loader_generator(self.loader)) is not None:
            generator.set_state(due.generator)
        return continued

    def load_iterator_state(self, state: Any, iterator: IteratorState) -> None:
        # A user-defined loader may keep the state that it is given, and modify it.
        first = state if iterator.before_last is None or not iterator.replaced else iterator.before_last
        self.loader.load_state_dict(copy.deepcopy(first))
        self.loaded, self.due, self.is_loaded = state, iterator, True

    def get_state_of_next_iterator(self) -> tuple[Any, IteratorState]:
        """Return the states of the loader and of the iterator that will be created next."""
        if self.due is not None:
            return self.loaded, self.due
        if self._made_with[0] is None:
            self._peeked_with = rng_states, samplers = self._random_states()
            # To return its state, torchdata's loader creates an iterator.
            state = copy.deepcopy(self.loader.state_dict())
            return state, replace(self.get_iterator_state(), rng_states=rng_states, samplers=samplers)
        return copy.deepcopy(self.loader.state_dict()), replace(self.get_iterator_state(), replaced=True)

    def get_iterator_state(self) -> IteratorState:
        generator = _get_loader_generator(self.loader)
        rng_states, samplers = self._made_with
        generator_state = None if generator is None else generator.get_state()
        return IteratorState(self.ended, False, rng_states, generator_state, samplers)

    def _random_states(self) -> tuple[RNGStates, list[Any]]:
        # set_epoch has already been called on samplers that have it. Loaders other than torchdata's may restore their
        # samplers on their own.
        samplers = (
            SamplerState(self.loader).get_state(at_end=True)
            if is_instance_from_package("torchdata", self.loader)
            else []
        )
        return get_rng_states(_CPU), samplers


class _WatchedIterator(Iterator[Any]):
    def __init__(self, inner: Iterator[Any], watched: _WatchedLoader) -> None:
        self._inner, self._watched = inner, watched

    def __next__(self) -> Any:
        self._watched.is_loaded = False
        try:
            return next(self._inner)
        except StopIteration:
            self._watched.ended = True
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@cache
def _make_watching_loader_class(base: type[CombinedLoader]) -> type[CombinedLoader]:
    """Return a subclass of a combined loader's class, which iterates over the watched loaders instead of its own."""
    # With a second base class, objects of *base* could not be assigned the new class.
    changed = {
        "__module__": base.__module__,
        "__iter__": lambda combined: _iterate_over_watched_loaders(base.__iter__, combined),
    }
    watching_class: type[CombinedLoader] = type(base.__name__, (base,), changed)
    return watching_class


def _iterate_over_watched_loaders(iterate: Callable[[Any], Any], combined: Any) -> Any:
    loaders = combined.flattened
    watched = _get_watched_loaders(combined)
    combined.flattened = [
        loader if watched_loader is None else watched_loader
        for watched_loader, loader in zip(watched, loaders, strict=True)
    ]
    try:
        return iterate(combined)
    finally:
        combined.flattened = loaders


def _get_watched_loaders(combined: CombinedLoader) -> list[_WatchedLoader | None]:
    watched: list[_WatchedLoader | None] = vars(combined).get("_lightning_pipe_watched", [])
    return watched


def _is_stateful_loader(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not was_made_resumable(loader)


def _get_loader_generator(loader: Any) -> torch.Generator | None:
    generator = getattr(loader, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None
