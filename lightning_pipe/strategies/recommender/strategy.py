"""Strategy for recommenders whose tables TorchRec shards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_pipe._compat.lightning import optimizers_to_device
from lightning_pipe.engine import PipelinePlan, ProfileResult, SetupError, SWPipeline, TaskSpan
from lightning_pipe.engine.common.options import check_choice, check_flags, option_group
from lightning_pipe.loops import EvaluationProgram, PipelineTrainingEpochLoop, TrainingProgram
from lightning_pipe.loops.data.batch_source import Uneven
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.loops.programs.auto_program import PlanChoice
from lightning_pipe.loops.uneven_evaluation import Turn, UnevenEvaluation
from lightning_pipe.recsys.plans.named import recsys_plan
from lightning_pipe.recsys.tasks.options import (
    CheckOptions,
    MemoryOptions,
    RewriteOptions,
    SessionOptions,
    ShardingOptions,
    WireOptions,
    make_balancer,
)
from lightning_pipe.recsys.tasks.session import RecsysSession
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from lightning_pipe.strategies.plan_finding import AUTO, AutoOptions, tell_choice
from lightning_pipe.strategies.recommender.evaluation import LOOKUP, TableEvaluation
from lightning_pipe.strategies.recommender.shard_once import shard_once
from lightning_pipe.strategies.recommender.sharded_checkpoint import ShardedCheckpointStrategy
from lightning_pipe.strategies.recommender.training import (
    TableTraining,
    UsersTransfer,
    checked_transfer,
    leave_tables_out,
)
from lightning_pipe.strategies.refusals import (
    most_accumulated,
    refuse_other_precision,
    refuse_scaled_fp16,
    refuse_training,
)
from lightning_pipe.strategies.running_work import Running

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import BalanceReport, BatchBalancer


class RecsysPipelineStrategy(ShardedCheckpointStrategy):
    """Shards the TorchRec tables of a LightningModule and trains the module under a recsys plan.

    The LightningModule needs no changes: it holds unsharded TorchRec modules, its ``training_step(batch, batch_idx)``
    calls them, and it has ``configure_optimizers``. TorchRec's planner shards the tables. They are trained by their own
    optimiser, which is fused into backward. Dense parameters are replicated, and their gradients are averaged over
    ranks.

    - *Accumulation.* With ``accumulate_grad_batches=N``, tables step in every micro-batch, with the gradients of its
      loss divided by N, unless ``accumulate_tables`` is ``"window"``.
    - *No loss.* A rank whose ``training_step`` returns None contributes zero gradients. On several ranks, hooks see a
      loss of zero for that batch.
    - *Clipping.* Gradients are clipped by one norm over dense parameters and tables. Clipping by value is refused, and
      so is clipping with replicas of tables, feature processors, or a batch size per feature.
    - *Loss scaling.* Under ``16-mixed``, the gradients of tables are unscaled, and tables skip a step if the dense
      parameters skip it. ``16-mixed`` with feature processors is refused.

    The module stays sharded after training and can be passed to another trainer. A strategy that requests a different
    sharding refuses it. Pass an option group as its dataclass, or as a mapping of its fields as in YAML.

    Args:
        plan: name of a plan, path of a YAML plan, or a :class:`~lightning_pipe.engine.PipelinePlan` (default
            ``"prefetch"``). Names are ``"serial"``, ``"base"``, ``"threaded_input"`` (copy and input dist in a worker
            thread), ``"prefetch"``, ``"early_prefetch"`` (for rows on disk), ``"fused_sparse_dist"`` and
            ``"semi_sync"``. ``"auto"`` times plans in the first iterations and continues with the fastest: the named
            plans that suit the model, and plans that a planner proposes for the measured tasks. All plans train to the
            same values except ``"semi_sync"``, which looks up a batch before the previous batch has updated the tables
            and is never a candidate of ``"auto"``. Plans that run further ahead hold more batches in memory.
        sparse_optimizer: ``class_path`` and ``init_args`` of the optimiser for tables without one from TorchRec's
            ``apply_optimizer_in_backward`` (default None: every table must have one).
        sparse_lr_scheduler: ``class_path`` and ``init_args`` of a learning-rate scheduler for the tables, stepped after
            every optimiser step (default None). Without it, the rate of each table follows the first group of the dense
            optimiser: its base rate times the group's rate divided by its initial rate (``OneCycleLR``: ``max_lr``).
        sharding: plan, constraints and replicas of the tables; see :class:`~lightning_pipe.recsys.ShardingOptions`.
        rewrite: method that finds the inputs of sharded modules in a batch; see
            :class:`~lightning_pipe.recsys.RewriteOptions`.
        wire: precision of embeddings and integer type of ids in messages; see
            :class:`~lightning_pipe.recsys.WireOptions`.
        memory: early release of the ids of batches in flight; see :class:`~lightning_pipe.recsys.MemoryOptions`.
        checks: checks of ids and of the loss; see :class:`~lightning_pipe.recsys.CheckOptions`.
        balancer: exchange of samples between ranks in training, so that all ranks have about the same workload: True, a
            :class:`~lightning_pipe.recsys.BatchBalancer`, or a mapping of its arguments (default None: no exchange).
            Use it if the cost of samples varies; :attr:`balance_report` shows the effect.
        auto: size of the search and file for its result under ``plan="auto"``; see
            :class:`~lightning_pipe.strategies.plan_finding.AutoOptions`.
        uneven_batches: handling of epochs in which some ranks have fewer batches: ``"shortest"`` (default) ends the
            epoch with the first rank that runs out, ``"error"`` raises an error.
        uneven_evaluation: handling of evaluations in which some ranks have fewer batches: with ``"join"`` (default),
            these ranks take part in the lookups of the other ranks, so that each row is evaluated exactly once. Batches
            that only some ranks have are not pipelined. ``"error"`` raises an error in validation and test, and keeps
            Lightning's sampler, which repeats rows so that all ranks have the same number.
        accumulate_tables: step of the tables with ``accumulate_grad_batches=N``. ``"micro_batch"`` (default) steps in
            every micro-batch, before the norm of all gradients is known, so gradients cannot be clipped, nor the loss
            scaled. ``"window"`` steps once with the gradients of all, as for one batch of N times the size. It keeps
            the ids and the gradients of the outputs of N micro-batches, and looks up their rows again.
        transfer_on_worker: True to call the user's ``transfer_batch_to_device`` and ``on_after_batch_transfer`` in the
            worker thread of a plan such as ``"threaded_input"`` (default False). They must then draw no random numbers
            and call neither ``log`` nor collectives.
        arguments: arguments of Lightning's ``DDPStrategy``, and two more. ``init_from`` (default None): checkpoint that
            a new run starts with, also if its tables differ: a path, or a
            :class:`~lightning_pipe.strategies.WarmStart`. ``async_checkpoints`` (default False): True to copy
            checkpoints to the host and write them in the background during training. The next save and the end of
            training wait for the write and raise its errors. Costs host memory for the copy.

    Attributes:
        plan_choice: plan that ``"auto"`` has chosen, with its measurements; None before.

    Raises:
        SetupError: a value is invalid.
        PlanError: the plan does not exist, or it does not fit the recsys tasks.
        TypeError: an argument is unknown.
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
        balancer: bool | BatchBalancer | Mapping[str, Any] | None = None,
        auto: AutoOptions | Mapping[str, Any] | None = None,
        uneven_batches: Uneven = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        accumulate_tables: Literal["micro_batch", "window"] = "micro_batch",
        transfer_on_worker: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        groups = {"rewrite": rewrite, "wire": wire, "memory": memory, "checks": checks}
        self._options = option_group(SessionOptions, "options", groups)
        self._sharding = option_group(ShardingOptions, "sharding", sharding)
        self._auto = option_group(AutoOptions, "auto", auto)
        self._auto.refuse_without_auto(plan)
        self._take_uneven(uneven_batches, uneven_evaluation)
        # An unknown plan is an error here, not only when training begins.
        self._declared = None if plan == AUTO else recsys_plan(plan, recsys_tasks())
        self._plan = plan
        self._sparse_optimizer = sparse_optimizer
        self._sparse_lr_scheduler = sparse_lr_scheduler
        check_choice("accumulate_tables", accumulate_tables, ("micro_batch", "window"))
        self._in_every_batch = accumulate_tables == "micro_batch"
        self._balancer = make_balancer(balancer)
        check_flags(transfer_on_worker=transfer_on_worker)
        self.transfer_on_worker = transfer_on_worker
        self.plan_choice: PlanChoice | None = None
        self._session: RecsysSession | None = None
        self._training: TableTraining | None = None
        self._evaluation: TableEvaluation | None = None
        self._users_transfer = UsersTransfer(transfer_on_worker)

    # ------------------------------------------------------------------ current pipeline, traces and profiles

    @property
    def pipeline(self) -> SWPipeline:
        """Pipeline of the training, while ``Trainer.fit`` runs."""
        if (pipeline := self._pipeline_in_training()) is None:
            raise SetupError("the strategy has no pipeline outside of training. Access it while Trainer.fit runs")
        return pipeline

    @property
    def balance_report(self) -> BalanceReport | None:
        """Imbalance of the ranks' workloads before and after the exchange of samples; None without a balancer."""
        return None if self._balancer is None else self._balancer.report

    def start_trace(self) -> None:
        """Start recording the time and thread of each task."""
        self.pipeline.start_trace()

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording and return the spans in the order in which they ended."""
        return self.pipeline.stop_trace()

    def running(self) -> Running:
        """Description of the strategy's work for callbacks."""
        return Running(profile=self.profile)

    def profile(
        self, batches: Sequence[Any], tasks: Sequence[str] | None = None, *, rounds: int = 7, iterations: int = 10
    ) -> ProfileResult:
        """Measure the exposed time of each task in an iteration of the current plan, by replaying the task.

        The model is not trained: tables, dense parameters, optimisers, metrics and random generators are restored from
        a copy on the host, which costs as much host memory. ``training_step`` is called without Lightning's hooks, and
        values that it logs are discarded. Every rank calls this method at the same point between two batches, for
        example in a callback's ``on_train_batch_end``.

        Args:
            batches: batches on the host, in the form in which a loader supplies them. Use several: repeated rows of a
                single batch are found in caches, which rows of real data are not.
            tasks: names of the tasks (default None: all tasks).
            rounds: number of measurements of each task (default 7). More rounds give narrower intervals.
            iterations: number of iterations per measurement (default 10).

        Raises:
            SetupError: training has not begun, gradients are being accumulated, the loss is scaled (16-mixed), the
                model has managed collision, or a task has effects that it does not declare.
            PlanError: a task is unknown, *batches* is empty, or a number is too small.
        """
        assert self.pipeline is not None and self._training is not None  # the property raises outside of training
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
            refuse_training(trainer, module, self.precision_plugin, self._in_every_batch)
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
            ranks_per_node=self.num_processes,
            init_from=self._init_from,
            trains=fitting,
        )
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # FBGEMM's fused lookups have no CPU kernel for inference tensors; no_grad computes the same.
            loop.inference_mode = False
        install_evaluation_loops(trainer)
        install_interrupted_saves(trainer)
        setting = self._sharded, self._declared, self.root_device, self._options
        self._session = RecsysSession(*setting, balancer=self._balancer)
        self._evaluation = TableEvaluation(self._session, self.precision_plugin, self._pipeline_in_training)
        if fitting:
            PipelineTrainingEpochLoop.install(trainer)
            self.setup_optimizers(trainer)
            plans = self._plan, self._auto, self._plan_chosen
            window = not self._in_every_batch and most_accumulated(trainer) > 1
            self._training = TableTraining(trainer, self._session, *plans, self._sparse_lr_scheduler, window)
            self._rates = self._training.rates
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        leave_tables_out(self.optimizers, self.sharded_model)

    # ------------------------------------------------------------------ programs

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build the tasks and the plan of the training. The training loop calls this method when training begins."""
        assert self._training is not None
        return self._training.build(checked_transfer(trainer, transfer), partial(self._users_transfer.allowed, trainer))

    def _plan_chosen(self, choice: PlanChoice) -> None:
        """Store the choice; rank 0 prints it and writes the plan."""
        self.plan_choice = choice
        if self.global_rank == 0:
            tell_choice(choice, self._auto.save_plan)

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Build the tasks and the plan that evaluate the batches of one dataloader."""
        assert self._evaluation is not None
        # Until "auto" has chosen a plan, evaluation follows the default plan.
        plan = self.plan_choice.plan if self.plan_choice else self._declared or recsys_plan("prefetch", recsys_tasks())
        plan = self._users_transfer.allowed(trainer, plan)
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
        """Context in which dense gradients accumulate on this rank without being averaged."""
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
        """Context in which lookups and reductions of an evaluation step are announced to *turn*."""
        assert self._evaluation is not None
        with super().in_turn(turn, step), self._evaluation.in_turn(turn, step):
            yield

    def join_evaluation(self, what: str, detail: Any) -> None:
        """Take part with empty input in a collective that another rank has announced."""
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
        # Otherwise the final buffers of ranks would depend on the points at which checkpoints were written.
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
        super().teardown()
