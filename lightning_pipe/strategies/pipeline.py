"""Data parallelism for any LightningModule, with batches copied ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_pipe._compat.torch import get_optimizers_in_backward, rebuild_buckets
from lightning_pipe.checkpoints.compiled_names import CompiledNameMap
from lightning_pipe.engine import PipelinePlan, SetupError, SWPipeline
from lightning_pipe.loops import EvaluationProgram, TrainingProgram
from lightning_pipe.loops.data.batch_source import UnevenPolicy
from lightning_pipe.loops.programs.default_program import (
    TRAIN,
    TRANSFER,
    build_default_evaluation_program,
    build_plan_of_default_tasks,
)
from lightning_pipe.loops.uneven_evaluation import UnevenEvaluation
from lightning_pipe.strategies.base import DistributedStrategy, install_loops, read_checkpoint_file
from lightning_pipe.strategies.gradient_order import gradient_order, set_gradient_order

# Key of the gradient order in a checkpoint.
_GRADIENT_ORDER = "lightning_pipe_gradient_order"


class PipelineStrategy(DistributedStrategy):
    """Distributed data parallelism that moves the next batch to the device while the current batch trains.

    Extends Lightning's ``DDPStrategy`` and works with any LightningModule. A single process trains without the
    ``DistributedDataParallel`` wrapper. On several ranks, parameters whose optimizer runs inside backward are refused.

    Args:
        plan: ``"copy_ahead"`` (default), ``"serial"`` to move each batch when its turn comes, the path of a YAML plan,
            or a :class:`~lightning_pipe.engine.PipelinePlan` of the tasks ``H2D`` and ``TrainBatch``.
        uneven_batches: handling of epochs in which some ranks have fewer batches: ``"shortest"`` (default) ends the
            epoch with the first rank that runs out, ``"error"`` raises an error.
        uneven_evaluation: handling of evaluations in which some ranks have fewer batches, or none: with ``"join"``
            (default), these ranks take part in the reductions of the other ranks, so that each row is evaluated exactly
            once. ``"error"`` keeps Lightning's behavior: its sampler repeats rows so that all ranks have the same
            number.
        options: keyword arguments of Lightning's ``DDPStrategy``.

    Raises:
        PlanError: the plan does not exist, or it does not fit the tasks.
        SetupError: a value is invalid.
    """

    def __init__(
        self,
        plan: str | Path | PipelinePlan = "copy_ahead",
        *,
        uneven_batches: UnevenPolicy = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._set_uneven_policies(uneven_batches, uneven_evaluation)
        # An invalid plan is an error here, not only when training begins.
        self._plan = build_plan_of_default_tasks(_noop_transfer, plan)
        # Gradient order of a loaded checkpoint, and of this run after its first backward pass.
        self._order_at_save: list[str] | None = None
        self._order: list[str] | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        self._disable_sampler_if_single_process(trainer)
        install_loops(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._order = None  # order of the previous fit, kept until now for checkpoints written after it
        super().setup(trainer)

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build the two tasks under the plan. The training loop calls this method when training begins."""
        ddp = self._get_order_dependent_ddp()
        if self._order_at_save is not None and ddp is not None:
            set_gradient_order(ddp, self._order_at_save)
            self._order, self._order_at_save = self._order_at_save, None
        group = dist.group.WORLD if self.world_size > 1 else None
        pipeline = SWPipeline(build_plan_of_default_tasks(transfer, self._plan), self.root_device, group)
        return TrainingProgram(pipeline, transfer=TRANSFER, step=TRAIN)

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Build the program that evaluates the batches of one dataloader, moved as far ahead as in training."""
        return build_default_evaluation_program(trainer, transfer, step, ahead=self._plan.schedule[TRANSFER].stage)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint.

        Args:
            checkpoint_path: path of the file or folder.
            weights_only: None (default) and True refuse types other than tensors and plain types. False reads any
                type, and can therefore run code from the checkpoint.
        """
        checkpoint = read_checkpoint_file(super().load_checkpoint, checkpoint_path, weights_only)
        self._order_at_save = checkpoint.get(_GRADIENT_ORDER)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's values. Names may differ by ``torch.compile``."""
        assert self.lightning_module is not None
        names = CompiledNameMap(self.lightning_module.state_dict())
        super().load_model_state_dict({**checkpoint, "state_dict": names.rename_keys(checkpoint["state_dict"])}, strict)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint, with the order in which gradients are summed over ranks."""
        # Before the first batch of a resumed run, the order is the loaded checkpoint's.
        order = self._order if self._order_at_save is None else self._order_at_save
        if order is not None:
            checkpoint[_GRADIENT_ORDER] = order
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """After the first backward pass, let DDP rebuild its buckets, and record the order of gradients.

        DDP itself rebuilds them only in its next forward pass, which is too late for a checkpoint after the first step.
        """
        super().post_backward(closure_loss)
        ddp = self._get_order_dependent_ddp() if self._order is None else None
        if ddp is not None and rebuild_buckets(ddp):
            self._order = gradient_order(ddp)

    def _get_order_dependent_ddp(self) -> DistributedDataParallel | None:
        """Return the DDP model if the last bit of a summed gradient depends on its position in a bucket, else None.

        The sum over two ranks does not depend on it. With ``find_unused_parameters`` or ``static_graph``, DDP builds
        its buckets once or by other rules.
        """
        ddp = self.model
        if self.world_size < 3 or not isinstance(ddp, DistributedDataParallel):
            return None
        return None if ddp.find_unused_parameters or ddp.static_graph else ddp

    def teardown(self) -> None:
        self._order_at_save = None  # a checkpoint that was loaded for an evaluation must not affect a later fit
        super().teardown()

    def configure_ddp(self) -> None:
        """Wrap the LightningModule in ``DistributedDataParallel`` if there are several ranks.

        Raises:
            SetupError: an optimizer steps in the backward, before gradients are averaged.
        """
        if self.world_size > 1:
            assert self.lightning_module is not None
            _refuse_optimizers_in_backward(self.lightning_module)
            super().configure_ddp()


def _noop_transfer(batch: Any) -> Any:
    return batch


def _refuse_optimizers_in_backward(module: pl.LightningModule) -> None:
    """Refuse parameters whose optimizer runs inside backward, since ranks average gradients only after backward."""
    names = [name for name, parameter in module.named_parameters() if get_optimizers_in_backward(parameter)]
    if names:
        raise SetupError(
            f"the optimizers of {', '.join(names)} run inside backward (apply_optimizer_in_backward), before gradients"
            " are averaged over ranks, and DistributedDataParallel does not run them on a CPU. Shard such tables with"
            " strategy='recsys_prefetch_pipeline', or train them with an optimizer from configure_optimizers"
        )
