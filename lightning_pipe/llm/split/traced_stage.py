"""Module that a stage of a traced model runs: the stage's part of the trace, over tensors under their own names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lightning_pipe._compat.torch import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.model.stage_module import registered_tensors
from lightning_pipe.llm.split.traced_graph import CutGraph, GraphPiece

_MADE_WITH = "the model's trace was made with"
_AGAIN = "Make the example micro-batch like those of training"


class _TracedLayer(nn.Module):
    """Replacement of a layer, with the layer's tensors, that runs the layer's operations of the trace."""

    def __init__(self, pieces: Mapping[bool, GraphPiece]) -> None:
        super().__init__()
        self._pieces = dict(pieces)

    def forward(self, training: bool, *given: Any) -> tuple[Any, ...]:
        piece = self._pieces[training]
        start = len(f"{piece.layer}.")
        made: tuple[Any, ...] = piece.code(*given, *(find_tensor(self, name[start:]) for name in piece.own))
        return made


class TracedPart(nn.Module):
    """Traced operations of one stage, used instead of a pruned model in a ``StageModule``.

    The first stage takes the model's positional arguments, a later stage the values from the previous stage. Every
    stage takes all keywords of the micro-batch, and uses those that its part of the trace uses. A stage returns the
    values for the next stage, as a tuple if there are several. The last stage returns the model's output.
    """

    def __init__(
        self,
        traces: Mapping[bool, StageTrace],
        stage_index: int,
        tensors: Mapping[str, Tensor],
        persistent: Collection[str],
    ) -> None:
        super().__init__()
        pieces = {
            training: {piece.layer: piece for piece in trace.graph.stages[stage_index].pieces}
            for training, trace in traces.items()
        }
        layers = {
            name: _TracedLayer({training: of_layers[name] for training, of_layers in pieces.items()})
            for name in pieces[True]
            if name is not None
        }
        self.layer_names = tuple(layers)
        self._traces = dict(traces)
        self._stage_index = stage_index
        self._leader: list[nn.Module] = []  # a list, so that the leader is not registered as a submodule
        _fill(self, tensors, persistent, layers)

    def follow(self, leader: nn.Module) -> None:
        """Use the training or evaluation mode of ``leader`` from now on."""
        self._leader = [leader]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training = self._leader[0].training if self._leader else self.training
        trace = self._traces[training]
        code = trace.graph.stages[self._stage_index]
        values = trace.inputs.of_keywords(kwargs)
        if self._stage_index == 0:
            values |= trace.inputs.of_arguments(args)
            trace.inputs.check(values)
        else:
            restored = map(_restore, args, code.received_order)
            values |= zip(code.received, restored, strict=True)
        for piece in code.pieces:
            given = [values[name] for name in piece.inputs]
            for name in piece.last:
                del values[name]
            given += [find_tensor(self, name) for name in piece.foreign]
            made = piece.code(*given) if piece.layer is None else self.get_submodule(piece.layer)(training, *given)
            values |= zip(piece.outputs, made, strict=True)
        if self._stage_index < len(trace.graph.stages) - 1:
            sent = tuple(map(_in_order, (values[name] for name in code.sent), code.sent_order))
            return sent[0] if len(sent) == 1 else sent
        results = zip(trace.graph.results, trace.graph.is_value, strict=True)
        return tree_unflatten([values[one] if is_value else one for one, is_value in results], trace.structure)


def _in_order(value: Tensor, order: Sequence[int]) -> Tensor:
    """Contiguous tensor in memory order, ready to send. Keeping the layout keeps the whole model's rounding."""
    return (value if list(order) == sorted(order) else value.permute(*order)).contiguous()


def _restore(value: Tensor, order: Sequence[int]) -> Tensor:
    return value if list(order) == sorted(order) else value.permute(*sorted(range(len(order)), key=order.__getitem__))


@dataclass(frozen=True)
class StageTrace:
    """A traced forward in training or in evaluation mode.

    Attributes:
        graph: the cut graph.
        inputs: description of the inputs that it was traced with.
        structure: tree structure of its results.
        constants: tensors that the forward creates from numbers, by the names assigned to them.
    """

    graph: CutGraph
    inputs: TraceInputs
    structure: TreeSpec
    constants: Mapping[str, Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> StageTrace:
        return self  # immutable


@dataclass(frozen=True)
class TraceInputs:
    """Inputs that the model was traced with, and the conditions on other inputs.

    Attributes:
        names: names of the values, positional arguments first.
        arguments: tree structure of the positional arguments.
        keywords: tree structure of each keyword argument, by name.
        examples: example of each value.
        guards: function that takes all values, and raises if the trace is not valid for them.
    """

    names: tuple[str, ...]
    arguments: TreeSpec
    keywords: Mapping[str, TreeSpec]
    examples: tuple[Any, ...]
    guards: Callable[..., object]

    @classmethod
    def of(
        cls, program: ExportedProgram, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> TraceInputs:
        leaves, structure = tree_flatten(args)
        keywords = {name: tree_flatten(value)[1] for name, value in kwargs.items()}
        examples = [*leaves, *tree_leaves(dict(kwargs))]
        described = [_Like(one.dtype, tuple(one.shape)) if isinstance(one, Tensor) else one for one in examples]
        guards = program.module(check_guards=True)._guards_fn
        return cls(tuple(names), structure, keywords, tuple(described), guards)  # type: ignore[arg-type]

    def of_arguments(self, args: tuple[Any, ...]) -> dict[str, Any]:
        leaves, structure = tree_flatten(args)
        if structure != self.arguments:
            raise InputError(
                f"the arguments are {_describe(args)}, but {_MADE_WITH} arguments of another structure. {_AGAIN}"
            )
        return dict(zip(self.names, leaves, strict=False))

    def of_keywords(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if kwargs.keys() != self.keywords.keys():
            raise InputError(
                f"the keywords of a micro-batch are {', '.join(kwargs) or 'none'}; {_MADE_WITH}"
                f" {', '.join(self.keywords) or 'none'}. {_AGAIN}"
            )
        leaves: list[Any] = []
        for name, structure in self.keywords.items():
            found, found_structure = tree_flatten(kwargs[name])
            if found_structure != structure:
                raise InputError(
                    f"the keyword {name} is {_describe(kwargs[name])}, but {_MADE_WITH} another structure. {_AGAIN}"
                )
            leaves += found
        return dict(zip(self.names[len(self.names) - len(leaves) :], leaves, strict=True))

    def check(self, values: Mapping[str, Any]) -> None:
        for name, example in zip(self.names, self.examples, strict=True):
            found = values[name]
            if isinstance(example, _Like):
                holds = isinstance(found, Tensor) and found.dtype == example.dtype and found.dim() == len(example.shape)
            else:
                holds = not isinstance(found, Tensor) and found == example
            if not holds:
                raise InputError(f"{name} is {_describe(found)}; {_MADE_WITH} {_describe(example)}. {_AGAIN}")
        try:
            self.guards(*(values[name] for name in self.names))
        except AssertionError as error:
            found = ", ".join(f"{name} {_describe(values[name])}" for name in self.names)
            raise InputError(
                f"the model's trace is not valid for {found} ({error}); {_MADE_WITH}"
                f" {', '.join(map(_describe, self.examples))}. Pad to sizes that it is valid for, or remove the part of"
                " the model that depends on the size"
            ) from error


@dataclass(frozen=True)
class _Like:
    dtype: torch.dtype
    shape: tuple[int, ...]


def _describe(value: Any) -> str:
    if isinstance(value, (Tensor, _Like)):
        return f"{tuple(value.shape)} of {value.dtype}"
    return repr(tree_map(lambda one: _Like(one.dtype, tuple(one.shape)) if isinstance(one, Tensor) else one, value))


def join_parts(parts: Sequence[TracedPart]) -> nn.Module:
    """Join parts into one module with their tensors and layers. The parts follow its training mode."""
    if len(parts) == 1:
        return parts[0]
    whole = nn.Module()
    for part in parts:
        layers = {name: part.get_submodule(name) for name in part.layer_names}
        _fill(whole, dict(registered_tensors(part)), set(part.state_dict(keep_vars=True)), layers)
        part.follow(whole)
    return whole.train(parts[0].training)


def find_tensor(module: nn.Module, name: str) -> Tensor:
    """Tensor with the given FQN: a parameter, a buffer or a plain attribute."""
    tensor: Tensor = attrgetter(name)(module)
    return tensor


def _fill(
    module: nn.Module, tensors: Mapping[str, Tensor], persistent: Collection[str], layers: Mapping[str, nn.Module]
) -> None:
    """Register tensors in a module by FQN, in order. Missing submodules are taken from ``layers`` or created."""

    def inner(fqn: str) -> nn.Module:
        found = module
        for depth, atom in enumerate(atoms := fqn.split(".") if fqn else []):
            if atom not in found._modules:
                found.add_module(atom, layers.get(".".join(atoms[: depth + 1])) or nn.Module())
            found = found.get_submodule(atom)
        return found

    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        holder = inner(prefix)
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(leaf, tensor)
        else:
            holder.register_buffer(leaf, tensor, name in persistent)
    for name in layers:
        inner(name)
