"""Checks of the arguments of a :class:`~lightning_pipe.recsys.tasks.train_pipeline.TrainPipeline`."""

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
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.options import SessionOptions


def refuse_of_strategies(options: SessionOptions) -> None:
    """Refuse options that only a strategy supports."""
    if options.wire.quantized_comms is not None:
        raise SetupError(
            "wire.quantized_comms cannot be set for a TrainPipeline, because its model is sharded already. Pass"
            " quantized_comms to shard_model() instead."
        )
    if not options.rewrite.evaluation:
        raise SetupError(
            "rewrite.evaluation is False, but TrainPipeline.evaluate() is always pipelined. Remove the option, and to"
            " evaluate without a pipeline, call the model that detach() returns."
        )


def clipping(model: nn.Module | ShardedModel, max_norm: float) -> Callable[[Embeddings], torch.Tensor]:
    """Function that scales the gradients of a batch down to a norm of at most *max_norm*."""
    if not isinstance(model, ShardedModel):
        raise SetupError(
            f"max_norm is {max_norm}, but the model is a {type(model).__name__}, which averages gradients in backward,"
            " before their norm is known. Pass the model that shard_model() returns."
        )
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise SetupError(
            f"max_norm must be a number above 0, or None for no clipping, got {max_norm!r}. Set one of these."
        )
    refuse_norm(model.replicas)
    dense = [parameter for _, parameter in model.dense_parameters()]

    def clip(embeddings: Embeddings) -> torch.Tensor:
        assert embeddings.kernel_gradients is not None
        return clip_by_global_norm(dense, model.table_gradient_norm(embeddings.kernel_gradients), max_norm)

    return clip


def refuse_late_gradients(model: nn.Module, rewrite: ModelRewrite) -> None:
    """Refuse trained feature processors inside DistributedDataParallel.

    They get their gradients with the tables, after DistributedDataParallel has reduced its gradients.
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
                f"sharded module(s) {', '.join(late)} hold trained feature processors inside DistributedDataParallel,"
                " which averages gradients before the processors have theirs, so ranks would diverge. Shard the model"
                " with lightning_pipe.recsys.shard_model, or freeze the processors before the model is wrapped."
            )
