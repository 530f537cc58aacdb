"""Random numbers for work that runs ahead.

Fetching and the transfer hooks run some batches before the batch being trained. If they drew from the same generators
as the model, how far ahead a plan runs would change what dropout draws. So each kind of such work draws from a stream
of its own, which makes every plan draw the same. The first fetch of an epoch comes before any of its training, in every
plan and in Lightning's own loop: it uses the common stream, so a sampler is seeded as it is there.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.safe_text import printable, shown

# The loader's; on_before_batch_transfer's; those of the hooks that move a batch to the device and change it there.
Stream = Literal["fetch", "prepare", "transfer"]
# Characters of packed states: those of all libraries have 35,000.
_LONGEST = 2**18
T = TypeVar("T")
# Of each library what its own functions return.
States = dict[str, Any]


class RandomStreams:
    """The generators of PyTorch (CPU, and CUDA if the device is one), NumPy and Python, in states of their own.

    Args:
        device: the device whose generator the transfer hooks may use.

    Attributes:
        common: where the common stream was when one of these was used last; anybody may forget it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: dict[str, States] = {}
        self.common: States | None = None

    def restart(self, own: dict[str, States] | None = None) -> None:
        """Begin an epoch: the first fetch uses the common stream, and all go on from there.

        Args:
            own: instead, in the middle of an epoch: the states that the streams go on from.
        """
        self._own = dict(own or {})

    def draw(self, stream: Stream, work: Callable[[], T]) -> T:
        """What *work* returns, which draws from a stream; the first of all is the fetch."""
        if not self._own:
            result = work()
            self._own["fetch"] = self.common = get_states(self._device)
        else:
            common = self.common = swap_states(self._own[stream], self._device)
            try:
                result = work()
            finally:
                self._own[stream] = swap_states(common, self._device)
        if len(self._own) == 1:
            self._own["prepare"] = _derived(self._own["fetch"])
            self._own["transfer"] = _derived(self._own["prepare"])
        return result

    def held(self, stream: Stream) -> States | None:
        """Where a stream is; None where it has not begun, or where NumPy was imported since."""
        states = self._own.get(stream)
        return states if states is not None and ("numpy" in states) == ("numpy" in sys.modules) else None

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


def swap_states(states: States, device: torch.device) -> States:
    """Put the generators where *states* says; returns where they were.

    Two swaps surround each fetch. Together they take 80 microseconds where nothing draws from NumPy, most of which is
    reading NumPy's state twice, and 130 otherwise.
    """
    before = get_states(device)
    # Setting NumPy's state takes ten times as long as the comparison.
    if "numpy" in before and _is_same_numpy_state(states.get("numpy"), before["numpy"]):
        states = {name: state for name, state in states.items() if name != "numpy"}
    set_states(states, device)
    return before


def _is_same_numpy_state(one: Any, other: Any) -> bool:
    """Whether two states of the Mersenne Twister are equal; NumPy has other states for other generators."""
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
        return False
    return one[2:] == other[2:] and bool(one[1].tobytes() == other[1].tobytes())


def pack_states(states: States) -> str:
    """As text, which any checkpoint may hold, and which can be compared."""
    version, numbers, gauss = states["python"]
    packed: dict[str, Any] = {"python": [version, list(numbers), gauss]}
    packed |= {name: pack_bytes(states[name]) for name in ("torch", "cuda") if name in states}
    if "numpy" in states:
        kind, keys, position, has_gauss, cached = states["numpy"]
        packed["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    return json.dumps(packed)


def unpack_states(packed: str) -> States:
    """What :func:`pack_states` packed.

    Raises:
        SetupError: anything else. NumPy checks no position, and would read beyond its numbers.
    """
    with _refused():
        found = json.loads(_short(packed))
        version, numbers, gauss = found["python"]
        states: States = {"python": (version, tuple(numbers), None if gauss is None else float(gauss))}
        random.Random().setstate(states["python"])
        states |= {name: unpack_bytes(found[name]) for name in ("torch", "cuda") if name in found}
        torch.Generator().set_state(states["torch"])
        if "numpy" in found and (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, position, has_gauss, cached = found["numpy"]
            if not (type(position) is int and 0 <= position <= len(keys)):
                raise ValueError(f"NumPy's position {shown(position)}")
            states["numpy"] = (kind, numpy.array(keys, dtype=numpy.uint32), position, int(has_gauss), float(cached))
            numpy.random.RandomState().set_state(states["numpy"])
    return states


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, SetupError):
            raise
        said = printable(str(error)[:200])
        raise SetupError(
            f"the checkpoint's states of random generators are damaged ({type(error).__name__}: {said}); resume from"
            " another checkpoint"
        ) from error


def _short(packed: str) -> str:
    if not isinstance(packed, str) or len(packed) > _LONGEST:
        raise ValueError(f"{shown(packed)} is no text of at most {_LONGEST} characters")
    return packed


def pack_bytes(state: Tensor) -> str:
    """A generator's state, uint8, as text."""
    return base64.b64encode(bytes(state.tolist())).decode()


def unpack_bytes(packed: str) -> Tensor:
    """What :func:`pack_bytes` packed.

    Raises:
        SetupError: anything else.
    """
    with _refused():
        return torch.tensor(list(base64.b64decode(_short(packed), validate=True)), dtype=torch.uint8)


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
