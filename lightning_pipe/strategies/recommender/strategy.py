"""The strategy for recommenders sharded by TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_pipe._compat.lightning import optimizers_to_device
from lightning_pipe.engine import PipelinePlan, ProfileResult, SetupError, SWPipeline, TaskSpan
from lightning_pipe.engine.common.options import option_group
from lightning_pipe.loops import EvaluationProgram, PipelineTrainingEpochLoop, TrainingProgram
from lightning_pipe.loops.data.batch_source import Uneven
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.loops.programs.auto_program import PlanChoice
from lightning_pipe.loops.uneven_evaluation import Turn, UnevenEvaluation
from lightning_pipe.recsys.balancing.balancer import BalanceReport, BatchBalancer, make_balancer
from lightning_pipe.recsys.plans.named import recsys_plan
from lightning_pipe.recsys.tasks.options import (
    CheckOptions,
    MemoryOptions,
    RewriteOptions,
    SessionOptions,
    ShardingOptions,
    WireOptions,
)
from lightning_pipe.recsys.tasks.session import RecsysSession
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from lightning_pipe.strategies.plan_finding import AUTO, AutoOptions, tell_choice
from lightning_pipe.strategies.recommender.evaluation import LOOKUP, TableEvaluation
from lightning_pipe.strategies.recommender.shard_once import shard_once
from lightning_pipe.strategies.recommender.sharded_checkpoint import ShardedCheckpointStrategy
from lightning_pipe.strategies.recommender.training import TableTraining, checked_transfer, leave_tables_out
from lightning_pipe.strategies.refusals import refuse_other_precision, refuse_scaled_fp16, refuse_training
from lightning_pipe.strategies.refused_arguments import RECOMMENDER, refuse_renamed
from lightning_pipe.strategies.running_work import Running


class RecsysPipelineStrategy(ShardedCheckpointStrategy):
    """Shards a LightningModule's TorchRec tables and trains it under a recsys plan.

    The module is an ordinary one: unsharded TorchRec modules, a ``training_step(batch, batch_idx)`` that calls them,
    and ``configure_optimizers``. Tables are sharded by TorchRec's planner and trained by their own optimiser, fused
    into backward; dense parameters are replicated, their gradients averaged over ranks. Under
    ``accumulate_grad_batches=N`` the tables step in every micro-batch, with the gradients of its loss over N. A rank
    whose ``training_step`` returns None counts as having gradients of zero, and hooks see a loss of zero there.

    Gradients are clipped by one norm, of dense parameters and tables together. Under ``16-mixed`` the tables are
    unscaled, and skip a step together with the dense parameters. Both refuse modules with feature processors, and
    accumulation; clipping also a batch size per feature, and clipping by value.

    The module stays sharded after training, and may then go to another trainer; one whose strategy asks for another
    sharding is refused. An option group is given as its dataclass, or as a mapping of its fields, as in YAML.

    Args:
        plan: ``"serial"``, ``"base"``, ``"prefetch"``, ``"fused_sparse_dist"``, the path of a plan in YAML, or a plan;
            or ``"auto"``: the first iterations train under each of these, and under plans found for what the tasks
            take, and the rest under the fastest. All train the same. ``"semi_sync"`` does not: it looks a batch up
            before the one before has written the tables.
        sparse_optimizer: ``class_path`` and ``init_args`` of the tables' optimiser, for tables that name none in
            TorchRec's way (``apply_optimizer_in_backward``).
        sparse_lr_scheduler: ``class_path`` and ``init_args`` of a learning-rate scheduler for the tables, stepped after
            every optimiser step. Without it the tables' rates follow the dense optimiser's (its first group's): base
            rate times its factor.
        sharding: :class:`~lightning_pipe.recsys.ShardingOptions`, how the tables are sharded.
        rewrite: :class:`~lightning_pipe.recsys.RewriteOptions`, how inputs of sharded modules are found in a batch.
        wire: :class:`~lightning_pipe.recsys.WireOptions`, precision of embeddings and integer type of ids in messages.
        memory: :class:`~lightning_pipe.recsys.MemoryOptions`, memory of the batches in flight.
        checks: :class:`~lightning_pipe.recsys.CheckOptions`, checks of ids and of the loss.
        balancer: exchange samples between ranks in training, so that all have about as much to do: ``True``, a
            :class:`~lightning_pipe.recsys.BatchBalancer` or its arguments; :attr:`balance_report` has the effect.
        auto: :class:`~lightning_pipe.strategies.plan_finding.AutoOptions`, how a plan is found under ``"auto"``.
        uneven_batches: where some ranks have fewer batches, end the epoch with the ``shortest``, or raise an ``error``.
        uneven_evaluation: where some ranks have fewer batches to evaluate: ``join`` lets them take part in the others'
            lookups, so that each row is evaluated once; such batches are not pipelined. ``error`` refuses to validate
            and test, and leaves Lightning's sampler, which repeats rows.
        arguments: of Lightning's ``DDPStrategy``, and ``async_checkpoints`` (default False): while training, copy what
            is saved to the host and write it in the background. The next save, and the end of training, wait for it
            and raise its errors. Costs the memory of the copy.

    Raises:
        SetupError: a wrong value, or an argument of a former version, with the YAML that replaces it.
        PlanError: there is no such plan.
    """

    evaluates_together = True

    def __init__(
        self,
        plan: str | Path | PipelinePlan = "prefetch",
        *,
        sparse_optimizer: Mapping[str, Any] | None = None,
        sparse_lr_scheduler: Mapping[str, Any] | None = None,
        sharding: ShardingOptions | Mapping[str, Any] | None = None,
        rewrite: RewriteOptions | Mapping[str, Any] | None = None,
        wire: WireOptions | Mapping[str, Any] | None = None,
        memory: MemoryOptions | Mapping[str, Any] | None = None,
        checks: CheckOptions | Mapping[str, Any] | None = None,
        balancer: bool | Mapping[str, Any] | BatchBalancer | None = None,
        auto: AutoOptions | Mapping[str, Any] | None = None,
        uneven_batches: Uneven = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        **arguments: Any,
    ) -> None:
        refuse_renamed(arguments, RECOMMENDER, self)
        super().__init__(**arguments)
        groups = {"rewrite": rewrite, "wire": wire, "memory": memory, "checks": checks}
        self._options = option_group(SessionOptions, "options", groups)
        self._sharding = option_group(ShardingOptions, "sharding", sharding)
        self._auto = option_group(AutoOptions, "auto", auto)
        self._auto.refuse_without_auto(plan)
        self._take_uneven(uneven_batches, uneven_evaluation)
        # A name that does not exist is said when the strategy is made, not when training begins.
        self._declared = None if plan == AUTO else recsys_plan(plan, recsys_tasks())
        self._plan = plan
        self._sparse_optimizer = sparse_optimizer
        self._sparse_lr_scheduler = sparse_lr_scheduler
        self._balancer = make_balancer(balancer)
        self.plan_choice: PlanChoice | None = None
        self._session: RecsysSession | None = None
        self._training: TableTraining | None = None
        self._evaluation: TableEvaluation | None = None

    # ------------------------------------------------------------------ what runs

    @property
    def pipeline(self) -> SWPipeline:
        """The pipeline at work, while ``Trainer.fit`` runs."""
        if (pipeline := self._pipeline_in_training()) is None:
            raise SetupError("there is no pipeline; Trainer.fit makes one when training begins")
        return pipeline

    @property
    def balance_report(self) -> BalanceReport | None:
        """How uneven the work of ranks was before samples were exchanged, and after; None without a balancer."""
        return None if self._balancer is None else self._balancer.report

    def start_trace(self) -> None:
        """Record when and where each task runs from now on."""
        self.pipeline.start_trace()

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the spans in the order in which they ended."""
        return self.pipeline.stop_trace()

    def running(self) -> Running:
        """Answers of this strategy to callbacks."""
        return Running(profile=self.profile)

    def profile(
        self, batches: Sequence[Any], tasks: Sequence[str] | None = None, *, rounds: int = 7, iterations: int = 10
    ) -> ProfileResult:
        """Measure what each task costs an iteration of the current plan, by replaying it; nothing is trained.

        ``training_step`` is called without Lightning's hooks, and what it logs is discarded. Tables, dense parameters,
        optimisers, metrics and random generators are restored, from a copy on the host. Every rank calls this at the
        same point between two batches, as in a callback's ``on_train_batch_end``.

        Args:
            batches: on the host, as a loader gives them; some are better than one.
            tasks: their names; all by default.
            rounds: how often each is measured.
            iterations: of each measurement.

        Raises:
            SetupError: training has not begun, gradients of some batches are accumulated, losses are scaled
                (16-mixed), or a task has effects that it does not declare.
            PlanError: there is no such task, no batch, or a number is too small.
        """
        assert self.pipeline is not None and self._training is not None  # the former raises outside of training
        return self._training.profile(batches, tasks, rounds, iterations)

    def _pipeline_in_training(self) -> SWPipeline | None:
        return None if self._training is None else self._training.pipeline

    # ------------------------------------------------------------------ set-up

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert self.accelerator is not None and module is not None
        self.accelerator.setup(trainer)
        self._leave_loaders_of_one_process(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        refuse_other_precision(self.precision_plugin)
        if fitting:
            refuse_training(trainer, module, self.precision_plugin)
            refuse_scaled_fp16(trainer, self.precision_plugin, self._options.wire.comms.backward)
            if self._layer_sync is not None:
                self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self._sharded = shard_once(
            module,
            self._sharding,
            sparse_optimizer=self._sparse_optimizer,
            quantized_comms=self._options.wire.quantized_comms,
            device=self.root_device,
            timeout=self._timeout,
            ranks_per_node=self.num_processes,
        )
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # FBGEMM's fused lookups have no CPU kernel for inference tensors; no_grad computes the same.
            loop.inference_mode = False
        install_evaluation_loops(trainer)
        install_interrupted_saves(trainer)
        setting = self._sharded, self._declared, self.root_device, self._options
        self._session = RecsysSession(*setting, balancer=self._balancer, timeout=self._timeout)
        self._evaluation = TableEvaluation(self._session, self.precision_plugin, self._pipeline_in_training)
        if fitting:
            PipelineTrainingEpochLoop.install(trainer)
            self.setup_optimizers(trainer)
            plans = self._plan, self._auto, self._plan_chosen
            self._training = TableTraining(trainer, self._session, *plans, self._sparse_lr_scheduler)
            self._rates = self._training.rates
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        leave_tables_out(self.optimizers, self.sharded_model)

    # ------------------------------------------------------------------ programs

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build tasks and plan for the sharded module; the training loop asks for it when training begins."""
        assert self._training is not None
        return self._training.build(checked_transfer(trainer, transfer))

    def _plan_chosen(self, choice: PlanChoice) -> None:
        """Say so, and write it down."""
        self.plan_choice = choice
        if self.global_rank == 0:
            tell_choice(choice, self._auto.save_plan)

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Build tasks and plan for evaluating the batches of one dataloader."""
        assert self._evaluation is not None
        # Where the plan is still to be found, the one that runs most ahead.
        plan = self.plan_choice.plan if self.plan_choice else self._declared or recsys_plan("prefetch", recsys_tasks())
        return self._evaluation.build(trainer, checked_transfer(trainer, transfer), step, plan)

    # ------------------------------------------------------------------ Lightning's calls during a batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._training is not None
        return self._training.forward(partial(super().training_step, *args, **kwargs))

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        assert self._training is not None and self.lightning_module is not None
        module, precision = self.lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)
        scaled = precision.pre_backward(closure_loss, module)
        self._training.backward(lambda: precision.backward(scaled, module, optimizer, *args, **kwargs))
        # After the tasks of backward, so that on_after_backward sees gradients averaged over ranks.
        detached = precision.post_backward(scaled, module)
        self.post_backward(detached)
        return detached

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        assert self._training is not None
        step = super().optimizer_step
        return self._training.optimizer_step(
            optimizer, closure, lambda and_open: step(optimizer, and_open, model, **kwargs)
        )

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients accumulate on this rank, without being averaged, in the body."""
        assert self._session is not None and self._session.reducer is not None
        with self._session.reducer.no_sync():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(partial(super().validation_step, *args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(partial(super().test_step, *args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(partial(super().predict_step, *args, **kwargs))

    def _evaluate(self, step: Callable[[], Any]) -> Any:
        assert self._evaluation is not None
        return self._evaluation.run(step)

    @contextmanager
    def in_turn(self, turn: Turn, step: str) -> Generator[None, None, None]:
        """Context in which lookups and sums of an evaluation step are announced to *turn*."""
        assert self._evaluation is not None
        with super().in_turn(turn, step), self._evaluation.in_turn(turn, step):
            yield

    def join_evaluation(self, what: str, detail: Any) -> None:
        """Start another rank's lookup with empty features."""
        if what.startswith(LOOKUP):
            assert self._evaluation is not None
            self._evaluation.join(detail)
        else:
            super().join_evaluation(what, detail)

    # ------------------------------------------------------------------ begin and end of training and evaluations

    def on_train_start(self) -> None:
        assert self._evaluation is not None
        self._evaluation.refuse_existing_rows()
        super().on_train_start()

    def on_validation_start(self) -> None:
        assert self._evaluation is not None
        self._evaluation.begin()

    on_test_start = on_predict_start = on_validation_start

    def on_train_end(self) -> None:
        super().on_train_end()
        # Or other ranks would end with buffers that depend on where checkpoints were written.
        self.sharded_model.share_buffers()
        self.sharded_model.sync_replicas()
        if self.sharded_model.dynamic_rows:
            self.sharded_model.commit_rows()

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        for part in (self._training, self._evaluation, self._session):
            if part is not None:
                part.close()
        self._evaluation = self._session = None
        module = self.lightning_module
        if module is not None and self._layer_sync is not None:
            self._layer_sync.revert(module)
        # What Lightning's own does, but for the move to the CPU, where the tables' kernels could not follow.
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._note_end()
