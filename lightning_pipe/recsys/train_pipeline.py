"""The recsys plans without Lightning: a drop-in for TorchRec's train pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine import IterContext, PipelinePlan, SWPipeline
from lightning_pipe.recsys.dense_reduction import DenseGradientReducer
from lightning_pipe.recsys.plans import recsys_plan
from lightning_pipe.recsys.rewrite import ModelRewrite
from lightning_pipe.recsys.sharding import ShardedModel
from lightning_pipe.recsys.tasks import RecsysActions, recsys_tasks
from lightning_pipe.recsys.transfer import move_batch


class TrainPipeline:
    """Trains a sharded model one batch a :meth:`progress` call, under any recsys plan.

    Args:
        model: TorchRec's ``DistributedModelParallel`` (its data-parallel wrapper averages the dense gradients), or what
            :func:`~lightning_pipe.recsys.sharding.shard_model` returns (this project's reducer does). Called with a
            batch it returns ``(losses, output)``, as TorchRec's pipelines expect; losses are summed.
        optimizer: steps the dense parameters, and through TorchRec's ``CombinedOptimizer`` the tables' learning rates.
        device: where batches are moved.
        plan: a name, a plan, or the path of a plan in YAML.
        rewrite: how the inputs of the sharded modules are found in a batch.
        validate_ids: check that ids are inside their tables before the lookup.
        input_group: process group of the input dist; by default a new one over the world, which every rank must make.

    Example::

        pipeline = TrainPipeline(model, optimizer, device, plan="prefetch")
        batches = iter(loader)
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
    """

    def __init__(
        self,
        model: nn.Module | ShardedModel,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        plan: str | Path | PipelinePlan = "prefetch",
        *,
        rewrite: Literal["auto", "record", "direct", "fx"] = "auto",
        validate_ids: bool = False,
        input_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._sharded = model if isinstance(model, ShardedModel) else None
        self._model: nn.Module = model.dmp if isinstance(model, ShardedModel) else model
        self._optimizer = optimizer
        self._device = torch.device(device)
        self._method = rewrite
        self._validate_ids = validate_ids
        self._distributed = dist.is_available() and dist.is_initialized()
        self._own_group = self._distributed and input_group is None
        self._input_group = dist.new_group() if self._own_group else input_group
        self._reducer: DenseGradientReducer | None = None
        if self._sharded is not None:
            assert self._input_group is not None
            # The input group is idle while gradients are reduced only in some plans: a group of its own.
            self._reducer_group = dist.new_group()
            self._reducer = DenseGradientReducer(self._sharded.dense_parameters(), self._reducer_group)
        self._rewrite = self._new_rewrite()
        self._actions = RecsysActions(
            self._rewrite,
            transfer=lambda batch: move_batch(batch, self._device),
            training_step=self._training_step,
            loss_of=lambda output: torch.sum(output[0], dim=0),
            optimizer_step=optimizer.step,
            reducer=self._reducer,
            after_embedding_backward=self._sharded.step_data_parallel_tables if self._sharded else None,
        )
        tasks = recsys_tasks(self._actions)
        world = dist.group.WORLD if self._distributed else None
        self.pipeline = SWPipeline(recsys_plan(plan, tasks), self._device, world)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train the next batch.

        Args:
            dataloader_iter: gives batches on the host; after its end the batches in flight are trained, one a call.

        Returns:
            The second element of what the model returned.

        Raises:
            StopIteration: every batch has been trained.
            TaskError: a task raised.
        """
        if not self._rewrite.attached:
            self.attach()
        alone = not self._rewrite.resolved and self._rewrite.records and not self.pipeline.in_flight
        if alone:
            self.pipeline.begin_serial(dataloader_iter)
        else:
            self.pipeline.begin(dataloader_iter)
        ctx: IterContext = self.pipeline.finish()
        return ctx.output[1]

    def detach(self) -> nn.Module:
        """Give the model back as it was, its forwards restored; batches in flight are kept for :meth:`attach`."""
        self._rewrite.detach()
        return self._model

    def attach(self, model: nn.Module | None = None) -> None:
        """Take the model back after :meth:`detach`.

        Args:
            model: the same model, for TorchRec's signature.
        """
        self._rewrite.attach()

    def reset(self) -> None:
        """Give up the batches in flight; the next :meth:`progress` starts afresh."""
        self.pipeline.abandon()

    def close(self) -> None:
        """End the worker threads, restore the model and leave the process groups. May be called again."""
        self.pipeline.close()
        self._rewrite.restore()
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
            dist.destroy_process_group(self._reducer_group)
        if self._own_group and self._input_group is not None:
            dist.destroy_process_group(self._input_group)
        self._input_group = None

    def _new_rewrite(self) -> ModelRewrite:
        return ModelRewrite(
            self._model,
            method=self._method,
            step="forward",
            input_group=self._input_group,
            agree_group=dist.group.WORLD if self._distributed else None,
            validate_ids=self._validate_ids,
        )

    def _training_step(self, batch: Any) -> Any:
        self._optimizer.zero_grad()
        return self._model(batch)
