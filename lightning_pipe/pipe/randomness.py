"""Random numbers of layers that run at the same time in several threads.

All threads of a process share one generator for each device. Drawn from by several at once its numbers would depend on
who comes first; saved and restored around a recomputation in one thread, they would be wrong in another, and nothing
would say so. So every layer has, for each micro-batch, a generator of its own, whose seed follows from one number that
each mini-batch draws from the user's generator. The same seed gives the same numbers, however layers are shared out
among partitions, in the first forward and when it is recomputed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import TorchDispatchMode, pytree, saved_tensor_hooks, schema_of
from lightning_pipe.engine import SetupError

__all__ = ["LayerGenerators", "MiniBatchSeed", "SharedGenerators"]

# One at a time may have a device's generator in a state of its own.
_lock = threading.Lock()
_MIXED = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: neighbouring counts give seeds far apart
_SEEDS = 2**63 - 1
# Arguments of operations that draw nothing where one of them is 0 or false.
_SWITCHES = frozenset({"dropout_p", "dropout", "train", "training"})


class MiniBatchSeed:
    """What the seeds of a mini-batch follow from: the number that the user's generator would give next.

    It is taken from the generator when the first forward is over, and only if a layer has drawn.
    """

    def __init__(self) -> None:
        ahead = torch.Generator("cpu")
        ahead.set_state(torch.default_generator.get_state())
        self._base = int(torch.randint(0, _SEEDS, (), dtype=torch.int64, generator=ahead, device="cpu"))
        self.drawn = False
        self._taken = False

    def of(self, layer: int, micro_batch: int) -> int:
        """The seed of a layer for a micro-batch."""
        self.drawn = True
        return (self._base + _MIXED * (1 + layer) + 0x2545F4914F6CDD1D * (1 + micro_batch)) % _SEEDS

    def take(self) -> None:
        """Take the number from the user's generator, if layers have drawn; once."""
        if self.drawn and not self._taken:
            self._taken = True
            torch.randint(0, _SEEDS, (), dtype=torch.int64, device="cpu")


class LayerGenerators(TorchDispatchMode):
    """While it is entered, operations that draw random numbers do so from the present layer's generator.

    Args:
        seed: of the mini-batch.
        micro_batch: its index.

    Attributes:
        drew: whether any has drawn.
    """

    def __init__(self, seed: MiniBatchSeed, micro_batch: int) -> None:
        super().__init__()
        self._seed = seed
        self._micro_batch = micro_batch
        self._layer = 0
        self.drew = False
        self._generators: dict[torch.device, torch.Generator] = {}

    def enter_layer(self, layer: int) -> None:
        """The operations that follow are this layer's."""
        self._layer = layer
        self._generators.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.drew = True
        _refuse_inner_checkpoint()
        device = _device_of(args, kwargs)
        if device.type == "cpu" and any(argument.name == "generator" for argument in schema_of(func).arguments):
            # With a generator told, nobody else's is touched, and no thread waits for another.
            return func(*args, **{**kwargs, "generator": self._own(device)})
        with _lock:
            own, shared = self._own(device), _generator(device)
            theirs = shared.get_state()
            try:
                shared.set_state(own.get_state())
                result = func(*args, **kwargs)
                own.set_state(shared.get_state())
            finally:
                shared.set_state(theirs)
        return result

    def _own(self, device: torch.device) -> torch.Generator:
        """The present layer's."""
        known = self._generators.get(device)
        if known is None:
            known = self._generators[device] = torch.Generator(device)
            known.manual_seed(self._seed.of(self._layer, self._micro_batch))
        return known


def _refuse_inner_checkpoint() -> None:
    """Nobody would know what to draw when it runs again."""
    hooks = saved_tensor_hooks()
    if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook"):
        raise SetupError(
            "a layer draws random numbers inside torch.utils.checkpoint, whose second run would draw others; take that"
            " out, and let the pipe do it: checkpoint='always' or 'except_last'"
        )


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation that may draw from the shared generators does so with these arguments."""
    if any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values())):
        return False
    # Attention without dropout, say: taken for one that draws, it would wait for that of other partitions.
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name in _SWITCHES:
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            if given is not None and not given:  # no probability, or not in training
                return False
    return True


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Where an operation draws: where it is told to make its result, or where its tensors are."""
    named = kwargs.get("device")
    if named is not None:
        return torch.device(named)
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            return leaf.device
    return torch.device("cpu")


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator


class SharedGenerators:
    """Tells whether layers have drawn from the generators that all threads share, since this was made.

    Args:
        devices: of the partitions.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        shared = dict.fromkeys([torch.device("cpu"), *devices])
        self._before = {device: _generator(device).get_state() for device in shared}

    def check(self) -> None:
        """Once tasks have run.

        Raises:
            SetupError: a partition drew that had not drawn in its first micro-batch, and so drew from these.
        """
        for device, before in self._before.items():
            if not torch.equal(_generator(device).get_state(), before):
                raise SetupError(
                    f"random numbers were drawn on {device} by a layer that drew none for its first micro-batch, or by"
                    " another thread, while the pipe ran: two partitions may have drawn at once, and nobody could"
                    " repeat it. Run the step again: from now on the pipe looks at every operation, which is slower;"
                    " or draw in every forward of a layer or in none, and in no other thread meanwhile"
                )
