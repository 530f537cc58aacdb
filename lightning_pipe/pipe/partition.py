"""One partition of a pipe: some layers in a row, and what runs them for a micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe.position import Position, at
from lightning_pipe.pipe.randomness import LayerGenerators, MiniBatchSeed
from lightning_pipe.pipe.skip import SkipKey, Skips, using
from lightning_pipe.pipe.skip_layout import SkipRoute

__all__ = ["Partition"]


class Partition:
    """Layers that run one after the other on one device.

    Args:
        index: of the partition.
        first: the index of its first layer.
        layers: what it runs.
        device: where.
        routes: all skips between partitions.
    """

    def __init__(
        self, index: int, first: int, layers: Sequence[nn.Module], device: torch.device, routes: Sequence[SkipRoute]
    ) -> None:
        self.index = index
        self.first = first
        self.layers = list(layers)
        self.device = device
        self.leaves: list[SkipKey] = [route.key for route in routes if route.source == index]
        self.takes: list[SkipKey] = [route.key for route in routes if route.target == index]
        # By whether any layer trains: whether the layers draw random numbers, and change their input in place.
        self.draws: dict[bool, bool] = {}
        self.changes_input: dict[bool, bool] = {}
        self.compiled: Callable[[tuple[Any, ...]], Any] | None = None

    @property
    def name(self) -> str:
        """For messages."""
        last = self.first + len(self.layers) - 1
        layers = f"layer {last}" if last == self.first else f"layers {self.first} to {last}"
        return f"partition {self.index} ({layers}, on {self.device})"

    @property
    def training(self) -> bool:
        """Whether any of its layers is in training mode."""
        return any(module.training for layer in self.layers for module in layer.modules())

    def check_device(self) -> None:
        """Refuse layers that somebody has moved.

        Raises:
            SetupError: a parameter is elsewhere.
        """
        for layer in self.layers:
            for parameter in layer.parameters():
                if parameter.device != self.device:
                    raise SetupError(
                        f"{self.name} has parameters on {parameter.device}; its layers were moved after the pipe was"
                        " made: move them back, or make another Pipe"
                    )

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        own = dict.fromkeys(parameter for layer in self.layers for parameter in layer.parameters())
        return [parameter for parameter in own if parameter.requires_grad]

    def compile(self, **options: Any) -> None:
        """Have the layers compiled; those that draw random numbers run as they are."""
        self.compiled = torch.compile(self._run_layers, **options)

    def run(self, inputs: tuple[Any, ...], skips: Skips, where: Position, seed: MiniBatchSeed, training: bool) -> Any:
        """Run the layers for a micro-batch.

        Args:
            inputs: of the first layer.
            skips: those that lead here; what the layers leave is in it afterwards.
            where: the micro-batch.
            seed: of the mini-batch.
            training: see :attr:`training`.

        Returns:
            what the last layer returns.
        """
        draws = self.draws.get(training)
        with at(where), using(skips), self._statistics_kept() if where.recomputing else nullcontext():
            if draws is False:
                return (self.compiled or self._run_layers)(inputs)
            with LayerGenerators(seed, where.micro_batch) as generators:
                value = self._run_layers(inputs, generators.enter_layer)
        if draws is None:
            self.draws[training] = generators.drew
            if generators.drew and self.compiled is not None:
                warnings.warn(
                    f"{self.name} draws random numbers, for which compiled code has no generator of each micro-batch;"
                    " it runs without being compiled. Move its random layers to another partition to have the rest"
                    " compiled",
                    stacklevel=2,
                )
        return value

    def _run_layers(self, inputs: tuple[Any, ...], enter: Callable[[int], None] | None = None) -> Any:
        value: Any = None
        for number, layer in enumerate(self.layers, self.first):
            if enter is not None:
                enter(number)
            value = layer(*inputs) if number == self.first else layer(value)
        return value

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """In the body, running statistics are copies: the first forward has put this micro-batch into them."""
        buffers = [
            (module, name, buffer)
            for layer in self.layers
            for module in layer.modules()
            if isinstance(module, _NormBase) and module.training
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        # Not changed and put back: earlier micro-batches' graphs hold them.
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
