"""Stages that the user builds, as one model that runs them in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe, PipelineStage

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.model.lora import unwrap_peft_model
from lightning_pipe.llm.model.stage_module import PassThroughModule


class HandBuiltStages(nn.Sequential):
    """Model of stages built by hand, which are the layers that a strategy assigns to ranks.

    The first stage takes the model's inputs, and every later stage the output of the previous stage, as several
    arguments if it is a tuple. Every stage takes all keywords. On one device the stages run in order.

    Args:
        stages: modules of all stages, in order; PyTorch's ``PipelineStage`` objects; or its ``Pipe``. Each rank keeps
            only its own stages.

    Raises:
        SetupError: a ``Pipe`` in which a stage uses other values than the outputs of the previous stage.
        InputError: in the forward, tensors of other shapes than a ``Pipe`` was traced with.
    """

    def __init__(self, stages: Iterable[nn.Module | PipelineStage] | Pipe) -> None:
        if isinstance(stages, Pipe):
            _check_chain(stages)
            stages = [stages.get_stage_module(index) for index in range(stages.num_stages)]
        super().__init__(*(stage.submod if isinstance(stage, PipelineStage) else stage for stage in stages))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for stage in self:
            if len(args) == 1 and isinstance(args[0], tuple):
                args = args[0]
            if isinstance(stage, fx.GraphModule):
                _check_traced_input_shapes(stage, args, kwargs)
            if not isinstance(stage, PassThroughModule):
                args = (stage(*args, **kwargs),)
        return args[0] if len(args) == 1 else args

    @staticmethod
    def as_model(built: Any) -> Any:
        """Convert a list of stages or a ``Pipe``, and unwrap a ``PeftModel``; return any other model unchanged."""
        return HandBuiltStages(built) if isinstance(built, list | tuple | Pipe) else unwrap_peft_model(built)


def _check_chain(pipe: Pipe) -> None:
    calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    for before, node in pairwise(calls):
        parts = [user for user in before.users if user.op == "call_function"]  # outputs of a stage that has several
        if list(node.args) != (parts or [before]):
            raise SetupError(
                f"{node.target} of the Pipe uses {', '.join(map(str, node.args))}; expected all outputs of the previous"
                " stage, in their order. Cut the model at other points, or build its stages by hand, so that each"
                " also returns what later stages use"
            )


def _check_traced_input_shapes(stage: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that a trace, in which sizes are constants, gets tensors of the traced sizes."""
    nodes = stage.graph.find_nodes(op="placeholder")
    inputs = dict(zip((node.name for node in nodes), args, strict=False)) | dict(kwargs)
    for node in nodes:
        traced, value = node.meta.get("val"), inputs.get(node.name)
        if isinstance(traced, Tensor) and isinstance(value, Tensor):
            sizes = tuple(traced.shape)
            if all(isinstance(size, int) for size in sizes) and sizes != tuple(value.shape):
                raise InputError(
                    f"{node.name} has the shape {tuple(value.shape)}, and the Pipe was traced with {sizes}; expected"
                    " the same, since sizes are constants of its trace. Give it such micro-batches, or build its stages"
                    " by hand"
                )
