"""The pieces of a model run one by one: the modules before its layers, each layer, and those after.

A piece is run as the stage that would hold nothing else, over stand-ins of the model's tensors: a model that is
deferred stays so, and no rank holds more than a piece. What a piece costs is taken not to depend on values. What is
asked of a piece (``layer_costs``, ``layer_profile``) is a function.

Tested in ``tests/llm/measure/test_layer_profile.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import tree_leaves
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.stage_module import StageModule, make_stage, shallow_copy

__all__ = ["LayerBench", "LayerPiece", "LossOf", "Pieces", "stand_in"]

T = TypeVar("T")
R = TypeVar("R")
LossOf = Callable[[Any, nn.Module], Tensor]


@dataclass(frozen=True)
class LayerPiece:
    """Something to measure.

    Attributes:
        stage: that holds nothing else.
        modules: what it holds.
        run: forward, from inputs to output; for the last, to the loss.
        inputs: of it.
        batch: tensors that are there in any case.
    """

    stage: StageModule
    modules: tuple[nn.Module, ...]
    run: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    batch: tuple[Tensor, ...]


@dataclass(frozen=True)
class Pieces(Generic[T]):
    """What was found of each piece.

    Attributes:
        empty: of a stage without modules.
        input: of the modules before the layers, together; None where there are none.
        layers: of each layer.
        output: of the modules after them, together, and the loss.
    """

    empty: T
    input: T | None
    layers: tuple[T, ...]
    output: T

    @staticmethod
    def of(function: Callable[..., R], *given: Pieces[Any]) -> Pieces[R]:
        """Apply a function, piece by piece, to what was found of one model: several times, or of several kinds."""
        return Pieces(
            function(*(one.empty for one in given)),
            None if given[0].input is None else function(*(one.input for one in given)),
            tuple(function(*same) for same in zip(*(one.layers for one in given), strict=True)),
            function(*(one.output for one in given)),
        )


class LayerBench:
    """Makes the pieces of a model.

    Args:
        model: the unsplit one, real or deferred; it is left as it is.
        config: what it is made of.
        args: what it is called with for one micro-batch, on ``device``.
        kwargs: its keywords.
        device: where to run.
        prepare: what else is done to each piece's stage.
        varies: what of a layer's index matters to that.
        within: entered to make a piece's stand-ins, to run it and to ask it; not to cut the model.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ModuleConfig,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device,
        prepare: Callable[[StageModule], object] = lambda stage: None,
        varies: Callable[[int], Any] = lambda index: None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model = model
        self._config = config
        self._args = args
        self._kwargs = dict(kwargs)
        self._device = device
        self._prepare = prepare
        self._varies = varies
        self._within = within

    def ask(self, loss_of: LossOf, question: Callable[[LayerPiece], T]) -> Pieces[T]:
        """Ask each piece; layers that are alike, by class, tensors, plain attributes and inputs, are asked once.

        Args:
            loss_of: from the last piece's output, and the part of the model that gave it, the loss: a scalar.
            question: to each piece.
        """
        config = self._config
        inputs, first = self._args, None
        if config.input_fqns:
            first, output = self._ask(self._piece(config.input_fqns, 0, inputs), question)
            inputs = (output,)
        empty, _ = self._ask(self._piece((), 1, inputs), question)
        layers: list[T] = []
        known: dict[Any, tuple[T, Tensor]] = {}
        described = _described([self._model.get_submodule(name) for name in config.layers])
        for index, (name, description) in enumerate(zip(config.layers, described, strict=True)):
            alike = (description, _signature(inputs), self._varies(index))
            if alike not in known:
                known[alike] = self._ask(self._piece((name,), 1, inputs), question)
            found, output = known[alike]
            layers.append(found)
            inputs = (output,)
        last, _ = self._ask(self._piece(config.output_fqns, 2, inputs, loss_of), question)
        return Pieces(empty, first, tuple(layers), last)

    def _ask(self, piece: LayerPiece, question: Callable[[LayerPiece], T]) -> tuple[T, Tensor]:
        """The answer, and something like the piece's output."""
        with self._within():
            return question(piece), _hidden_like(piece.run(*piece.inputs))

    def _piece(
        self,
        names: Sequence[str],
        stage_index: int,
        inputs: tuple[Any, ...],
        loss_of: LossOf | None = None,
    ) -> LayerPiece:
        """A stage of three: the input modules', a layer's or the output modules'."""
        stage = make_stage(shallow_copy(self._model), self._config, names, stage_index, 3).train()
        with self._within():
            stand_in(stage, self._device)
        self._prepare(stage)
        result_of = None if loss_of is None else lambda output: loss_of(output, stage.module)

        def run(*given: Any) -> Tensor:
            output: Tensor = stage(*given, result_of=result_of, **self._kwargs)
            return output

        modules = tuple(map(stage.module.get_submodule, names))
        batch = tuple(one for one in tree_leaves((self._args, self._kwargs)) if isinstance(one, Tensor))
        return LayerPiece(stage, modules, run, inputs, batch)


def stand_in(stage: nn.Module, device: torch.device) -> None:
    """Give a stage, in place, tensors of its own, like those it had in all but values: small ones, not all alike."""
    made: dict[int, Any] = {}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            # Those that are not trained may be variances or frequencies.
            bare = _some_values(tensor, device, *((-0.1, 0.1) if isinstance(tensor, nn.Parameter) else (0.1, 1.0)))
            made[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
        found: Tensor = made[id(tensor)]
        return found

    for module in stage.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for values in held:
            values.update({name: like(value) for name, value in values.items() if isinstance(value, Tensor)})


def _some_values(like: Tensor, device: torch.device, low: float, high: float) -> Tensor:
    bare = torch.zeros(like.shape, dtype=like.dtype, device=device)
    own = torch.Generator(device).manual_seed(0)
    return bare.uniform_(low, high, generator=own) if bare.is_floating_point() else bare


def _hidden_like(output: Tensor) -> Tensor:
    return _some_values(output, output.device, -1.0, 1.0).requires_grad_(output.is_floating_point())


def _described(layers: Sequence[nn.Module]) -> list[Any]:
    """For each layer, what decides what it costs; a number that is each one's own index does not."""
    plain = [
        {
            (name, key): value
            for name, module in layer.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (bool, str, float, int))
        }
        for layer in layers
    ]
    indices = {key for key in plain[0] if [one.get(key) for one in plain] == list(range(len(layers)))}
    return [
        (
            type(layer),
            repr(layer),
            repr([item for item in own.items() if item[0] not in indices]),
            tuple(
                (name, tuple(one.shape), one.dtype, one.requires_grad)
                for name, one in [*layer.named_parameters(), *layer.named_buffers()]
            ),
        )
        for layer, own in zip(layers, plain, strict=True)
    ]


def _signature(inputs: tuple[Any, ...]) -> Any:
    return tuple((tuple(one.shape), one.dtype) if isinstance(one, Tensor) else repr(one) for one in inputs)
