"""Stages of a model that is not a list of layers: its forward is traced and cut at split points.

A stage runs the part of the traced forward (``torch.export``) between two split points, over the parameters that this
part uses, under their names in the unsplit model. Split points are given by module (:class:`SplitPoint`), by calls of
:func:`pipe_split` in the model's forward, or by a function of the traced graph, as for PyTorch's ``pipeline``.
PyTorch's own traced stages are not used: they send sizes between stages as if they were tensors, fail on autocast
contexts and on tensors in plain attributes, support only one shape, and keep dropout active in evaluation.

The trace is made without data, from a copy without memory, so no rank holds the whole model::

    deferred model ──► trace_split: once in training, once in evaluation ──► make_stage: real parameters by name
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.distributed.pipelining._IR import annotate_split_points
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_pipe._compat.torch import tree_leaves, tree_map, tree_map_only
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.deferred import fake_copy
from lightning_pipe.llm.model.stage_module import (
    StageModule,
    is_causal_lm,
    registered_tensors,
    replace_tensors,
    tensor_of,
)
from lightning_pipe.llm.model.tied import TiedParameter
from lightning_pipe.llm.split.traced_graph import CutGraph, cut, whole_layers
from lightning_pipe.llm.split.traced_stage import (
    StageTrace,
    TracedPart,
    TraceInputs,
    find_tensor,
    join_parts,
)

__all__ = ["SplitPoint", "TracedSplit", "join_stages", "pipe_split", "split_into_equal_size", "trace_split"]

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]

_BY_LAYERS = "To cut the model by its layers without a trace instead, give it a get_pp_module_config()"
_LINES = 20  # lines of torch's error to show; the rest is logs and hints


class TracedSplit:
    """A model's forward, traced and cut. Made by :func:`trace_split`.

    Attributes:
        num_stages: number of stages of the whole pipeline.
        layers: FQNs of the items of the model's ``ModuleList`` s and ``Sequential`` s that lie in one stage and are
            called there as modules, so that they can be sharded or checkpointed one by one.
        shared: parameters that several stages use, such as a tied embedding. Each of these stages has a copy, under the
            first of the parameter's names, and the gradients of the copies must be summed.
    """

    def __init__(self, model: nn.Module, training: StageTrace, evaluation: StageTrace, layers: Sequence[str]) -> None:
        self._codes = {True: training, False: evaluation}
        self.num_stages = len(training.graph.stages)
        self.layers = tuple(layers)
        tensors = dict(registered_tensors(model))
        aliases: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            aliases.setdefault(id(tensor), []).append(name)
        constants = training.constants.keys() | evaluation.constants.keys()
        held: list[set[str]] = []
        for stage in range(self.num_stages):
            used = [name for name in self._used(stage) if name not in constants]
            held.append({*used, *(aliases[id(tensors[name])][0] for name in used if name in tensors)})
        for name, tensor in tensors.items():
            # Tensors that the forward does not use go to the stage with the rest of their module, for checkpoints.
            if not any(name in names for names in held):
                own = set(aliases[id(tensor)])
                max(held, key=lambda names: (bool(names & own), _likeness(name, names))).add(name)
        order = {name: place for place, name in enumerate(tensors)}
        self._names = [tuple(sorted(names, key=lambda name: order.get(name, len(order)))) for names in held]
        self.shared = tuple(
            TiedParameter(tuple(names), stages)
            for names in aliases.values()
            if isinstance(tensors[names[0]], nn.Parameter)
            and len(stages := tuple(i for i, own in enumerate(held) if own & set(names))) > 1
        )

    def names(self, stage: int) -> tuple[str, ...]:
        """FQNs of the parameters, buffers and other tensors of the model that a stage holds."""
        return self._names[stage]

    def make_stage(self, model: nn.Module, stage_index: int) -> StageModule:
        """Build a stage over the model's own tensors, without copying them."""
        persistent = set(model.state_dict(keep_vars=True))
        held = {name: find_tensor(model, name) for name in self._names[stage_index]}
        mode = next((one.fake_mode for one in held.values() if isinstance(one, FakeTensor)), None)
        for name in self._used(stage_index):
            if name not in held:
                constant = next(one.constants[name] for one in self._codes.values() if name in one.constants)
                held[name] = constant if mode is None else mode.from_tensor(constant)
        part = TracedPart(self._codes, stage_index, held, persistent).train(model.training)
        return StageModule(part, stage_index, self.num_stages)

    def _used(self, stage: int) -> list[str]:
        return list(dict.fromkeys(n for one in self._codes.values() for n in one.graph.stages[stage].tensors))


def trace_split(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    num_stages: int | None = None,
    device: torch.device | None = None,
) -> TracedSplit:
    """Trace a model's forward, and cut it at the split points.

    Later inputs may have other tensor sizes if the model treats them alike; a size of 1 is assumed to stay 1.
    Everything else (numbers, strings, ``None``, the set of keywords) is part of the trace, and a stage refuses inputs
    that differ from it. Casts by autocast are part of the trace, too, so trace under the context that training uses.
    """
    if split_spec and split_policy:
        raise SetupError("split.split_spec and split.split_policy are both given, expected one. Remove one of them")
    _check_names(model, split_spec or {})
    keywords = dict(kwargs or {})
    programs = {
        training: _export(model, args, keywords, split_spec or {}, training=training, device=device)
        for training in (True, False)
    }
    graphs = {training: _graph(program, split_policy, training=training) for training, program in programs.items()}
    layers = _items_of_lists(model)
    for graph, _ in graphs.values():
        layers = whole_layers(graph, layers)
    positional = len(tree_leaves(args))
    traces = {}
    for training, (graph, constants) in graphs.items():
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        cut_graph = cut(graph, names[positional:], layers)
        _check_number(cut_graph, num_stages, split_spec, split_policy)
        inputs = TraceInputs.of(programs[training], names, args, keywords)
        structure = programs[training].call_spec.out_spec
        assert structure is not None
        traces[training] = StageTrace(cut_graph, inputs, structure, constants)
    if traces[True].graph.examples != traces[False].graph.examples:
        raise SetupError(
            f"{type(model).__name__} cannot be cut here: between stages, its trace has"
            f" {_described(traces[True].graph.examples)} in training and {_described(traces[False].graph.examples)} in"
            " evaluation; expected the same tensors in both. Set split.split_spec to other places, or make the forward"
            " do the same in both modes"
        )
    return TracedSplit(model, traces[True], traces[False], layers)


def _described(examples: Sequence[Sequence[tuple[Sequence[int], torch.dtype, Any]]]) -> str:
    """Shapes and types of the tensors between stages."""
    texts = (", ".join(f"{tuple(size)} {str(kind)[6:]}" for size, kind, _ in one) or "none" for one in examples)
    return " | ".join(texts)


def join_stages(stages: Sequence[StageModule]) -> nn.Module:
    """Join stages made by :meth:`TracedSplit.make_stage` into one module with their tensors, names and layers.

    From then on, the stages follow the training or evaluation mode of the joined module.
    """
    parts = [stage.module for stage in stages]
    return join_parts([part for part in parts if isinstance(part, TracedPart)])


def split_into_equal_size(num_stages: int) -> SplitPolicy:
    """Split policy for stages of about the same number of parameters, cut where the fewest tensors cross.

    Items of module lists stay whole if there are enough of them. ``contiguous_shares`` is not used, since it considers
    only sizes and not the tensors that cross a cut.
    """

    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
        place = {node: index for index, node in enumerate(nodes)}
        seen: set[str] = set()
        sizes, alive = [0] * (len(nodes) + 1), [0] * (len(nodes) + 1)
        for index, node in enumerate(nodes):
            for used in node.all_input_nodes:
                tensor = find_tensor(traced, str(used.target)) if used.op == "get_attr" else None
                if isinstance(tensor, nn.Parameter) and used.target not in seen:
                    seen.add(str(used.target))
                    sizes[index + 1] += tensor.numel()
            if isinstance(node.meta.get("val"), Tensor):
                alive[index + 1] += 1
                alive[max((place.get(user, len(nodes) - 1) for user in node.users), default=index) + 1] -= 1
        before, crossing = list(accumulate(sizes)), list(accumulate(alive))
        items = [_item_of(node) for node in nodes]
        choices = [index for index in range(1, len(nodes)) if items[index] is None or items[index - 1] != items[index]]
        if len(choices) < num_stages - 1:
            choices = list(range(1, len(nodes)))
        for stage in range(1, num_stages):
            wanted = before[-1] * stage / num_stages
            possible = choices[: len(choices) - (num_stages - 1 - stage)]
            if not possible:
                raise SetupError(f"{len(nodes)} operations cannot be split into {num_stages} stages. Use fewer stages")
            best = min(possible, key=lambda index: (abs(before[index] - wanted), crossing[index]))
            with traced.graph.inserting_before(nodes[best]):
                traced.graph.call_function(pipe_split)
            choices = [index for index in choices if index > best]
        return traced

    return policy


def _item_of(node: fx.Node) -> str | None:
    """FQN of the outermost module-list item that an operation belongs to, or None."""
    inside = (name for name, _ in (node.meta.get("nn_module_stack") or {}).values())
    return next((name for name in inside if name.rpartition(".")[2].partition("@")[0].isdigit()), None)


def _check_names(model: nn.Module, split_spec: Mapping[str, SplitPoint]) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    unknown = [name for name in split_spec if name not in names or not name]
    if unknown:
        raise SetupError(
            f"split.split_spec names {', '.join(map(repr, unknown))}, which {type(model).__name__} does not have;"
            f" expected names of its modules: {', '.join(names[1:])}"
        )
    wrong = [repr(point) for point in split_spec.values() if not isinstance(point, SplitPoint)]
    if wrong:
        raise SetupError(
            f"split.split_spec has the values {', '.join(wrong)}; expected SplitPoint.BEGINNING or SplitPoint.END"
        )


def _check_number(
    graph: CutGraph,
    num_stages: int | None,
    split_spec: Mapping[str, SplitPoint] | None,
    split_policy: SplitPolicy | None,
) -> None:
    found = len(graph.stages)
    if num_stages is not None and found != num_stages:
        where = (
            f"split_spec {', '.join(split_spec)}" if split_spec else "split_policy" if split_policy else "no split_spec"
        )
        raise SetupError(
            f"the model's forward has {found - 1} split points, with {where} and its own calls of pipe_split(), which"
            f" make {found} stages, but the schedule has {num_stages}; expected {num_stages - 1} split points. A point"
            " before the first or after the last operation, or directly after another point, does not count; a module"
            " that is called twice has two"
        )


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
    *,
    training: bool,
    device: torch.device | None,
) -> ExportedProgram:
    copied, mode = fake_copy(model)
    mode.shape_env, mode.static_shapes = ShapeEnv(), False
    if not training or not copied.training:  # otherwise keep the modes: the user may have frozen parts in evaluation
        copied.train(training)
    annotate_split_points(copied, dict(split_spec))
    if is_causal_lm(copied):
        forward: Any = copied.forward
        copied.config.use_cache = False  # type: ignore[union-attr]
        copied.forward = functools.wraps(forward)(lambda *given, **named: tensor_of(forward(*given, **named)))

    def moved(value: Tensor) -> Tensor:  # Module.to refuses models without memory
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)

    def example(value: Tensor) -> Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=device or value.device)

    def sizes(value: Any) -> Any:
        # A size of 1 cannot be dynamic: tracing specialises on it.
        return {i: Dim.AUTO if n > 1 else Dim.STATIC for i, n in enumerate(getattr(value, "shape", ()))} or None

    with mode:
        if device is not None:
            replace_tensors(copied, moved)
        args, kwargs = tree_map_only(Tensor, example, (args, kwargs))
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            return torch.export.export(copied, args, kwargs, dynamic_shapes=tree_map(sizes, (*args, *kwargs.values())))
    except Exception as error:
        reason = "\n".join(str(error).strip().splitlines()[:_LINES])
        raise SetupError(
            f"{type(model).__name__} cannot be traced{'' if training else ' in evaluation'}, so it cannot be cut at"
            f" split points: {type(error).__name__}: {reason}\nChange this in the model's forward. {_BY_LAYERS}"
        ) from error


def _graph(
    program: ExportedProgram, split_policy: SplitPolicy | None, *, training: bool
) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """Traced forward with the model's tensors as attributes, and the constant tensors that the forward creates."""
    traced = program.module(check_guards=False)
    assert isinstance(traced, fx.GraphModule)
    constants: dict[str, Tensor] = {}
    for node in traced.graph.find_nodes(op="get_attr"):
        value = program.constants.get(str(node.target))
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            # The traces in training and evaluation may use one name for different constants.
            node.target = f"made_in_{'training' if training else 'evaluation'}_{len(constants)}"
            traced.register_buffer(node.target, value)
            constants[node.target] = value
    if split_policy is not None:
        traced = split_policy(traced)
        if not isinstance(traced, fx.GraphModule):
            raise SetupError(f"split.split_policy returned {traced!r}; expected the GraphModule that it was given")
    return traced, constants


def _items_of_lists(model: nn.Module) -> list[str]:
    """FQNs of the items of the model's outermost lists of modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(name.startswith(f"{one}.") for one in found):
            found += [f"{name}.{item}" if name else item for item, _ in module.named_children()]
    return found


def _likeness(name: str, others: Collection[str]) -> int:
    """Number of leading modules that an FQN shares with the closest of the others."""

    def common(other: str) -> int:
        pairs = zip(name.split("."), other.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(map(common, others), default=0)
