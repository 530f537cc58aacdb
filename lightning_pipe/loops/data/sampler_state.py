"""State of a loader's samplers: their random generators and counters.

PyTorch's samplers hold at most a ``torch.Generator``. A user-defined sampler may count its epochs, or draw from a
``random.Random`` or a NumPy generator, and its interface does not show this. Therefore the plain attributes of every
sampler reachable from a loader are compared with their first values, and the attributes that have changed are state.
The first values are recorded by the first loader in this process, since a sampler that several loaders use in turn
changes after that.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from lightning_pipe._compat.lightning import wrapped_sampler

_PLAIN = (bool, int, float, str, type(None))
# Attribute of a sampler that holds its first counters, which are needed for the lifetime of the sampler.
_FIRST = "_lightning_pipe_first"


class SamplerState:
    """State of the samplers of one loader, which can be read and restored as plain values and tensors."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._samplers = list(_iterate_nested_samplers(loader))
        generators = [
            value for holder in (loader, *self._samplers) for value in vars(holder).values() if _is_generator(value)
        ]
        self._generators: list[Any] = list({id(generator): generator for generator in generators}.values())
        self._at_first = [
            vars(sampler).setdefault(_FIRST, _get_sampler_counters(sampler)) for sampler in self._samplers
        ]

    def get_state(self, *, at_end: bool = False) -> list[Any]:
        """Return the states of the generators, then the changed counters of each sampler."""
        states = [_get_generator_state(generator) for generator in self._generators]
        for sampler, at_first in zip(self._samplers, self._at_first, strict=True):
            told = at_end and hasattr(sampler, "set_epoch")
            states.append({} if told else dict(_get_sampler_counters(sampler).items() - at_first.items()))
        return states

    def set_state(self, states: list[Any]) -> None:
        """Restore generators and counters from the result of :meth:`get_state` for an equally constructed loader."""
        for generator, state in zip(self._generators, states, strict=False):
            _set_generator_state(generator, state)
        changed = states[len(self._generators) :]
        for sampler, at_first, counters in zip(self._samplers, self._at_first, changed, strict=False):
            # Counters missing from the state return to their first values, since the sampler may have been used since.
            # Samplers with set_epoch are excluded, because it has already been called for this epoch.
            unchanged = {} if hasattr(sampler, "set_epoch") else at_first
            vars(sampler).update(unchanged | counters)

    def shares_with(self, other: SamplerState) -> bool:
        """Return True if the state is held by the same objects as that of another loader."""
        return [id(holder) for holder in self._list_stateful_objects()] == [
            id(holder) for holder in other._list_stateful_objects()
        ]

    def _list_stateful_objects(self) -> list[Any]:
        """Return the generators, and the samplers that may have counters, which excludes PyTorch's and Lightning's."""
        libraries = ("torch.", "lightning.")
        samplers = [sampler for sampler in self._samplers if not type(sampler).__module__.startswith(libraries)]
        return [*self._generators, *samplers]


def _iterate_nested_samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the samplers of the loader, each once, outer samplers first."""
    due: list[Any] = [loader.batch_sampler, loader.sampler]
    seen: set[int] = set()
    while due:
        sampler = due.pop(0)
        if sampler is None or id(sampler) in seen or not hasattr(sampler, "__dict__"):
            continue
        seen.add(id(sampler))
        yield sampler
        due += [value for value in vars(sampler).values() if isinstance(value, Sampler)]
        # Lightning distributes the indices of a sampler over ranks by wrapping the sampler as a dataset.
        due.append(wrapped_sampler(sampler))


def _get_sampler_counters(sampler: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(sampler).items() if isinstance(value, _PLAIN)}


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def _get_generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return (
        generator.getstate()
        if isinstance(generator, random.Random)
        else _plain(_get_numpy_bit_generator(generator).state)
    )


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _get_numpy_bit_generator(generator).state = state


def _plain(state: Any) -> Any:
    """Return a state of NumPy with lists instead of arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _get_numpy_bit_generator(generator: Any) -> Any:
    """Return the bit generator of a NumPy generator."""
    bit_generator = getattr(generator, "bit_generator", None)
    return generator._bit_generator if bit_generator is None else bit_generator
