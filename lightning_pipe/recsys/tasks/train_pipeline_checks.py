"""What a :class:`~lightning_pipe.recsys.tasks.train_pipeline.TrainPipeline` is given, and cannot train with.

Tested in ``tests/recsys/tasks/test_train_pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.kernels.gradient_norm import clip_by_global_norm
from lightning_pipe.recsys.rewrite.batch_state import Embeddings
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.sharding.replicas import refuse_norm
from lightning_pipe.recsys.sharding.shard import ShardedModel
from lightning_pipe.recsys.tasks.options import SessionOptions

__all__ = ["check_model", "clipping", "refuse_late_gradients", "refuse_of_strategies"]


def check_model(model: object, optimizer: object, forward: object) -> None:
    """Checks that these are a model, an optimiser, and what is called in place of the model, or None.

    Raises:
        SetupError: one is not.
    """
    if not isinstance(model, (nn.Module, ShardedModel)):
        raise SetupError(
            f"the model is a {type(model).__name__}; needed is TorchRec's DistributedModelParallel, or what"
            " shard_model() returns"
        )
    if not (callable(getattr(optimizer, "step", None)) and callable(getattr(optimizer, "zero_grad", None))):
        raise SetupError(
            f"the optimizer is a {type(optimizer).__name__}; needed is a torch.optim.Optimizer over the dense"
            " parameters"
        )
    if forward is not None and not callable(forward):
        raise SetupError(f"custom_model_fwd is {forward!r}; needed is a function of the batch, or None")


def refuse_of_strategies(options: SessionOptions) -> None:
    """Refuse options that only a strategy can follow.

    Raises:
        SetupError: names the first, and what to do instead.
    """
    if options.wire.quantized_comms is not None:
        raise SetupError(
            "wire.quantized_comms is given to a TrainPipeline, whose model is sharded already; give quantized_comms to"
            " shard_model()"
        )
    if not options.rewrite.evaluation:
        raise SetupError(
            "rewrite.evaluation is False, but TrainPipeline.evaluate() is always pipelined; leave it out, and call the"
            " model that detach() returns"
        )


def clipping(model: nn.Module | ShardedModel, max_norm: float) -> Callable[[Embeddings], torch.Tensor]:
    """What scales the gradients of a batch down to a norm of at most *max_norm*.

    Raises:
        SetupError: no such number, or there is no norm to be had of the model's gradients.
    """
    if not isinstance(model, ShardedModel):
        raise SetupError(
            f"max_norm is {max_norm}, but the model is a {type(model).__name__}, which averages gradients in backward,"
            " before any norm is known; give the model that shard_model() returns"
        )
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise SetupError(f"max_norm is {max_norm!r}; needed is a number above 0, or None for no clipping")
    refuse_norm(model.replicas)
    dense = [parameter for _, parameter in model.dense_parameters()]

    def clip(embeddings: Embeddings) -> torch.Tensor:
        assert embeddings.kernel_gradients is not None
        return clip_by_global_norm(dense, model.table_gradient_norm(embeddings.kernel_gradients), max_norm)

    return clip


def refuse_late_gradients(model: nn.Module, rewrite: ModelRewrite) -> None:
    """Feature processors get their gradients with the tables, when DistributedDataParallel is done with its own.

    Raises:
        SetupError: some are trained so.
    """
    for wrapper in model.modules():
        if not isinstance(wrapper, DistributedDataParallel) or wrapper.process_group.size() == 1:
            continue
        reduced = {
            id(parameter)
            for name, parameter in wrapper.module.named_parameters()
            if parameter.requires_grad and name not in wrapper.parameters_to_ignore
        }
        late = [
            name
            for name, module in rewrite.modules.items()
            if any(id(parameter) in reduced for parameter in module.parameters())
        ]
        if late:
            raise SetupError(
                f"sharded module(s) {', '.join(late)} hold feature processors that are trained, inside"
                " DistributedDataParallel, which averages gradients before these have theirs: ranks would drift apart."
                " Shard the model with lightning_pipe.recsys.shard_model, or freeze the processors before it is wrapped"
            )
