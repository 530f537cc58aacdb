"""Stages that the user builds, as one model that runs them in order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.pipelining import Pipe, PipelineStage

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.stage_module import PassThrough

__all__ = ["BuiltStages"]


class BuiltStages(nn.Sequential):
    """Model of stages built by hand, which are the layers that a strategy assigns to ranks.

    The first stage takes the model's inputs, and every later stage the output of the previous stage, as several
    arguments if it is a tuple. Every stage takes all keywords. On one device the stages run in order.

    Args:
        stages: modules of all stages, in order; PyTorch's ``PipelineStage`` objects; or its ``Pipe``. Each rank keeps
            only its own stages.

    Raises:
        SetupError: a ``Pipe`` in which a stage uses other values than the outputs of the previous stage.
    """

    def __init__(self, stages: Iterable[nn.Module | PipelineStage] | Pipe) -> None:
        if isinstance(stages, Pipe):
            _check_chain(stages)
            stages = [stages.get_stage_module(index) for index in range(stages.num_stages)]
        super().__init__(*(one.submod if isinstance(one, PipelineStage) else one for one in stages))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for stage in self:
            if len(args) == 1 and isinstance(args[0], tuple):
                args = args[0]
            if not isinstance(stage, PassThrough):
                args = (stage(*args, **kwargs),)
        return args[0] if len(args) == 1 else args

    @staticmethod
    def of(built: Any) -> Any:
        """Convert a list of stages or a ``Pipe``; return any other model unchanged."""
        return BuiltStages(built) if isinstance(built, list | tuple | Pipe) else built


def _check_chain(pipe: Pipe) -> None:
    calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    for before, node in pairwise(calls):
        parts = [user for user in before.users if user.op == "call_function"]  # outputs of a stage that has several
        if list(node.args) != (parts or [before]):
            raise SetupError(
                f"{node.target} of the Pipe uses {', '.join(map(str, node.args))}; expected all outputs of the previous"
                " stage, in their order. Return the original model from build_model, and set split.split_spec, which"
                " also sends values past a stage"
            )
