"""Dataloaders with a ``state_dict`` of their own, such as torchdata's ``StatefulDataLoader``.

The state of such a loader says where its present iterator is. After ``load_state_dict`` the next ``iter`` returns an
iterator that continues there. Four things are missing from it, which are recorded here:

* An iterator has ended only when it is asked for one batch too many. Where the length of an epoch is known, nobody
  asks. Continued at the end of an epoch, the loader would give an epoch without batches.
* A limit, or a hook that skips the rest of an epoch, leaves an iterator that the next epoch replaces.
* An iterator that has ended within an epoch, of a short loader in a ``CombinedLoader`` of mode "max_size", gives
  nothing more. Continued, the loader would begin its next epoch.
* An iterator draws from the shared random generators when it is made, and a sampler without a state draws its order
  from them or from a generator of its own.

Tested in ``tests/scenarios/checkpoints/test_stateful_loaders.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import Dataset, SequentialSampler

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.safe_text import printable
from lightning_pipe.loops.data.random_streams import (
    States,
    get_states,
    pack_bytes,
    pack_states,
    set_states,
    unpack_bytes,
    unpack_states,
)
from lightning_pipe.loops.data.resumable_loader import end_of_epoch, is_resumable
from lightning_pipe.loops.data.sampler_state import SamplerState

__all__ = [
    "IteratorState",
    "iterator_states",
    "load_iterators",
    "next_iterators",
    "positions_after",
    "positions_at_end",
    "shuffled_over_ranks",
    "watch",
]

# States of loaders and of their iterators, one each.
Positions = tuple[list[Any], list["IteratorState | None"]]

_NONE = object()
_CPU = torch.device("cpu")  # what a sampler draws from


@dataclass(frozen=True)
class IteratorState:
    """What a loader's own state does not say about its iterator.

    Attributes:
        ended: whether the iterator has been asked for one batch more than it had.
        replaced: whether the next epoch, which makes a new iterator, is what comes next.
        made_with: states of the shared random generators just before the iterator was made; None if not known.
        generator: state of the loader's own generator, uint8; None if it has none.
        samplers: states of the loader's samplers just before the iterator was made, as ``SamplerState`` reads them.
        before_last: where it is replaced, the loader's state before its last batch; None if not known.
    """

    ended: bool = False
    replaced: bool = False
    made_with: States | None = None
    generator: torch.Tensor | None = None
    samplers: list[str] = field(default_factory=list)
    before_last: Any = None

    def packed(self) -> dict[str, Any]:
        """Return the state as text and booleans."""
        return {
            "ended": self.ended,
            "replaced": self.replaced,
            "made_with": None if self.made_with is None else pack_states(self.made_with),
            "generator": None if self.generator is None else pack_bytes(self.generator),
            "samplers": list(self.samplers),
            "before_last": self.before_last,
        }

    @staticmethod
    def unpacked(packed: Any) -> IteratorState:
        """Return what :meth:`packed` was called on.

        Raises:
            SetupError: the states of generators are damaged.
            KeyError, RuntimeError, TypeError: anything else.
        """
        ended, is_replaced, samplers = packed["ended"], packed["replaced"], packed.get("samplers", [])
        if not (isinstance(ended, bool) and isinstance(is_replaced, bool)):
            raise TypeError("expected true or false for whether an iterator has ended and is replaced")
        if not isinstance(samplers, list) or not all(isinstance(state, str) for state in samplers):
            raise TypeError("expected a list of text for the states of samplers")
        made_with = None if packed["made_with"] is None else unpack_states(packed["made_with"])
        generator = None if packed["generator"] is None else unpack_bytes(packed["generator"])
        if generator is not None:
            torch.Generator().set_state(generator)
        return IteratorState(ended, is_replaced, made_with, generator, samplers, packed["before_last"])


def watch(combined: CombinedLoader) -> None:
    """Record the iterators that a combined loader makes from now on of loaders with a state of their own."""
    known = {id(one.loader): one for one in _watched(combined) if one is not None}
    own = [one if _has_own_state(one) else None for one in combined.flattened]
    if any(one is not None for one in own):
        found = [None if one is None else known.get(id(one), _WatchedLoader(one)) for one in own]
        if not _watched(combined):
            combined.__class__ = _watching(type(combined))
        vars(combined)["_lightning_pipe_watched"] = found


def iterator_states(combined: CombinedLoader) -> list[IteratorState | None]:
    """Return the state of each loader's iterator; None for a loader without a state of its own."""
    watched = _watched(combined) or [None] * len(combined.flattened)
    return [None if one is None else one.state() for one in watched]


def positions_at_end(combined: CombinedLoader) -> Positions:
    """Return where loaders and iterators are whose epoch is over, or has not begun."""
    watched = _watched(combined) or [None] * len(combined.flattened)
    # For its state, torchdata's loader would make the iterator that is due, and draw.
    found = [
        (end_of_epoch(of), None if one is None else replace(one.state(), replaced=True))
        if one is None or one.due is None
        else (one.loaded, one.due)
        for one, of in zip(watched, combined.flattened, strict=True)
    ]
    return [loader for loader, _ in found], [iterator for _, iterator in found]


def positions_after(combined: CombinedLoader, last: dict[str, Any], before: dict[str, Any], *, cut: bool) -> Positions:
    """Return where loaders and iterators are whose epoch is over after a batch.

    Args:
        combined: loader that gave the batch.
        last: where its loaders were after the batch, as a ledger's entry says.
        before: where they were before it.
        cut: whether they had more batches, or may have had.
    """
    states, iterators = positions_at_end(combined)
    for place, (present, after) in enumerate(zip(iterators, last["iterators"], strict=False)):
        if present is None or after is None or after.ended:
            continue
        if cut or present.ended:
            # An iterator is ended again when a run continues, which its state at the end need not do.
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


def load_iterators(combined: CombinedLoader, loaders: Sequence[Any], iterators: Sequence[IteratorState | None]) -> None:
    """Let the next iteration of each loader with a state of its own continue where its iterator was.

    Args:
        combined: loader that :func:`watch` was called on.
        loaders: states of the loaders themselves, one each.
        iterators: those of their iterators, one each or none at all.
    """
    for watched, loader, iterator in zip(_watched(combined), loaders, iterators, strict=False):
        if watched is not None and loader is not None and iterator is not None:
            watched.load(loader, iterator)


def next_iterators(combined: CombinedLoader) -> dict[str, list[Any]]:
    """Return the states of the iterators that are made next, as a ledger's entries hold them."""
    found = [None if one is None else one.peek() for one in _watched(combined)] or [None] * len(combined.flattened)
    return {
        "loaders": [None if one is None else partial(_same, one[0]) for one in found],
        "iterators": [None if one is None else one[1] for one in found],
    }


def shuffled_over_ranks(loader: Any) -> Any:
    """Return a loader, whose rows Lightning distributes over ranks, with samplers that do so for torchdata's, too.

    Lightning replaces PyTorch's ``RandomSampler`` by a ``DistributedSampler``. It wraps torchdata's: each rank would
    draw its own order and take its part of that, so that some rows are trained twice in an epoch, and others never.
    """
    if _is_torchdatas(loader):
        for holder in (loader, loader.batch_sampler):
            wrapper = getattr(holder, "sampler", None)
            inner: Any = getattr(getattr(wrapper, "dataset", None), "_sampler", None)
            if not isinstance(wrapper, DistributedSamplerWrapper) or inner is None:
                continue
            is_shuffle = _is_torchdatas(inner) and getattr(inner, "replacement", None) is False
            if is_shuffle and len(inner) == len(inner.data_source):
                inner = SequentialSampler(inner.data_source)
            wrapper.dataset = _DrawnWhenUsed(inner)
    return loader


class _DrawnWhenUsed(Dataset[Any]):
    """A sampler's indices, as ``DistributedSamplerWrapper`` takes them.

    Lightning's own one draws when an iteration begins. A torchdata loader that continues begins two, and uses one.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        vars(self)["_sampler"] = sampler  # as Lightning's wrapper calls it
        self._indices: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, index: int) -> Any:
        if self._indices is None:
            self._indices = list(self.sampler)
        return self._indices[index]

    def reset(self) -> None:
        """Draw again at the next index."""
        self._indices = None


class _WatchedLoader:
    """A loader as the combined loader iterates over it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.due: IteratorState | None = None
        self.ended = False
        self._made_with: tuple[States | None, list[str]] = (None, [])
        self._peeked_with: tuple[States | None, list[str]] | None = None
        self.loaded: Any = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        due, self.due = self.due, None
        if due is not None:
            continued = self._continued(due)
            if not due.replaced:
                self.ended, self._made_with = due.ended, (due.made_with, due.samplers)
                return iter(()) if due.ended else _WatchedIterator(continued, self)
        self.ended = False
        self._made_with = self._random_states() if self._peeked_with is None else self._peeked_with
        self._peeked_with = None
        return _WatchedIterator(iter(self.loader), self)

    def _continued(self, due: IteratorState) -> Any:
        """The iterator that a checkpoint was written with, made again without a trace in the random generators."""
        if due.samplers and _is_torchdatas(self.loader):
            SamplerState(self.loader).put(due.samplers)
        with _drawing_from(due.made_with):
            continued = self._loaded_iterator()
            # What the first batch of an iterator changes in a dataset, it has changed.
            if due.replaced and due.before_last is not None and next(continued, _NONE) is _NONE:
                # The last batch was the first of a short loader that had begun again.
                if due.made_with is not None:
                    set_states(due.made_with, _CPU)
                continued = iter(self.loader)
                next(continued, None)
            if due.ended and next(continued, _NONE) is not _NONE:
                # From its state at the end this loader begins the next epoch by itself.
                self.loader.load_state_dict(copy.deepcopy(self.loaded))
                self.loader.state_dict()  # for which torchdata's loader makes an iterator, and draws
        self._put_generator(due)
        return continued

    def _loaded_iterator(self) -> Any:
        try:
            return iter(self.loader)
        except Exception as error:
            raise SetupError(
                f"A {type(self.loader).__name__} cannot continue from its state in the checkpoint"
                f" ({type(error).__name__}: {printable(str(error)[:200])}). Resume from another checkpoint, or with the"
                " dataloader that the checkpoint was written with."
            ) from error

    def _put_generator(self, due: IteratorState) -> None:
        if due.generator is not None and (generator := _generator(self.loader)) is not None:
            generator.set_state(due.generator)

    def load(self, state: Any, iterator: IteratorState) -> None:
        # A loader of the user's may keep what it gets, and change it.
        first = state if iterator.before_last is None or not iterator.replaced else iterator.before_last
        self.loader.load_state_dict(copy.deepcopy(first))
        self.loaded, self.due = state, iterator

    def peek(self) -> tuple[Any, IteratorState]:
        """The states of the iterator that is made next."""
        if self.due is not None:
            return self.loaded, self.due
        if self._made_with[0] is None:
            self._peeked_with = made_with, samplers = self._random_states()
            # For its state, torchdata's loader makes an iterator.
            state = copy.deepcopy(self.loader.state_dict())
            return state, replace(self.state(), made_with=made_with, samplers=samplers)
        return copy.deepcopy(self.loader.state_dict()), replace(self.state(), replaced=True)

    def state(self) -> IteratorState:
        generator = _generator(self.loader)
        made_with, samplers = self._made_with
        own = None if generator is None else generator.get_state()
        return IteratorState(self.ended, False, made_with, own, samplers)

    def _random_states(self) -> tuple[States, list[str]]:
        # Samplers with an epoch have been told which one it is. Loaders of other kinds may restore theirs themselves.
        samplers = SamplerState(self.loader).get(at_end=True) if _is_torchdatas(self.loader) else []
        return get_states(_CPU), samplers


class _WatchedIterator(Iterator[Any]):
    def __init__(self, inner: Iterator[Any], watched: _WatchedLoader) -> None:
        self._inner = inner
        self._watched = watched

    def __next__(self) -> Any:
        try:
            return next(self._inner)
        except StopIteration:
            self._watched.ended = True
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@cache
def _watching(base: type[CombinedLoader]) -> type[CombinedLoader]:
    """The class of a combined loader, with the loaders that it iterates over exchanged for those that are watched."""
    # With a second base class, objects of the first could not become ones of the result.
    changed = {
        "__module__": base.__module__,
        "__iter__": lambda combined: _iterate_over_watched(base.__iter__, combined),
    }
    made: type[CombinedLoader] = type(base.__name__, (base,), changed)
    return made


def _iterate_over_watched(iterate: Callable[[Any], Any], combined: Any) -> Any:
    loaders = combined.flattened
    watched = _watched(combined)
    combined.flattened = [of if one is None else one for one, of in zip(watched, loaders, strict=True)]
    try:
        return iterate(combined)
    finally:
        combined.flattened = loaders


def _watched(combined: CombinedLoader) -> list[_WatchedLoader | None]:
    found: list[_WatchedLoader | None] = vars(combined).get("_lightning_pipe_watched", [])
    return found


def _has_own_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not is_resumable(loader)


def _is_torchdatas(one: Any) -> bool:
    """Whether something is of a class of torchdata's, or of one derived from it."""
    return any(base.__module__.startswith("torchdata.") for base in type(one).__mro__)


@contextmanager
def _drawing_from(states: States | None) -> Iterator[None]:
    """Let the body draw from other states of the shared generators, and leave no trace in them."""
    before = get_states(_CPU)
    if states is not None:
        set_states(states, _CPU)
    try:
        yield
    finally:
        set_states(before, _CPU)


def _same(state: Any) -> Any:
    return state


def _generator(loader: Any) -> torch.Generator | None:
    found = getattr(loader, "generator", None)
    return found if isinstance(found, torch.Generator) else None
