"""Random numbers for work that runs ahead.

Fetching and the transfer hooks run some batches before the batch being trained. If they drew from the same generators
as the model, how far ahead a plan runs would change what dropout draws. So each kind of such work draws from a stream
of its own, which makes every plan draw the same. The first fetch of an epoch comes before any of its training, in every
plan and in Lightning's own loop: it uses the common stream, so a sampler is seeded as it is there.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

# The loader's; on_before_batch_transfer's; those of the hooks that move a batch to the device and change it there.
Stream = Literal["fetch", "prepare", "transfer"]
# Of each library what its own functions return.
States = dict[str, Any]


class RandomStreams:
    """The generators of PyTorch (CPU, and CUDA if the device is one), NumPy and Python, in states of their own.

    Args:
        device: the device whose generator the transfer hooks may use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: dict[str, States] = {}

    def restart(self, own: dict[str, States] | None = None) -> None:
        """Begin an epoch: the first fetch uses the common stream, and all go on from there.

        Args:
            own: instead, in the middle of an epoch: the states that the streams go on from.
        """
        self._own = dict(own or {})

    @contextmanager
    def active(self, stream: Stream) -> Iterator[None]:
        """Draw from a stream in the body; the first of all is the fetch."""
        if not self._own:
            yield
            self._own["fetch"] = get_states(self._device)
        else:
            common = get_states(self._device)
            set_states(self._own[stream], self._device)
            try:
                yield
            finally:
                self._own[stream] = get_states(self._device)
                set_states(common, self._device)
        if len(self._own) == 1:
            self._own["prepare"] = _derived(self._own["fetch"])
            self._own["transfer"] = _derived(self._own["prepare"])

    def states(self, stream: Stream) -> States:
        """Where a stream is, which has been used."""
        return self._own[stream]


def get_states(device: torch.device) -> States:
    """Where this process's generators are: PyTorch's, Python's, NumPy's if it is there, the device's if it has one."""
    states: States = {"torch": torch.get_rng_state(), "python": random.getstate()}
    # Whoever draws from NumPy has imported it.
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_states(states: States, device: torch.device) -> None:
    """Put the generators where they were; one that *states* does not have stays where it is."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    # NumPy may have been imported since, or not yet.
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def pack_states(states: States) -> dict[str, Tensor]:
    """As tensors, which a checkpoint may hold that is loaded with ``weights_only``."""
    packed = {name: value for name, value in states.items() if name in ("torch", "cuda")}
    version, numbers, gauss = states["python"]
    packed["python"] = torch.tensor([version, *numbers], dtype=torch.int64)
    packed["python_gauss"] = _optional(gauss)
    if "numpy" in states:
        _, keys, position, has_gauss, cached = states["numpy"]
        packed["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        packed["numpy_gauss"] = _optional(cached)
    return packed


def unpack_states(packed: dict[str, Tensor]) -> States:
    """What :func:`pack_states` packed."""
    states: States = {name: value.cpu() for name, value in packed.items() if name in ("torch", "cuda")}
    version, *numbers = packed["python"].tolist()
    states["python"] = (version, tuple(numbers), _from_optional(packed["python_gauss"]))
    if "numpy" in packed and (numpy := sys.modules.get("numpy")) is not None:
        *keys, position, has_gauss = packed["numpy"].tolist()
        cached = _from_optional(packed["numpy_gauss"])
        states["numpy"] = ("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached)
    return states


def _optional(number: float | None) -> Tensor:
    return torch.tensor([] if number is None else [number], dtype=torch.float64)


def _from_optional(packed: Tensor) -> float | None:
    return packed.item() if len(packed) else None


def _derived(states: States) -> States:
    """Generators seeded from others, whose states stay what they are."""
    source = torch.Generator()
    source.set_state(states["torch"])
    seed = int(torch.randint(2**63 - 1, (), generator=source))
    derived: States = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": random.Random(seed).getstate(),
    }
    if "numpy" in states:
        derived["numpy"] = sys.modules["numpy"].random.RandomState(seed % 2**32).get_state()
    if "cuda" in states:
        derived["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
    return derived
