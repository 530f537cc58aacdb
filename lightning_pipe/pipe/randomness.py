"""Random numbers of layers that run at the same time in several threads.

All threads of a process share one generator per device. If several threads drew from it at the same time, the numbers
would depend on thread timing. Saving and restoring its state around a recomputation in one thread would silently change
the numbers of another thread. Therefore each layer has one generator per micro-batch. Its seed is derived from a number
that each mini-batch draws from the user's generator. The same seed gives the same numbers in the first forward and in
the recomputation, independent of the balance of partitions.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import TorchDispatchMode, get_active_saved_tensor_hooks, get_operator_schema, pytree
from lightning_pipe.engine import SetupError

# Held while a thread has replaced the state of a shared generator.
_lock = threading.Lock()
_MIXED = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: adjacent counts give seeds far apart
_SEEDS = 2**63 - 1
# Names of arguments that disable random draws if they are 0 or False.
_SWITCHES = frozenset({"dropout_p", "dropout", "train", "training"})


class MiniBatchSeed:
    """Base of a mini-batch's seeds: the user's generator's next number, drawn from it later if a layer has drawn."""

    def __init__(self) -> None:
        ahead = torch.Generator("cpu")
        ahead.set_state(torch.default_generator.get_state())
        self._base = int(torch.randint(0, _SEEDS, (), dtype=torch.int64, generator=ahead, device="cpu"))
        self.drawn = False
        self._advanced = False

    def layer_seed(self, layer: int, micro_batch: int) -> int:
        """Return the seed of a layer for a micro-batch."""
        self.drawn = True
        return (self._base + _MIXED * (1 + layer) + 0x2545F4914F6CDD1D * (1 + micro_batch)) % _SEEDS

    def advance_generator(self) -> None:
        """Draw the number from the user's generator if a layer has drawn. Later calls do nothing."""
        if self.drawn and not self._advanced:
            self._advanced = True
            torch.randint(0, _SEEDS, (), dtype=torch.int64, device="cpu")


class LayerGenerators(TorchDispatchMode):
    """Dispatch mode in which random operations draw from the current layer's generator."""

    def __init__(self, seed: MiniBatchSeed, micro_batch: int) -> None:
        super().__init__()
        self._seed = seed
        self._micro_batch = micro_batch
        self._layer = 0
        self.has_drawn = False
        self._generators: dict[torch.device, torch.Generator] = {}

    def enter_layer(self, layer: int) -> None:
        """Make *layer* the current layer for the following operations."""
        self._layer = layer
        self._generators.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        self.has_drawn = True
        _refuse_inner_checkpoint()
        device = _get_operation_device(args, kwargs)
        if device.type == "cpu" and any(
            argument.name == "generator" for argument in get_operator_schema(func).arguments
        ):
            # An explicit generator leaves the shared one untouched, so threads need no lock.
            return func(*args, **{**kwargs, "generator": self._layer_generator(device)})
        with _lock:
            generator, shared = self._layer_generator(device), _get_default_generator(device)
            shared_state = shared.get_state()
            try:
                shared.set_state(generator.get_state())
                result = func(*args, **kwargs)
                generator.set_state(shared.get_state())
            finally:
                shared.set_state(shared_state)
        return result

    def _layer_generator(self, device: torch.device) -> torch.Generator:
        """Return the current layer's generator."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
            generator.manual_seed(self._seed.layer_seed(self._layer, self._micro_batch))
        return generator


def _refuse_inner_checkpoint() -> None:
    """Refuse draws inside ``torch.utils.checkpoint``, which cannot restore a layer's generator for its second run."""
    hooks = get_active_saved_tensor_hooks()
    if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook"):
        raise SetupError(
            "a layer draws random numbers inside torch.utils.checkpoint, whose second run would draw different numbers."
            " Remove torch.utils.checkpoint, and use the pipe's checkpoint='always' or 'except_last' instead"
        )


def _draws_random_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a random operation draws from a shared generator with these arguments."""
    if any(isinstance(arg, torch.Generator) for arg in (*args, *kwargs.values())):
        return False
    # For example attention without dropout: counted as a draw, it would wait for the lock of other partitions.
    for place, argument in enumerate(get_operator_schema(func).arguments):
        if argument.name in _SWITCHES:
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            if value is not None and not value:  # no probability, or not in training
                return False
    return True


def _get_operation_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device that an operation draws on: its ``device`` argument, or the device of its tensors."""
    named = kwargs.get("device")
    if named is not None:
        return torch.device(named)
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            return leaf.device
    return torch.device("cpu")


def _get_default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator


class SharedGenerators:
    """States of the generators that all threads share, to detect draws from them since construction."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        shared = dict.fromkeys([torch.device("cpu"), *devices])
        self._before = {device: _get_default_generator(device).get_state() for device in shared}

    def check_unchanged(self) -> None:
        """Compare the states after the tasks have run."""
        for device, before in self._before.items():
            if not torch.equal(_get_default_generator(device).get_state(), before):
                raise SetupError(
                    f"random numbers were drawn on {device} while the pipe ran, by a layer that drew none for its first"
                    " micro-batch, or by another thread. Two partitions may have drawn at the same time, which is not"
                    " reproducible. Run the step again: from now on the pipe checks every operation, which is slower."
                    " To avoid this, draw in every forward of a layer or in no forward, and in no other thread"
                )
