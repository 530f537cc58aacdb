"""Inductor with backwards in two parts, for schedules that put off the gradients of weights.

AOTAutograd makes the backward of a compiled module one node of autograd's graph, which computes all gradients whenever
it runs: twice, if one call of ``torch.autograd.grad`` asks for the gradients of the inputs, and a later one for those
of the weights. With the backend of this module, the node computes the gradients that the running backward needs. It
keeps the intermediate results that both parts use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

# Key of the results of the first part that the second takes, in the metadata of autograd's node.
_SHARED = "lightning_pipe: results for the gradients of weights"


def inductor_with_split_backward(
    gm: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """Backend of ``torch.compile``: Inductor, with backwards that compute each gradient once, when it is needed.

    CUDA graphs are used for forwards only: their next replay would overwrite what a backward has kept.
    """
    from torch._inductor.compile_fx import compile_fx

    config = torch._TorchCompileInductorWrapper(mode, dict(options or {}), None).config
    weights = [isinstance(value, nn.Parameter) for value in inputs]
    # The cache of AOTAutograd stores only what Inductor itself returns. Inductor's cache of graphs is in use.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compile_fx(gm, inputs, inner_compile=partial(_compile_graph, weights), config_patches=config)


def _compile_graph(weights: Sequence[bool], gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    gradients: list[Any] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    if not options.get("is_backward") or len(gradients) != len(weights):
        # A forward, or a backward with gradients of inputs that AOTAutograd has added or merged.
        return compile_fx_inner(gm, inputs, **options)
    first = [index for index, value in enumerate(gradients) if value is not None and not weights[index]]
    second = [index for index, value in enumerate(gradients) if value is not None and weights[index]]
    if not first or not second:
        return compile_fx_inner(gm, inputs, **options)
    input_part, weight_part, used = _split(gm, [gradients[i] for i in first], [gradients[i] for i in second])
    # Strides that Inductor gives to outputs of a backward are those of the fake tensors.
    fakes = FakeTensorProp(input_part, detect_fake_mode(inputs)).propagate_dont_convert_inputs(*inputs)
    options["cudagraphs"] = BoxedBool(False)
    run_input_part = compile_fx_inner(input_part, inputs, **options)
    options["static_input_idxs"] = ()
    run_weight_part = compile_fx_inner(weight_part, [*(inputs[i] for i in used), *fakes[len(first) :]], **options)
    stand_ins = [_make_stand_in(gradients[i].meta["val"]) if i in second else None for i in range(len(gradients))]

    def run_needed_parts(arguments: list[Any]) -> list[Any]:
        saved = list(arguments)
        arguments.clear()
        node: Any = torch._C._current_autograd_node()
        results, shared = list(stand_ins), node.metadata.pop(_SHARED, None)
        functions = [function for function, _ in node.next_functions if function is not None]
        if shared is None or any(_is_needed(function) for function in functions if not _is_weight(function)):
            outputs = run_input_part(list(saved))
            shared = outputs[len(first) :]
            for index, gradient in zip(first, outputs, strict=False):
                results[index] = gradient
        if any(_is_needed(function) for function in functions if _is_weight(function)):
            for index, gradient in zip(second, run_weight_part([*(saved[i] for i in used), *shared]), strict=True):
                results[index] = gradient
        else:
            node.metadata[_SHARED] = shared
        return results

    run_needed_parts._boxed_call = True  # type: ignore[attr-defined]
    return run_needed_parts


def _split(
    gm: fx.GraphModule, first: Sequence[Any], second: Sequence[Any]
) -> tuple[fx.GraphModule, fx.GraphModule, list[int]]:
    """Split a graph into one that computes *first*, and one that computes *second* from results of the first.

    The first returns *first* and the results that the second takes. The second takes those of the graph's inputs that
    are at the returned indices, and these results. Views and sizes are computed in both. The first computes everything
    if the graph writes to a buffer, whose old value the second could not read later.
    """
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    inputs = gm.graph.find_nodes(op="placeholder")
    writes = any(schema.is_mutable for node in nodes if (schema := getattr(node.target, "_schema", None)) is not None)
    in_first = set(nodes) if writes else _ancestors(first, lambda node: node.all_input_nodes)
    in_first |= {node for node in nodes if node.target is operator.getitem and node.args[0] in in_first}
    is_given = {node for node in nodes if node.op == "placeholder" or (node in in_first and _is_result(node))}
    in_second = _ancestors(second, lambda node: () if node in is_given else node.all_input_nodes)
    # Inductor's cache of graphs finds the symbols of all guards among a graph's inputs, or raises a KeyError.
    used = [i for i, node in enumerate(inputs) if node in in_second or isinstance(node.meta.get("val"), torch.SymInt)]
    shared = [node for node in nodes if node in in_second & is_given and node.op != "placeholder"]
    input_part = _extract(gm, inputs, in_first, [*first, *shared])
    weight_part = _extract(gm, [*(inputs[index] for index in used), *shared], in_second, second)
    return input_part, weight_part, used


def _ancestors(nodes: Iterable[Any], parents_of: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes themselves, and all that they need."""
    found, open_ = set(), list(nodes)
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            open_ += parents_of(node)
    return found


def _is_result(node: fx.Node) -> bool:
    """Return True for a tensor that a node has computed: no view of another, no size, no tuple."""
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(value.alias_info is not None for value in schema.returns)
    return isinstance(node.meta.get("val"), Tensor) and node.op != "get_attr" and not is_view


def _extract(
    gm: fx.GraphModule, inputs: Sequence[fx.Node], nodes: set[fx.Node], outputs: Sequence[Any]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[node] for node in outputs))
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return fx.GraphModule(gm, graph)


def _is_weight(function: Any) -> bool:
    return isinstance(getattr(function, "variable", None), nn.Parameter)


def _is_needed(function: Any) -> bool:
    """Return True if the running backward needs a gradient for this node of autograd's graph."""
    try:
        return torch._C._will_engine_execute_node(function)
    except RuntimeError:
        return True  # a leaf that `torch.autograd.grad` was asked for


def _make_stand_in(like: Tensor) -> Tensor:
    """A tensor without memory of its own that takes the place of a gradient that nobody needs."""
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
