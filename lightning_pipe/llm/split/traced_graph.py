"""A traced forward cut at its split points: the operations, inputs and outputs of each stage.

Stages exchange only tensors, each with the next stage. A value that a later stage uses, such as an input of the first
stage, is therefore sent through every stage in between. Sizes are not sent: each stage reads them from its tensors::

    stage 0            stage 1            stage 2
    x, skip ─────────► y, skip ─────────► y + skip

Within a stage, the operations of one layer form a separate piece, so that the layer can be called as a module, as
sharding and checkpointing by layer require. Pieces hold no tensors: parameters are passed to them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.pipelining import pipe_split

from lightning_pipe._compat.torch import schema_of
from lightning_pipe.engine.common.errors import SetupError

# A traced forward has the first, a split policy inserts the second.
_MARKERS = (torch.ops.pippy._pipe_split.default, pipe_split)


@dataclass(frozen=True)
class GraphPiece:
    """Consecutive operations of one stage.

    Attributes:
        layer: FQN of the layer that all operations belong to; None for operations between layers.
        code: graph module, called with the input values, then the ``foreign`` tensors, then the ``own`` tensors.
            Returns a tuple.
        inputs: names of the input values.
        foreign: FQNs of used tensors that do not belong to the layer; all used tensors if ``layer`` is None.
        own: FQNs of used tensors that belong to the layer.
        outputs: names of the values that the piece computes.
        last: names of input values that no later piece of the stage needs.
    """

    layer: str | None
    code: fx.GraphModule
    inputs: tuple[str, ...]
    foreign: tuple[str, ...]
    own: tuple[str, ...]
    outputs: tuple[str, ...]
    last: tuple[str, ...]


@dataclass(frozen=True)
class StageCode:
    """Operations of one stage.

    Attributes:
        received: names of the values from the previous stage, in order; empty for the first stage.
        pieces: pieces of the stage, in order.
        sent: names of the values for the next stage, in order; empty for the last stage.
        received_order: dimensions of each received value in memory order, outermost first. Values are sent in this
            order.
        sent_order: dimensions of each sent value in memory order.
    """

    received: tuple[str, ...]
    pieces: tuple[GraphPiece, ...]
    sent: tuple[str, ...]
    received_order: tuple[tuple[int, ...], ...]
    sent_order: tuple[tuple[int, ...], ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """FQNs of the model's tensors that the stage uses."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.foreign + piece.own))


@dataclass(frozen=True)
class CutGraph:
    """A traced forward in stages.

    Attributes:
        stages: operations of each stage, in order.
        results: the model's flat results: names of values of the last stage, and constants.
        is_value: True for each result that is a name of a value, False for each constant.
        examples: shapes, dtypes and memory orders of the example's tensors, for each boundary between stages.
    """

    stages: tuple[StageCode, ...]
    results: tuple[Any, ...]
    is_value: tuple[bool, ...]
    examples: tuple[tuple[Any, ...], ...]


def whole_layers(traced: fx.GraphModule, layers: Sequence[str]) -> list[str]:
    """Layers that run once, without interruption in one stage, and whose tensors no other operation uses."""
    work = _Work(traced)
    runs: dict[str, int] = {}
    for (_, layer), _ in groupby(work.operations(), lambda node: (work.stage[node], _layer_of(node, layers))):
        if layer is not None:
            runs[layer] = runs.get(layer, 0) + 1
    outside = {
        attribute.target
        for attribute in work.attributes
        for user in attribute.users
        if not str(attribute.target).startswith(f"{_layer_of(user, layers)}.")
    }
    return [
        layer
        for layer, count in runs.items()
        if count == 1 and not any(str(name).startswith(f"{layer}.") for name in outside)
    ]


def cut(traced: fx.GraphModule, keywords: Sequence[str], layers: Sequence[str]) -> CutGraph:
    """Cut a traced forward at its calls of ``pipe_split``."""
    work = _Work(traced)
    everywhere = {node for node in work.placeholders if node.name in set(keywords)}
    work.check_changes(everywhere)
    work.repeat_sizes(everywhere)
    ends = range(1, work.num_stages)
    sent = [work.crossing(end, everywhere) for end in ends]
    for end, values in zip(ends, sent, strict=True):
        if not values:
            raise SetupError(
                f"no tensor goes from stage {end - 1} to stage {end}, expected at least one. Move or remove the split"
                " point between them"
            )
        for value in values:
            if not isinstance(value.meta.get("val"), Tensor):
                raise SetupError(
                    f"stage {end} needs {value.name}, a {type(value.meta.get('val')).__name__} that depends on values"
                    f" of an earlier stage ({value.format_node()}), but stages exchange only tensors. Move the split"
                    " point"
                )
    results: list[Any] = list(work.results)
    unfit = [node for node in results if isinstance(node, fx.Node) and node.op == "get_attr"]
    if unfit:
        raise SetupError(
            f"the model returns {unfit[0].target} itself; expected results that its forward computes. Return a computed"
            " tensor"
        )
    stages = []
    for stage in range(work.num_stages):
        received = sent[stage - 1] if stage else []
        leaving = sent[stage] if stage < len(sent) else [one for one in results if isinstance(one, fx.Node)]
        pieces = tuple(work.pieces(stage, leaving, layers))
        is_last = stage == work.num_stages - 1
        going = [] if is_last else leaving
        orders = (tuple(map(_order, received)), tuple(map(_order, going)))
        stages.append(StageCode(_names(received), pieces, _names(going), *orders))
    return CutGraph(
        tuple(stages),
        tuple(one.name if isinstance(one, fx.Node) else one for one in results),
        tuple(isinstance(one, fx.Node) for one in results),
        tuple(tuple(_example(value) for value in values) for values in sent),
    )


class _Work:
    """A graph with the stage of each of its operations.

    Attributes:
        stage: stage of each operation. Placeholders belong to the first stage.
        attributes: nodes for the model's tensors. Like nodes for other constants, they belong to no stage.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        self._traced = traced
        self._graph = traced.graph
        self.placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self.stage: dict[fx.Node, int] = dict.fromkeys(self.placeholders, 0)
        self.attributes = {
            node for node in self._graph.nodes if node.op == "get_attr" and isinstance(self._constant(node), Tensor)
        }
        self._number_stages()

    def _number_stages(self) -> None:
        number, marked, empty = 0, False, True
        for node in (one for one in self._graph.nodes if one.op == "call_function"):
            if node.target in _MARKERS:
                marked = True
            elif node.target is operator.getitem:
                # Keep the results of one operation in its stage, since a list of tensors cannot be sent.
                self.stage[node] = self.stage[node.args[0]]
            else:
                if marked and not empty:
                    number, empty = number + 1, True
                marked = False
                empty = empty and _is_size(node)
                self.stage[node] = number
        self.num_stages = number + 1

    def _constant(self, node: fx.Node) -> Any:
        return operator.attrgetter(str(node.target))(self._traced)

    @property
    def results(self) -> Sequence[Any]:
        return self._graph.output_node().args[0]  # type: ignore[return-value]

    def operations(self) -> Iterator[fx.Node]:
        return (node for node in self._graph.nodes if node.op == "call_function" and node in self.stage)

    def crossing(self, end: int, everywhere: Iterable[fx.Node] = ()) -> list[fx.Node]:
        """Values from earlier stages that stage ``end`` or a later one uses."""
        last = self.num_stages - 1
        free = set(everywhere)
        return [
            node
            for node, stage in self.stage.items()
            if stage < end
            and node not in free
            and any((last if user.op == "output" else self.stage[user]) >= end for user in node.users)
        ]

    def check_changes(self, everywhere: set[fx.Node]) -> None:
        """Refuse in-place writes to tensors that several stages hold, since their copies would then differ."""
        for node in self.operations():
            for changed in _written(node):
                origin = _origin(changed)
                stages = {self.stage[user] for user in origin.users if user in self.stage}
                shared = len(stages) > 1 if origin.op == "get_attr" else self.stage[origin] != self.stage[node]
                if shared or origin in everywhere:
                    what = origin.target if origin.op == "get_attr" else origin.name
                    raise SetupError(
                        f"stage {self.stage[node]} changes {what} in place ({node.format_node()}), but other stages"
                        " hold a copy of it. Write x = x + y instead of x += y in the model, or move the split point"
                    )

    def repeat_sizes(self, everywhere: set[fx.Node]) -> None:
        """Recompute sizes in each stage that needs them: a trace reads each size once, from the model's inputs."""
        for stage in range(1, self.num_stages):
            first = next(node for node in self.operations() if self.stage[node] == stage)
            own: dict[fx.Node, fx.Node] = {}
            has = [node for node in self.crossing(stage) if isinstance(node.meta.get("val"), Tensor)]
            has += [node for node in everywhere if isinstance(node.meta.get("val"), Tensor)]
            for size in [node for node in self.crossing(stage, everywhere) if _is_size(node)]:
                users = [user for user in size.users if self.stage.get(user) == stage]
                if users:
                    repeated = self._repeat(size, first, stage, has, own)
                    for user in users:
                        user.replace_input_with(size, repeated)

    def _repeat(
        self, size: fx.Node, before: fx.Node, stage: int, has: Sequence[fx.Node], own: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        if size in own:
            return own[size]
        found = _with_size(has, size.meta["val"])
        arguments = [one for one in size.all_input_nodes if _is_size(one)]
        copies = {one: self._repeat(one, before, stage, has, own) for one in arguments}
        with self._graph.inserting_before(before):
            if size.target is torch.ops.aten.sym_size.int and found is not None:
                copied = self._graph.call_function(torch.ops.aten.sym_size.int, found)
            else:
                copied = self._graph.node_copy(size, lambda node: copies.get(node, node))
        copied.meta = {"val": size.meta["val"]}
        self.stage[copied] = stage
        own[size] = copied
        return copied

    def pieces(self, stage: int, leaving: Sequence[fx.Node], layers: Sequence[str]) -> list[GraphPiece]:
        nodes = [node for node in self.operations() if self.stage[node] == stage]
        groups = [(layer, list(group)) for layer, group in groupby(nodes, lambda node: _layer_of(node, layers))]
        needed = set(leaving)
        found: list[GraphPiece] = []
        for layer, group in reversed(groups):
            piece, used = self._piece(layer, group, needed)
            needed |= used
            found.append(piece)
        return found[::-1]

    def _piece(
        self, layer: str | None, nodes: Sequence[fx.Node], needed: set[fx.Node]
    ) -> tuple[GraphPiece, set[fx.Node]]:
        inside = set(nodes)
        used = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside))
        values = [node for node in used if node in self.stage]
        tensors = [node for node in used if node in self.attributes]
        own = [node for node in tensors if str(node.target).startswith(f"{layer}.")]
        foreign = [node for node in tensors if node not in own]
        constants = [node for node in used if node not in self.stage and node not in tensors]
        outputs = [node for node in nodes if node in needed]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in [*values, *foreign, *own]:
            copies[node] = graph.placeholder(node.name)
        for node in constants:
            copies[node] = graph.get_attr(str(node.target))
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}  # drop example values and source locations
        graph.output(tuple(copies[node] for node in outputs))
        code = fx.GraphModule({str(node.target): self._constant(node) for node in constants}, graph)
        piece = GraphPiece(
            layer,
            code,
            _names(values),
            tuple(str(node.target) for node in foreign),
            tuple(str(node.target) for node in own),
            _names(outputs),
            _names(node for node in values if node not in needed),
        )
        return piece, set(values)


def _layer_of(node: fx.Node, layers: Iterable[str]) -> str | None:
    """Name of the layer call that an operation belongs to, or None. Later calls have names such as ``FQN@1``."""
    known = set(layers)
    inside = (name for name, _ in (node.meta.get("nn_module_stack") or {}).values())
    return next((name for name in inside if name.partition("@")[0] in known), None)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _with_size(tensors: Iterable[fx.Node], size: Any) -> tuple[fx.Node, int] | None:
    """First tensor and dimension with the given symbolic size, or None."""
    for node in tensors:
        for dim, other in enumerate(node.meta["val"].shape):
            if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                return node, dim
    return None


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that an operation writes to."""
    yield from _marked(node, lambda alias: alias is not None and alias.is_write)


def _origin(node: fx.Node) -> fx.Node:
    """Base of a view; the node itself if it is not a view."""
    if node.target is operator.getitem:
        return _origin(node.all_input_nodes[0])
    viewed = next(_marked(node, lambda alias: alias is not None), None)
    return node if viewed is None else _origin(viewed)


def _marked(node: fx.Node, wanted: Any) -> Iterator[fx.Node]:
    if isinstance(node.target, torch._ops.OpOverload):
        for position, argument in enumerate(schema_of(node.target).arguments):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(given, fx.Node) and wanted(argument.alias_info):
                yield given


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _example(value: fx.Node) -> tuple[Any, ...]:
    tensor = value.meta["val"]
    return tuple(map(_hint, tensor.shape)), tensor.dtype, _order(value)


def _order(value: fx.Node) -> tuple[int, ...]:
    strides = [_hint(one) for one in value.meta["val"].stride()]
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
