"""Random number streams for work that runs ahead of training.

Fetching and the transfer hooks run some batches ahead of the batch being trained. If they drew from the same generators
as the model, the number of batches that a plan runs ahead would change the random numbers of dropout. Therefore each
kind of such work draws from a separate stream, and all plans draw the same numbers. The first fetch of an epoch runs
before any of its training, in every plan and in Lightning's loop. It uses the common stream, so samplers are seeded as
in Lightning's loop.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

# Streams of the loader, of on_before_batch_transfer, and of the hooks that move a batch to the device and change it
# there.
Stream = Literal["fetch", "prepare", "transfer"]
T = TypeVar("T")
# State of each library's generator, by library name, in the format of that library.
RNGStates = dict[str, Any]


class RandomStreams:
    """Separate states of the generators of PyTorch (CPU, and CUDA for a CUDA device), NumPy and Python.

    Attributes:
        common: states of the common stream when a stream was last used. Other code may reset it to None.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, RNGStates] = {}
        self.common: RNGStates | None = None

    def restart(self, streams: dict[str, RNGStates] | None = None) -> None:
        """Begin an epoch. The first fetch uses the common stream, and the streams start from its states."""
        self._streams = dict(streams or {})

    def run_with_stream(self, stream: Stream, work: Callable[[], T]) -> T:
        """Run *work* with a stream and return its result. The first call of an epoch must use ``fetch``."""
        if not self._streams:
            result = work()
            self._streams["fetch"] = self.common = get_rng_states(self._device)
        else:
            common = self.common = swap_rng_states(self._streams[stream], self._device)
            try:
                result = work()
            finally:
                self._streams[stream] = swap_rng_states(common, self._device)
        if len(self._streams) == 1:
            self._streams["prepare"] = _derive_rng_states(self._streams["fetch"])
            self._streams["transfer"] = _derive_rng_states(self._streams["prepare"])
        return result

    def get_stream_state(self, stream: Stream) -> RNGStates:
        """Return the states of a stream before its next use. Before the first fetch, all are the common stream."""
        return self._streams[stream] if self._streams else get_rng_states(self._device)


def get_rng_states(device: torch.device) -> RNGStates:
    """Return the states of the generators of PyTorch, Python, NumPy (if imported) and a CUDA *device*."""
    states: RNGStates = {"torch": torch.get_rng_state(), "python": random.getstate()}
    # NumPy has not been used if it has not been imported.
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: RNGStates, device: torch.device) -> None:
    """Restore the generators from *states*. Generators without an entry are unchanged."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    # NumPy may have been imported after the states were read, or may not be imported yet.
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def swap_rng_states(states: RNGStates, device: torch.device) -> RNGStates:
    """Restore the generators from *states*, and return their previous states.

    Each fetch makes two swaps. Together they take 80 microseconds if no code draws from NumPy, mostly for reading
    NumPy's state twice, and 130 microseconds otherwise.
    """
    before = get_rng_states(device)
    # Setting NumPy's state takes ten times as long as the comparison.
    if "numpy" in before and _is_same_numpy_state(states.get("numpy"), before["numpy"]):
        states = {name: state for name, state in states.items() if name != "numpy"}
    set_rng_states(states, device)
    return before


def _is_same_numpy_state(first: Any, second: Any) -> bool:
    """Return True if two states of NumPy's Mersenne Twister are equal. States of other generators are not compared."""
    if not (isinstance(first, tuple) and isinstance(second, tuple)):
        return False
    return first[2:] == second[2:] and bool(first[1].tobytes() == second[1].tobytes())


def pack_rng_states(states: RNGStates) -> RNGStates:
    """Return *states* as tensors and plain values, which any checkpoint can hold."""
    if "numpy" not in states:
        return states
    kind, keys, *fields = states["numpy"]
    return {**states, "numpy": (kind, keys.tolist(), *fields)}


def unpack_rng_states(packed: RNGStates) -> RNGStates:
    """Return the states that :func:`pack_rng_states` packed."""
    states = {name: state for name, state in packed.items() if name != "numpy"}
    if "numpy" in packed and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *fields = packed["numpy"]
        states["numpy"] = (kind, numpy.array(keys, dtype=numpy.uint32), *fields)
    return states


def _derive_rng_states(states: RNGStates) -> RNGStates:
    """Return states of generators seeded from *states*, which are unchanged."""
    source = torch.Generator()
    source.set_state(states["torch"])
    seed = int(torch.randint(2**63 - 1, (), generator=source))
    derived: RNGStates = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": random.Random(seed).getstate(),
    }
    if "numpy" in states:
        derived["numpy"] = sys.modules["numpy"].random.RandomState(seed % 2**32).get_state()
    if "cuda" in states:
        derived["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
    return derived
