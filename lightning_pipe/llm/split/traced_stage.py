"""The module that a stage of a traced model runs: what the trace computes there, over tensors that bear their names.

Tested in ``tests/llm/split/test_traced_split.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lightning_pipe._compat.torch import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.split.traced_graph import CutGraph, GraphPiece

__all__ = ["StageTrace", "TraceInputs", "TracedPart", "find_tensor", "join_parts", "registered_tensors"]

_MADE_WITH = "the model's trace was made with"
_AGAIN = "make the example micro-batch like those of training"


class _TracedLayer(nn.Module):
    """Stands where a layer was, with the layer's tensors, and computes what the layer did in the trace."""

    def __init__(self, pieces: Mapping[bool, GraphPiece]) -> None:
        super().__init__()
        self._pieces = dict(pieces)

    def forward(self, training: bool, *given: Any) -> tuple[Any, ...]:
        piece = self._pieces[training]
        start = len(f"{piece.layer}.")
        made: tuple[Any, ...] = piece.code(*given, *(find_tensor(self, name[start:]) for name in piece.own))
        return made


class TracedPart(nn.Module):
    """What one stage computes, in the place of the pruned model of a ``StageModule``.

    The first stage takes what the model takes; a later one takes the values that come from the stage before. Every one
    takes all of the micro-batch's keywords, and uses those that the trace used there. Gives the values for the next
    stage, a tuple if there are several; the last gives what the model gives.
    """

    def __init__(
        self,
        traces: Mapping[bool, StageTrace],
        stage_index: int,
        tensors: Mapping[str, Tensor],
        persistent: Collection[str],
    ) -> None:
        super().__init__()
        pieces = {training: trace.graph.stages[stage_index].pieces for training, trace in traces.items()}
        layers = {
            name: _TracedLayer({training: _piece_of(name, pieces[training]) for training in pieces})
            for name in dict.fromkeys(piece.layer for piece in pieces[True])
            if name is not None
        }
        self.layer_names = tuple(layers)
        self._traces = dict(traces)
        self._stage_index = stage_index
        self._leader: list[nn.Module] = []  # in a list, so that it is not part of this one
        _fill(self, tensors, persistent, layers)

    def follow(self, leader: nn.Module) -> None:
        """From now on, be in training or evaluation as that module is."""
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
    """What can be sent as it lies in memory: what computes with it there rounds as the whole model would."""
    return (value if list(order) == sorted(order) else value.permute(*order)).contiguous()


def _restore(value: Tensor, order: Sequence[int]) -> Tensor:
    return value if list(order) == sorted(order) else value.permute(*sorted(range(len(order)), key=order.__getitem__))


@dataclass(frozen=True)
class StageTrace:
    """A forward pass in training or in evaluation.

    Attributes:
        graph: cut.
        inputs: what it was called with.
        structure: of its results.
        constants: tensors that the forward pass itself makes of numbers, by the name given to them.
    """

    graph: CutGraph
    inputs: TraceInputs
    structure: TreeSpec
    constants: Mapping[str, Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> StageTrace:
        return self  # nothing in it ever changes


@dataclass(frozen=True)
class TraceInputs:
    """What the traced model was called with, and what has to be true of other inputs.

    Attributes:
        names: of the values, those of arguments first.
        arguments: their structure.
        keywords: names and structure of each.
        examples: of each value.
        guards: takes all values; raises if the trace would not hold.
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
            raise InputError(f"the arguments are {_describe(args)}, {_MADE_WITH} others: {_AGAIN}")
        return dict(zip(self.names, leaves, strict=False))

    def of_keywords(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if kwargs.keys() != self.keywords.keys():
            raise InputError(
                f"the keywords of a micro-batch are {', '.join(kwargs) or 'none'}; {_MADE_WITH}"
                f" {', '.join(self.keywords) or 'none'}: {_AGAIN}"
            )
        leaves: list[Any] = []
        for name, structure in self.keywords.items():
            found, found_structure = tree_flatten(kwargs[name])
            if found_structure != structure:
                raise InputError(f"the keyword {name} is {_describe(kwargs[name])}, {_MADE_WITH} another: {_AGAIN}")
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
                raise InputError(f"{name} is {_describe(found)}; {_MADE_WITH} {_describe(example)}: {_AGAIN}")
        try:
            self.guards(*(values[name] for name in self.names))
        except AssertionError as error:
            found = ", ".join(f"{name} {_describe(values[name])}" for name in self.names)
            raise InputError(
                f"the model's trace does not hold for {found} ({error}); {_MADE_WITH}"
                f" {', '.join(map(_describe, self.examples))}: pad to sizes that it holds for, or let the model do"
                " without what depends on the size"
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
    """A module with the tensors and layers of several; they are in training or evaluation as it is."""
    if len(parts) == 1:
        return parts[0]
    whole = nn.Module()
    for part in parts:
        layers = {name: part.get_submodule(name) for name in part.layer_names}
        _fill(whole, dict(registered_tensors(part)), set(part.state_dict(keep_vars=True)), layers)
        part.follow(whole)
    return whole.train(parts[0].training)


def registered_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def find_tensor(module: nn.Module, name: str) -> Tensor:
    """The tensor with an FQN, a parameter or buffer or in a plain attribute."""
    tensor: Tensor = attrgetter(name)(module)
    return tensor


def _fill(
    module: nn.Module, tensors: Mapping[str, Tensor], persistent: Collection[str], layers: Mapping[str, nn.Module]
) -> None:
    """Give a module tensors by FQN, in their order; modules on the way are made, or are the layers."""

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


def _piece_of(layer: str, pieces: Sequence[GraphPiece]) -> GraphPiece:
    return next(piece for piece in pieces if piece.layer == layer)
