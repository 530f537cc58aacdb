"""One partition of a pipe: some layers in a row, and what runs them for a micro-batch.

Tested in ``tests/pipe/test_pipe.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import SetupError
from lightning_pipe.pipe.position import Position, at
from lightning_pipe.pipe.randomness import LayerGenerators, MiniBatchSeed
from lightning_pipe.pipe.skip import SkipKey, SkipRoute, Skips, using

__all__ = ["Modes", "NamedBuffer", "Partition"]

# Of each module whether it trains.
Modes = tuple[bool, ...]
# A buffer, the module that has it, and its name there.
NamedBuffer = tuple[nn.Module, str, Tensor]


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
        self.targets: dict[SkipKey, int] = {route.key: route.target for route in routes if route.source == index}
        # By which modules train: whether the layers draw random numbers, and change their input in place; and whether
        # a loss behind them draws.
        self.draws: dict[Modes, bool] = {}
        self.changes_input: dict[Modes, bool] = {}
        self.loss_draws: dict[Any, bool] = {}
        # By the same: which buffers the layers change, by the modules that have them and their names there.
        self._changing: dict[Modes, list[tuple[nn.Module, str]]] = {}
        # Of which it is known that all gradients in their graphs are of parameters and inputs.
        self.known_graphs: set[Any] = set()
        # Look for draws in every operation: what was found in the first micro-batch has turned out not to hold.
        self.watched = False
        self._compile_options: dict[str, Any] | None = None
        self._compiled: Callable[[tuple[Any, ...]], Any] | None = None

    @property
    def name(self) -> str:
        """For messages."""
        last = self.first + len(self.layers) - 1
        layers = f"layer {last}" if last == self.first else f"layers {self.first} to {last}"
        return f"partition {self.index} ({layers}, on {self.device})"

    @property
    def training(self) -> Modes:
        """Which of its modules are in training mode."""
        return tuple(module.training for layer in self.layers for module in layer.modules())

    def target(self, key: SkipKey | None) -> int:
        """The partition that uses what this one hands on: under None the next one, else where the skip leads."""
        return self.index + 1 if key is None else self.targets[key]

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
        self._compile_options, self._compiled = options, None

    @property
    def compiled(self) -> Callable[[tuple[Any, ...]], Any] | None:
        """Runs the layers compiled; None where that is not asked for."""
        if self._compile_options is not None and self._compiled is None:
            # A code object for each partition: torch.compile counts how often it compiles one, and has a limit.
            shared = Partition._run_layers
            code = shared.__code__.replace(co_name=f"partition{self.index}")
            own = FunctionType(code, shared.__globals__, code.co_name, shared.__defaults__, shared.__closure__)
            self._compiled = torch.compile(own.__get__(self), **self._compile_options)
        return self._compiled

    def __getstate__(self) -> dict[str, Any]:
        # A copy compiles its own layers.
        return {**self.__dict__, "_compiled": None, "known_graphs": set(), "loss_draws": {}, "_changing": {}}

    def run(
        self,
        inputs: tuple[Any, ...],
        skips: Skips,
        where: Position,
        seed: MiniBatchSeed,
        training: Modes,
        buffers: Sequence[NamedBuffer] | None = None,
    ) -> Any:
        """Run the layers for a micro-batch.

        Args:
            inputs: of the first layer.
            skips: those that lead here; what the layers leave is in it afterwards.
            where: the micro-batch.
            seed: of the mini-batch.
            training: see :attr:`training`.
            buffers: where the layers run again, those to run with: a :meth:`snapshot` from before the first time.

        Returns:
            what the last layer returns.
        """
        draws = None if self.watched else self.draws.get(training)
        if draws is None and self._compile_options is not None and not self.watched:
            draws = self._try_draws(inputs, skips, where, seed, training)
        kept = self._changes_seen(training) if buffers is None else self._buffers_are(buffers)
        with at(where), using(skips), kept:
            if draws is False:
                return (self.compiled or self._run_layers)(inputs)
            with LayerGenerators(seed, where.micro_batch) as generators:
                value = self._run_layers(inputs, generators.enter_layer)
        if draws is None and not self.watched:
            self.draws[training] = generators.drew
        return value

    def run_loss(
        self, loss: Callable[[Any], Tensor], kind: Any, output: Any, where: Position, seed: MiniBatchSeed
    ) -> Tensor:
        """Make the loss of what :meth:`run` returned; what it draws is its own, as a layer's.

        Args:
            loss: called with *output*.
            kind: the same for losses of which all draw or none.
            output: of the last layer.
            where: the micro-batch.
            seed: of the mini-batch.
        """
        if not self.watched and self.loss_draws.get(kind) is False:
            return loss(output)
        with LayerGenerators(seed, where.micro_batch) as generators:
            generators.enter_layer(self.first + len(self.layers))
            found = loss(output)
        if not self.watched:
            self.loss_draws[kind] = generators.drew
        return found

    def _try_draws(
        self, inputs: tuple[Any, ...], skips: Skips, where: Position, seed: MiniBatchSeed, training: Modes
    ) -> bool:
        """Run the layers once for nothing, to know before the first micro-batch whether they can be compiled.

        That cannot be one that was not compiled: what it keeps for its backward, compiled code may change.
        """
        given = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        with (
            torch.no_grad(),
            at(where._replace(recomputing=True)),
            using(Skips(skips.values)),
            self._buffers_are(self.snapshot(None)),
            LayerGenerators(seed, where.micro_batch) as generators,
        ):
            self._run_layers(given, generators.enter_layer)
        self.draws[training] = generators.drew
        if generators.drew:
            warnings.warn(
                f"{self.name} draws random numbers, for which compiled code has no generator of each micro-batch; it"
                " runs without being compiled. Move its random layers to another partition to have the rest compiled",
                stacklevel=2,
            )
        return generators.drew

    def _run_layers(self, inputs: tuple[Any, ...], enter: Callable[[int], None] | None = None) -> Any:
        value: Any = None
        for number, layer in enumerate(self.layers, self.first):
            if enter is not None:
                enter(number)
            value = layer(*inputs) if number == self.first else layer(value)
            if isinstance(value, GeneratorType):
                raise SetupError(
                    f"forward of layer {number}, a {type(layer).__name__}, returns a generator; a layer that yields"
                    " stash(...) or pop(...) needs @skippable(stash=[...], pop=[...]) on its class"
                )
        return value

    def snapshot(self, training: Modes | None) -> list[NamedBuffer]:
        """Copies of the buffers that layers change, so that they can run again from where they were.

        Args:
            training: see :attr:`training`; None for copies of all buffers.
        """
        changing = None if training is None else self._changing.get(training)
        if changing is None:
            return [(module, name, buffer.clone()) for module, name, buffer in self._buffers()]
        return [
            (module, name, buffer.clone()) for module, name in changing if (buffer := module._buffers[name]) is not None
        ]

    def _buffers(self) -> list[NamedBuffer]:
        return [
            (module, name, buffer)
            for layer in self.layers
            for module in layer.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @contextmanager
    def _changes_seen(self, training: Modes) -> Iterator[None]:
        """Find out, in the first forward, which buffers the layers change: a spectral norm's vectors, say."""
        if training in self._changing:
            yield
            return
        before = [(*named, named[-1]._version) for named in self._buffers() if not named[-1].is_inference()]
        yield
        self._changing[training] = [
            (module, name)
            for module, name, buffer, version in before
            # Running statistics are changed without a trace.
            if (isinstance(module, _NormBase) and module.training)
            or module._buffers.get(name) is not buffer
            or buffer._version != version
        ]

    @contextmanager
    def _buffers_are(self, others: Sequence[NamedBuffer]) -> Iterator[None]:
        """In the body, others are in the place of buffers: the first forward has put this micro-batch into those."""
        # Not changed and put back: earlier micro-batches' graphs hold them.
        before = [(module, name, module._buffers[name]) for module, name, _ in others]
        for module, name, other in others:
            module._buffers[name] = other
        try:
            yield
        finally:
            for module, name, buffer in before:
                module._buffers[name] = buffer
