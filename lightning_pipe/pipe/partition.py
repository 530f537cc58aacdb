"""One partition of a pipe: consecutive layers, and the code that runs them for a micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import NormBase, pytree
from lightning_pipe.engine import SetupError
from lightning_pipe.pipe.position import MicroBatchPosition, set_micro_batch_position
from lightning_pipe.pipe.randomness import LayerGenerators, MiniBatchSeed
from lightning_pipe.pipe.skip import SkipKey, SkipRoute, Skips, set_current_skips

# One flag per module: True if the module is in training mode.
Modes = tuple[bool, ...]
# Module, name of the buffer in the module, and the buffer.
NamedBuffer = tuple[nn.Module, str, Tensor]


class Partition:
    """Layers that run in sequence on one device."""

    def __init__(
        self, index: int, first: int, layers: Sequence[nn.Module], device: torch.device, routes: Sequence[SkipRoute]
    ) -> None:
        self.index = index
        self.first_layer = first
        self.layers = list(layers)
        self.device = device
        self.targets: dict[SkipKey, int] = {route.key: route.target for route in routes if route.source == index}
        # Keyed by the training flags: True if the layers draw random numbers, and if they change their input in place.
        # Keyed by the kind of loss: True if the loss function draws.
        self.draws: dict[Modes, bool] = {}
        self.changes_input: dict[Modes, bool] = {}
        self.loss_draws: dict[Any, bool] = {}
        # Keyed by the training flags: buffers that the layers change, as pairs of module and name.
        self._changing: dict[Modes, list[tuple[nn.Module, str]]] = {}
        # Keys of graphs that were checked: only parameters and inputs in them require gradients.
        self.known_graphs: set[Any] = set()
        # True if every operation is checked for draws, because the first micro-batch's result was wrong.
        self.checks_every_draw = False
        self._compile_options: dict[str, Any] | None = None
        self._compiled: Callable[[tuple[Any, ...]], Any] | None = None

    @property
    def name(self) -> str:
        """Name in messages."""
        last = self.first_layer + len(self.layers) - 1
        layers = f"layer {last}" if last == self.first_layer else f"layers {self.first_layer} to {last}"
        return f"partition {self.index} ({layers}, on {self.device})"

    @property
    def module_training_modes(self) -> Modes:
        """Training flags of all modules in the layers."""
        return tuple(module.training for layer in self.layers for module in layer.modules())

    def skip_destination(self, key: SkipKey | None) -> int:
        """Return the partition that receives a skip, or the next partition for None (the value of the last layer)."""
        return self.index + 1 if key is None else self.targets[key]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that require gradients."""
        parameters = dict.fromkeys(parameter for layer in self.layers for parameter in layer.parameters())
        return [parameter for parameter in parameters if parameter.requires_grad]

    def compile(self, **options: Any) -> None:
        """Compile the layers in their next run, unless they draw random numbers."""
        self._compile_options, self._compiled = options, None

    @property
    def compiled_forward(self) -> Callable[[tuple[Any, ...]], Any] | None:
        """Compiled function of the layers; None without :meth:`compile`."""
        if self._compile_options is not None and self._compiled is None:
            # Each partition has its own code object: torch.compile limits how often it compiles the same one.
            shared = Partition._run_layers
            code = shared.__code__.replace(co_name=f"partition{self.index}")
            function = FunctionType(code, shared.__globals__, code.co_name, shared.__defaults__, shared.__closure__)
            self._compiled = torch.compile(function.__get__(self), **self._compile_options)
        return self._compiled

    def __getstate__(self) -> dict[str, Any]:
        # A copy compiles its own layers.
        return {**self.__dict__, "_compiled": None, "known_graphs": set(), "loss_draws": {}, "_changing": {}}

    def run(
        self,
        inputs: tuple[Any, ...],
        skips: Skips,
        micro_batch_position: MicroBatchPosition,
        seed: MiniBatchSeed,
        training: Modes,
        buffers: Sequence[NamedBuffer] | None = None,
    ) -> Any:
        """Run the layers for a micro-batch."""
        draws = None if self.checks_every_draw else self.draws.get(training)
        if draws is None and self._compile_options is not None and not self.checks_every_draw:
            draws = self._detect_random_draws(inputs, skips, micro_batch_position, seed, training)
        buffer_context = self._record_changed_buffers(training) if buffers is None else self._replace_buffers(buffers)
        with set_micro_batch_position(micro_batch_position), set_current_skips(skips), buffer_context:
            if draws is False:
                return (self.compiled_forward or self._run_layers)(inputs)
            with LayerGenerators(seed, micro_batch_position.micro_batch) as generators:
                value = self._run_layers(inputs, generators.enter_layer)
        if draws is None and not self.checks_every_draw:
            self.draws[training] = generators.has_drawn
        return value

    def compute_loss(
        self,
        loss: Callable[[Any], Tensor],
        kind: Any,
        output: Any,
        micro_batch_position: MicroBatchPosition,
        seed: MiniBatchSeed,
    ) -> Tensor:
        """Compute the loss of the output of :meth:`run`, with its own random stream, like a layer."""
        if not self.checks_every_draw and self.loss_draws.get(kind) is False:
            return loss(output)
        with LayerGenerators(seed, micro_batch_position.micro_batch) as generators:
            generators.enter_layer(self.first_layer + len(self.layers))
            result = loss(output)
        if not self.checks_every_draw:
            self.loss_draws[kind] = generators.has_drawn
        return result

    def _detect_random_draws(
        self,
        inputs: tuple[Any, ...],
        skips: Skips,
        micro_batch_position: MicroBatchPosition,
        seed: MiniBatchSeed,
        training: Modes,
    ) -> bool:
        """Run the layers once and discard the output, to find out before the first micro-batch if they can be compiled.

        The first micro-batch itself must run compiled: later compiled micro-batches may change tensors that an
        uncompiled one has saved for its backward.
        """
        input_copies = pytree.tree_map_only(Tensor, Tensor.clone, inputs)
        with (
            torch.no_grad(),
            set_micro_batch_position(micro_batch_position._replace(recomputing=True)),
            set_current_skips(Skips(skips.values)),
            self._replace_buffers(self.snapshot_buffers(None)),
            LayerGenerators(seed, micro_batch_position.micro_batch) as generators,
        ):
            self._run_layers(input_copies, generators.enter_layer)
        self.draws[training] = generators.has_drawn
        if generators.has_drawn:
            warnings.warn(
                f"{self.name} draws random numbers and runs uncompiled, because compiled code cannot use one generator"
                " for each micro-batch. Move its random layers to another partition to compile the other layers",
                stacklevel=2,
            )
        return generators.has_drawn

    def _run_layers(self, inputs: tuple[Any, ...], enter: Callable[[int], None] | None = None) -> Any:
        value: Any = None
        for number, layer in enumerate(self.layers, self.first_layer):
            if enter is not None:
                enter(number)
            value = layer(*inputs) if number == self.first_layer else layer(value)
            if isinstance(value, GeneratorType):
                raise SetupError(
                    f"forward of layer {number}, a {type(layer).__name__}, returns a generator. Decorate a class whose"
                    " forward yields stash(...) or pop(...) with @skippable(stash=[...], pop=[...])"
                )
        return value

    def snapshot_buffers(self, training: Modes | None) -> list[NamedBuffer]:
        """Copy the buffers that the layers change, so that a recomputation can start from the same values."""
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
    def _record_changed_buffers(self, training: Modes) -> Iterator[None]:
        """Context that records in the first forward which buffers the layers change (vectors of a spectral norm)."""
        if training in self._changing:
            yield
            return
        before = [(*named, named[-1]._version) for named in self._buffers() if not named[-1].is_inference()]
        yield
        self._changing[training] = [
            (module, name)
            for module, name, buffer, version in before
            # Updates of running statistics do not increment the version counter.
            if (isinstance(module, NormBase) and module.training)
            or module._buffers.get(name) is not buffer
            or buffer._version != version
        ]

    @contextmanager
    def _replace_buffers(self, replacements: Sequence[NamedBuffer]) -> Iterator[None]:
        """Context in which *replacements* replace the buffers, which the first forward has already updated."""
        # Replaced, not overwritten and restored: the graphs of earlier micro-batches hold the original tensors.
        before = [(module, name, module._buffers[name]) for module, name, _ in replacements]
        for module, name, replacement in replacements:
            module._buffers[name] = replacement
        try:
            yield
        finally:
            for module, name, buffer in before:
                module._buffers[name] = buffer
