"""Plain data parallelism with the batch copied ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_pipe.engine import PipelinePlan, SetupError, SWPipeline
from lightning_pipe.engine.common.safe_text import shown
from lightning_pipe.loops import EvaluationProgram, PipelineTrainingEpochLoop, TrainingProgram
from lightning_pipe.loops.data.batch_source import Uneven
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.loops.programs.auto_program import AutoProgram, PlanChoice
from lightning_pipe.loops.programs.default_program import (
    TRAIN,
    TRANSFER,
    default_evaluation,
    default_plan,
    default_tasks,
    plans_to_try,
)
from lightning_pipe.loops.uneven_evaluation import UnevenEvaluation
from lightning_pipe.strategies.base import DistributedStrategy, reading_plain_types
from lightning_pipe.strategies.checkpoint_contents import checked_contents
from lightning_pipe.strategies.gradient_order import gradient_order, settle_gradient_order
from lightning_pipe.strategies.plan_finding import AUTO, AutoOptions, tell_choice

# In a checkpoint.
_GRADIENT_ORDER = "lightning_pipe_gradient_order"


class PipelineStrategy(DistributedStrategy):
    """Lightning's distributed data parallelism; the next batch is moved to the device while this one trains.

    For any LightningModule, on one process too (which then trains without the wrapper that averages gradients). On
    several, parameters with an optimiser that runs inside backward are refused.

    Under ``plan="auto"`` the first iterations train under each plan in turn, and the rest under the fastest, which is
    printed with what was measured; all train to the same bits. The plans are the serial one, the one that moves the
    next batch ahead, and those that move batches further ahead, up to *max_in_flight*: since the module's transfer
    hooks stay on the main thread and training is one task, there is no other to find. Much is gained only where
    batches take long to be moved to a GPU; on a CPU they are not moved at all.

    Args:
        plan: ``"copy_ahead"``, ``"serial"`` (a batch is moved when its turn comes), the path of a plan in YAML, or a
            plan, of the tasks ``H2D`` and ``TrainBatch``; or ``"auto"``.
        exploration: of ``"auto"``: ``iterations``, ``rounds``, ``extra_rounds``, ``found`` and ``replan_above`` of
            :class:`~lightning_pipe.loops.programs.auto_program.Exploration`.
        max_in_flight: of ``"auto"``: the most batches in flight, each of which takes its memory.
        save_plan: of ``"auto"``: where to write the plan that was chosen, in YAML, for *plan* to name later.
        uneven_batches: where some ranks have fewer batches, end the epoch with the ``shortest``, or raise an ``error``.
        uneven_evaluation: where some ranks have fewer batches to validate, test or predict, or none: ``join`` lets
            them take part in what the others sum up, so that each row is evaluated once. ``error`` leaves all as
            Lightning has it, whose sampler repeats rows.
        options: those of Lightning's ``DDPStrategy``.

    Attributes:
        plan_choice: of ``"auto"``: what was chosen, and what was measured; None before.

    Raises:
        PlanError: there is no such plan, or the strategy's tasks cannot run under it; a number that is too small.
        SetupError: an argument that is only for ``"auto"``, where the plan is another.
    """

    def __init__(
        self,
        plan: str | Path | PipelinePlan = "copy_ahead",
        *,
        exploration: Mapping[str, Any] | None = None,
        max_in_flight: int = AutoOptions.max_in_flight,
        save_plan: str | Path | None = None,
        uneven_batches: Uneven = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._take_uneven(uneven_batches, uneven_evaluation)
        self._auto = AutoOptions(exploration, max_in_flight, save_plan)
        self._auto.refuse_without_auto(plan)
        # What cannot be is said when the strategy is made, not when training begins.
        self._given = None if plan == AUTO else default_plan(_not_moved, plan)
        self.plan_choice: PlanChoice | None = None
        # Of a checkpoint that was loaded, and of this run from its first backward pass on.
        self._order_at_save: list[str] | None = None
        self._order: list[str] | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        self._leave_loaders_of_one_process(trainer)
        install_evaluation_loops(trainer)
        install_interrupted_saves(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            PipelineTrainingEpochLoop.install(trainer)
            self._order = None  # of an earlier fit, which checkpoints written since then were to have
        super().setup(trainer)

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """The two tasks under the plan; the training loop asks for it when training begins."""
        ddp = self._sums_depend_on_order()
        if self._order_at_save is not None and ddp is not None:
            settle_gradient_order(ddp, self._order_at_save)
            self._order, self._order_at_save = self._order_at_save, None
        group = dist.group.WORLD if self.world_size > 1 else None
        if self._given is not None:
            pipeline = SWPipeline(default_plan(transfer, self._given), self.root_device, group)
            return TrainingProgram(pipeline, transfer=TRANSFER, step=TRAIN)
        by_hand, further = plans_to_try(default_tasks(transfer), self._auto.max_in_flight)
        return AutoProgram(
            by_hand,
            lambda own, beside: further,
            self.root_device,
            group,
            self._auto.search,
            self._plan_chosen,
            transfer=TRANSFER,
            step=TRAIN,
        )

    def _plan_chosen(self, choice: PlanChoice) -> None:
        self.plan_choice = choice
        if self.global_rank == 0:
            tell_choice(choice, self._auto.save_plan)

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Batches of one dataloader, moved as far ahead as in training; by one where that is not chosen yet."""
        training = self._given or (self.plan_choice and self.plan_choice.plan)
        ahead = training.schedule[TRANSFER].stage if training else 1
        return default_evaluation(trainer, transfer, step, ahead=ahead)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, which may hold tensors and plain types, unless the user allows more."""
        with reading_plain_types(checkpoint_path):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only is not False)
        order = checkpoint.get(_GRADIENT_ORDER)
        if order is not None and not (isinstance(order, list) and all(isinstance(name, str) for name in order)):
            raise SetupError(
                f"the order of gradients in the checkpoint {str(checkpoint_path)!r} is damaged: expected a list of"
                f" parameters' names, got {shown(order)}; take another checkpoint"
            )
        self._order_at_save = order
        return checked_contents(checkpoint, checkpoint_path, self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint, with the order in which gradients are summed over ranks."""
        # Before the first batch of a run that goes on, its own is that of the checkpoint.
        order = self._order if self._order_at_save is None else self._order_at_save
        if order is not None:
            checkpoint[_GRADIENT_ORDER] = order
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Let DDP lay gradients out for the next step, as its next forward pass would, so that the order is known."""
        super().post_backward(closure_loss)
        ddp = self._sums_depend_on_order() if self._order is None else None
        if ddp is not None and ddp.reducer._rebuild_buckets():
            self._order = gradient_order(ddp)

    def _sums_depend_on_order(self) -> DistributedDataParallel | None:
        """The model, where the last bit of a summed gradient depends on its place in a bucket, or None.

        The sum of two ranks does not; and with either option below DDP lays gradients out once, or by other rules.
        """
        ddp = self.model
        if self.world_size < 3 or not isinstance(ddp, DistributedDataParallel):
            return None
        return None if ddp.find_unused_parameters or ddp.static_graph else ddp

    def teardown(self) -> None:
        self._order_at_save = None  # of a checkpoint that was read for an evaluation: a later fit is none of its
        super().teardown()

    def configure_ddp(self) -> None:
        if self.world_size > 1:
            assert self.lightning_module is not None
            _refuse_optimizers_in_backward(self.lightning_module)
            super().configure_ddp()


def _not_moved(batch: Any) -> Any:
    return batch


def _refuse_optimizers_in_backward(module: pl.LightningModule) -> None:
    """Refuse parameters that an optimiser trains inside backward, where several ranks average gradients after it.

    Raises:
        SetupError: names them.
    """
    names = [name for name, one in module.named_parameters() if getattr(one, "_in_backward_optimizers", None)]
    if names:
        raise SetupError(
            f"the optimisers of {', '.join(names)} run inside backward (apply_optimizer_in_backward), before gradients"
            " are averaged over ranks, and DistributedDataParallel does not run them on a CPU. Shard such tables with"
            " strategy='recsys_prefetch_pipeline', or train them by an optimiser of configure_optimizers"
        )
