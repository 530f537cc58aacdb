"""State of a loader's samplers: random generators of their own, and counters.

PyTorch's samplers hold a ``torch.Generator`` at most. A user's sampler may count its epochs, or draw from a
``random.Random`` or a NumPy generator, and its interface does not show this. Therefore the plain attributes of every
sampler that a loader reaches are compared with their first values. The attributes that have changed are state. First
values are those of the first loader in this process: a sampler that several loaders use in turn has changed since then.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from lightning_pipe.engine import SetupError
from lightning_pipe.loops.random_streams import pack_bytes, unpack_bytes

__all__ = ["SamplerState"]

_PLAIN = (bool, int, float, str, type(None))
# Attribute that a sampler's first counters are kept in: they are needed for as long as it is there.
_FIRST = "_lightning_pipe_first"


class SamplerState:
    """State of the samplers of one loader, which can be read and restored as text.

    Args:
        loader: the loader; samplers inside other samplers, or inside Lightning's wrapper, are included.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._samplers = list(_reached(loader))
        held = [
            value for holder in (loader, *self._samplers) for value in vars(holder).values() if _is_generator(value)
        ]
        self._generators: list[Any] = list({id(one): one for one in held}.values())
        self._at_first = [vars(one).setdefault(_FIRST, _counters(one)) for one in self._samplers]

    def get(self, *, at_end: bool = False) -> list[str]:
        """Return the states of the generators, then the changed counters of each sampler.

        Args:
            at_end: whether the epoch is over. Counters of samplers with ``set_epoch`` are then left out, since that
                call sets them for the next epoch.
        """
        states = [_pack(generator) for generator in self._generators]
        for sampler, at_first in zip(self._samplers, self._at_first, strict=True):
            told = at_end and hasattr(sampler, "set_epoch")
            changed = {} if told else dict(_counters(sampler).items() - at_first.items())
            states.append(json.dumps(changed))
        return states

    def put(self, states: list[str]) -> None:
        """Restore generators and counters from what :meth:`get` returned for an equally constructed loader.

        Args:
            states: states in the order of :meth:`get`; missing ones leave the remaining samplers unchanged.
        """
        count = len(self._generators)
        for generator, state in zip(self._generators, states, strict=False):
            _unpack(generator, state)
        for sampler, at_first, state in zip(self._samplers, self._at_first, states[count:], strict=False):
            # A sampler that has been used since goes back to where it began; one that is told the epoch has been told.
            unchanged = {} if hasattr(sampler, "set_epoch") else at_first
            vars(sampler).update(unchanged | json.loads(state))

    def shares_with(self, other: SamplerState) -> bool:
        """Return whether the state is held by the same objects as another loader's."""
        return [id(one) for one in self._stateful()] == [id(one) for one in other._stateful()]

    def _stateful(self) -> list[Any]:
        """Generators, and samplers that may count; PyTorch's and Lightning's own do not."""
        own = [one for one in self._samplers if not type(one).__module__.startswith(("torch.", "lightning."))]
        return [*self._generators, *own]


def _reached(loader: DataLoader[Any]) -> Iterator[Any]:
    """Samplers of the loader, each once, outer samplers first."""
    due: list[Any] = [loader.batch_sampler, loader.sampler]
    seen: set[int] = set()
    while due:
        one = due.pop(0)
        if one is None or id(one) in seen or not hasattr(one, "__dict__"):
            continue
        seen.add(id(one))
        yield one
        due += [value for value in vars(one).values() if isinstance(value, Sampler)]
        # Lightning distributes the indices of any sampler over ranks by wrapping the sampler as a dataset.
        due += [
            wrapped for wrapped in (getattr(getattr(one, "dataset", None), "_sampler", None),) if wrapped is not None
        ]


def _counters(sampler: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(sampler).items() if isinstance(value, _PLAIN)}


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def _pack(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return pack_bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    return json.dumps(_bits(generator).state, default=lambda array: array.tolist())


def _unpack(generator: Any, packed: str) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(unpack_bytes(packed))
    elif isinstance(generator, random.Random):
        version, numbers, gauss = json.loads(packed)
        generator.setstate((version, tuple(numbers), gauss))
    else:
        state = json.loads(packed)
        # NumPy checks neither position, and would read beyond its numbers: 624 of MT19937, a buffer of 4 of Philox.
        if not (0 <= state["state"].get("pos", 0) <= 624 and 0 <= state.get("buffer_pos", 0) <= 4):
            raise SetupError(
                "the checkpoint's state of a sampler's NumPy generator is damaged: expected a position of at most 624,"
                f" or 4 in a buffer, got {state['state'].get('pos')!r}, {state.get('buffer_pos')!r}; take another"
            )
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    """Bit generator below a NumPy generator."""
    found = getattr(generator, "bit_generator", None)
    return generator._bit_generator if found is None else found
