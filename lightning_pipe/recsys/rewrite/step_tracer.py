"""Finds the input of each sharded module by a symbolic trace of the step.

The trace stops at the last sharded call, since later parts of a step (logging, branches on values, ``len``) often
cannot be traced and need not be. If the trace fails earlier, its results up to that point are used. Besides pieces of
the batch, a trace finds modules between the batch and a sharded module. Those without trainable parameters can run
ahead, too.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torchrec.distributed.train_pipeline.tracing import Tracer
from torchrec.distributed.types import ShardedModule

from lightning_pipe._compat.torch import COMPILED, trace_compiled_functions_as_plain
from lightning_pipe._compat.torchrec import leaf_module_names
from lightning_pipe.recsys.batches.traversal import AttributeStep, ItemStep
from lightning_pipe.recsys.modules.call_arguments import (
    BatchArgument,
    CallArguments,
    ConstantArgument,
    ContainerArgument,
    Postprocessed,
    Source,
)

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
# Beginning of the reason if the step computes an argument.
COMPUTED = "its argument is computed in the step, "


def find_arguments_by_trace(model: torch.nn.Module, step: str, names: Iterable[str]) -> dict[str, CallArguments | str]:
    """Return, for each named sharded module, the arguments of its call or the reason why they are unknown."""
    names = list(names)
    tracer = _StepTracer(leaf_module_names(model), step, names)
    broken = tracer.trace_until_modules_called(model)
    calls: dict[str, list[Node]] = {name: [] for name in names}
    for node in tracer.graph.nodes:
        if node.op == "call_module" and node.target in calls:
            calls[node.target].append(node)
    batch = next((node for node in tracer.graph.nodes if node.op == "placeholder"), None)
    arguments: dict[str, CallArguments | str] = {}
    for name, nodes in calls.items():
        if len(nodes) == 1:
            try:
                arguments[name] = _call_arguments(nodes[0], batch, model)
            except _UnknownArgumentError as reason:
                arguments[name] = str(reason)
        elif nodes:
            arguments[name] = f"is called {len(nodes)} times in {step}"
        else:
            arguments[name] = (
                f"is not called in {step}" if broken is None else f"a trace of {step} failed before: {broken}"
            )
    return arguments


class _StopTracing(Exception):
    """Raised after all sharded modules were called, so that the rest of the step is not traced."""


class _UnknownArgumentError(Exception):
    """Raised for an argument that does not come from the batch alone."""


class _StepTracer(Tracer):
    def __init__(self, leaf_modules: list[str], step: str, names: list[str]) -> None:
        super().__init__(leaf_modules=leaf_modules)
        self.traced_func_name = step
        self._missing = set(names)

    def trace_until_modules_called(self, model: torch.nn.Module) -> str | None:
        """Trace until all sharded modules were called. Return None, or the error that stopped the trace before."""
        try:
            with trace_compiled_functions_as_plain():
                self.trace(model)
        except _StopTracing:
            return None
        except Exception as error:  # any error of the user's step with a proxy
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    def call_module(
        self, m: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = super().call_module(m, forward, args, kwargs)
        self._missing.discard(self.path_of_module(m))
        if not self._missing:
            raise _StopTracing
        return result


def _call_arguments(node: Node, batch: Node | None, model: torch.nn.Module) -> CallArguments:
    positional = tuple(_find_source(argument, batch, model) for argument in node.args)
    named = {name: _find_source(argument, batch, model) for name, argument in node.kwargs.items()}
    return CallArguments(positional, named)


def _find_source(argument: Any, batch: Node | None, model: torch.nn.Module) -> Source:
    if isinstance(argument, dict):
        values = tuple(_find_source(value, batch, model) for value in argument.values())
        return ContainerArgument(dict, tuple(argument), values)
    if isinstance(argument, (list, tuple)):
        values = tuple(_find_source(value, batch, model) for value in argument)
        return ContainerArgument(list if isinstance(argument, list) else tuple, (), values)
    if not isinstance(argument, Node):
        return ConstantArgument(argument)
    if argument is batch:
        return BatchArgument(())
    if argument.op == "call_module":
        return _find_postprocess_source(argument, batch, model)
    step = _convert_node_to_path_step(argument)
    if step is not None:
        inner = _find_source(argument.args[0], batch, model)
        if isinstance(inner, BatchArgument):
            return BatchArgument((*inner.path, step))
        if isinstance(inner, Postprocessed):
            return Postprocessed(inner.name, inner.arguments, (*inner.path, step))
    raise _UnknownArgumentError(f"{COMPUTED}by {argument.op} {argument.target}")


def _convert_node_to_path_step(node: Node) -> AttributeStep | ItemStep | None:
    """Return the step of a path that ``node`` represents: an attribute, an item, or ``get`` of a mapping."""
    if len(node.args) != 2 or node.kwargs or isinstance(node.args[1], Node):
        return None
    if node.op == "call_function" and node.target is builtins.getattr:
        return AttributeStep(str(node.args[1]))
    if (node.op == "call_function" and node.target is operator.getitem) or (
        node.op == "call_method" and node.target == "get"
    ):
        return ItemStep(node.args[1])
    return None


def _find_postprocess_source(node: Node, batch: Node | None, model: torch.nn.Module) -> Postprocessed:
    name = str(node.target)
    module = model.get_submodule(name)
    if hasattr(module, COMPILED):
        # The original runs ahead: optimizers of PyTorch round otherwise while another thread compiles.
        name, module = f"{name}.{COMPILED}", model.get_submodule(f"{name}.{COMPILED}")
    if any(isinstance(child, ShardedModule) for child in module.modules()):
        raise _UnknownArgumentError(f"its argument depends on the output of the sharded module {name!r}")
    calls = [call for call in node.graph.nodes if call.op == "call_module" and call.target == node.target]
    reasons = {
        "has trainable parameters": any(parameter.requires_grad for parameter in module.parameters()),
        "draws random numbers (dropout)": any(isinstance(child, _DROPOUTS) for child in module.modules()),
        f"is called {len(calls)} times": len(calls) > 1,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise _UnknownArgumentError(f"its argument depends on the module {name!r}, which {reason}")
    return Postprocessed(name, _call_arguments(node, batch, model))
