"""Runs the pieces of a model one at a time: the input modules, each layer, and the output modules.

A piece runs as a stage that holds nothing else, with placeholder tensors of small values. Costs are assumed not to
depend on values. The measurement itself is a function, given by ``layer_costs`` and ``layer_profile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import tree_leaves
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.shapes import make_shape_cache_key
from lightning_pipe.llm.model.stage_module import (
    StageModule,
    copy_model_sharing_tensors,
    make_stage_module,
    replace_module_tensors,
)

T = TypeVar("T")
R = TypeVar("R")
LossOf = Callable[[Any, nn.Module], Tensor]


@dataclass(frozen=True)
class ModelPiece:
    """Piece of a model to measure."""

    stage: StageModule
    modules: tuple[nn.Module, ...]
    run: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Any, ...]
    batch: tuple[Tensor, ...]


@dataclass(frozen=True)
class ModelPieceResults(Generic[T]):
    """Results for the pieces of a model."""

    empty: T  # result for a stage without modules
    input: T | None  # result for all modules before the layers; None if the model has none
    layers: tuple[T, ...]  # result for each layer
    output: T  # result for all modules after the layers, and the loss

    @staticmethod
    def map(function: Callable[..., R], *results: ModelPieceResults[Any]) -> ModelPieceResults[R]:
        """Apply a function, piece by piece, to one or more results for the same model."""
        return ModelPieceResults(
            function(*(result.empty for result in results)),
            None if results[0].input is None else function(*(result.input for result in results)),
            tuple(
                function(*layer_results) for layer_results in zip(*(result.layers for result in results), strict=True)
            ),
            function(*(result.output for result in results)),
        )


@dataclass(frozen=True)
class LayerBench:
    """Builds and measures the pieces of a model."""

    model: nn.Module
    config: PPModuleConfig
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device
    prepare: Callable[[StageModule], object] = lambda stage: None
    layer_key: Callable[[int], Any] = lambda index: None
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def measure_each_piece(self, loss_of: LossOf, question: Callable[[ModelPiece], T]) -> ModelPieceResults[T]:
        """Measure each piece; layers with equal class, tensors, plain attributes and inputs are measured once."""
        config = self.config
        inputs, first = self.args, None
        if config.input_fqns:
            first, inputs = self._measure_piece(self._build_piece(config.input_fqns, 0, inputs), question)
        empty, _ = self._measure_piece(self._build_piece((), 1, inputs), question)
        layers: list[T] = []
        measured: dict[Any, tuple[T, tuple[Tensor, ...]]] = {}
        described = _make_layer_cost_keys([self.model.get_submodule(name) for name in config.layer_fqns])
        for index, (name, description) in enumerate(zip(config.layer_fqns, described, strict=True)):
            key = (description, tuple(map(make_shape_cache_key, inputs)), self.layer_key(index))
            if key not in measured:
                measured[key] = self._measure_piece(self._build_piece((name,), 1, inputs), question)
            result, inputs = measured[key]
            layers.append(result)
        last, _ = self._measure_piece(self._build_piece(config.output_fqns, 2, inputs, loss_of), question)
        return ModelPieceResults(empty, first, tuple(layers), last)

    def _measure_piece(self, piece: ModelPiece, question: Callable[[ModelPiece], T]) -> tuple[T, tuple[Tensor, ...]]:
        """Measurement of a piece, and placeholders of its outputs."""
        with self.within():
            return question(piece), tuple(map(_rand_hidden_states_like, piece.run(*piece.inputs)))

    def _build_piece(
        self,
        names: Sequence[str],
        stage_index: int,
        inputs: tuple[Any, ...],
        loss_of: LossOf | None = None,
    ) -> ModelPiece:
        """Build one of three stages, which holds the input modules, a layer, or the output modules."""
        stage = make_stage_module(copy_model_sharing_tensors(self.model), self.config, names, stage_index, 3).train()
        stage.balance = None  # sums of routers cost little
        with self.within():
            randomize_module_tensors(stage, self.device)
        self.prepare(stage)
        result_of = None if loss_of is None else lambda output: loss_of(output, stage.module)

        def run_stage(*args: Any) -> tuple[Tensor, ...]:
            output = stage(*args, result_of=result_of, **self.kwargs)
            return output if isinstance(output, tuple) else (output,)

        modules = tuple(map(stage.module.get_submodule, names))
        batch = tuple(leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor))
        return ModelPiece(stage, modules, run_stage, inputs, batch)


def randomize_module_tensors(stage: nn.Module, device: torch.device) -> None:
    """Replace a stage's tensors, in place, by placeholders that differ only in their values: small and varied."""

    def make_random_placeholder(tensor: Tensor) -> Tensor:
        # Tensors that are not parameters may be variances or frequencies, so their values are positive.
        return _rand_uniform_like(tensor, device, *((-0.1, 0.1) if isinstance(tensor, nn.Parameter) else (0.1, 1.0)))

    replace_module_tensors(stage, make_random_placeholder)


def _rand_uniform_like(tensor: Tensor, device: torch.device, low: float, high: float) -> Tensor:
    bare = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return bare.uniform_(low, high, generator=generator) if bare.is_floating_point() else bare


def _rand_hidden_states_like(output: Tensor) -> Tensor:
    return _rand_uniform_like(output, output.device, -1.0, 1.0).requires_grad_(output.is_floating_point())


def _make_layer_cost_keys(layers: Sequence[nn.Module]) -> list[Any]:
    """Description of each layer that determines its cost; attributes that equal the layer's index are ignored."""
    plain = [
        {
            (name, key): value
            for name, module in layer.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (bool, str, float, int))
        }
        for layer in layers
    ]
    indices = {key for key in plain[0] if [attributes.get(key) for attributes in plain] == list(range(len(layers)))}
    return [
        (
            type(layer),
            repr(layer),
            repr([item for item in attributes.items() if item[0] not in indices]),
            tuple(
                (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
                for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]
            ),
        )
        for layer, attributes in zip(layers, plain, strict=True)
    ]
