"""Strategy for recommenders whose tables TorchRec shards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_pipe._compat.lightning import get_layer_sync_plugin, is_accumulating, optimizers_to_device
from lightning_pipe._compat.torchrec import cached_tables
from lightning_pipe.engine import PipelinePlan, PlanError, ProfileResult, SetupError, SWPipeline, TaskSpan
from lightning_pipe.engine.common.options import check_booleans, check_choice, parse_option_group
from lightning_pipe.loops import EvaluationProgram, PipelineTrainingEpochLoop, TrainingProgram
from lightning_pipe.loops.data.batch_source import UnevenPolicy
from lightning_pipe.loops.programs.auto_program import AutoProgram, PlanChoice
from lightning_pipe.loops.uneven_evaluation import UnevenBatchCoordinator, UnevenEvaluation
from lightning_pipe.recsys.kernels.kernel_calls import check_trainable_after_dense_step
from lightning_pipe.recsys.plans.recsys_plans import recsys_plan
from lightning_pipe.recsys.sharding.replicas import refuse_clipping
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.declarations import RecsysTask
from lightning_pipe.recsys.tasks.options import (
    CheckOptions,
    MemoryOptions,
    RewriteOptions,
    SessionOptions,
    ShardingOptions,
    WireOptions,
    make_balancer,
)
from lightning_pipe.recsys.tasks.session import RecsysSession, next_must_run_serially
from lightning_pipe.recsys.tasks.table_rates import TableLearningRates
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from lightning_pipe.strategies.auto_plan_options import AUTO, AutoOptions, report_choice
from lightning_pipe.strategies.base import install_loops
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy
from lightning_pipe.strategies.recommender.evaluation import LOOKUP, RecsysEvaluation
from lightning_pipe.strategies.recommender.lightning_adapters import (
    TransferThreadPolicy,
    extract_loss,
    find_last_task_writing_batch,
    log_fused_optimizer_defaults,
    remove_tables_from_optimizers,
    wrap_transfer_with_batch_check,
)
from lightning_pipe.strategies.recommender.recsys_profiler import RecsysProfiler
from lightning_pipe.strategies.recommender.shard_once import (
    get_pending_warm_start,
    mark_warm_started,
    shard_module_once,
)
from lightning_pipe.strategies.recommender.sharded_checkpoint import (
    load_sharded_checkpoint,
    save_sharded_checkpoint,
    start_from_checkpoint,
)
from lightning_pipe.strategies.recommender.table_gradients import TablePrecisionPluginAdapter
from lightning_pipe.strategies.recommender.warm_start import WarmStartOptions
from lightning_pipe.strategies.recommender.weight_averaging import ShardedWeightAverages, prepare_averaging
from lightning_pipe.strategies.setup_checks import (
    check_fp16_comms,
    check_precision,
    check_training_options,
    clips_gradients,
    get_grad_scaler,
    max_accumulate_grad_batches,
)
from lightning_pipe.strategies.strategy_info import StrategyInfo

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import BalanceReport, BatchBalancer


class RecsysPipelineStrategy(FolderCheckpointStrategy):
    """Shards the TorchRec tables of a LightningModule and trains the module under a recsys plan.

    The LightningModule needs no changes: it holds unsharded TorchRec modules, its ``training_step(batch, batch_idx)``
    calls them, and it has ``configure_optimizers``. TorchRec's planner shards the tables. They are trained by their own
    optimizer, which is fused into backward. Dense parameters are replicated, and their gradients are averaged over
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
            thread), ``"prefetch"``, ``"early_prefetch"`` (for rows on disk), ``"fused_sparse_dist"``,
            ``"compute_ahead"`` (for rows that wait for a network) and ``"semi_sync"``. ``"auto"`` times plans in the
            first iterations and continues with the fastest: the named plans that suit the model, and plans that a
            planner proposes for the measured tasks. All plans train to the same values except ``"semi_sync"``, which
            looks up a batch before the previous batch has updated the tables and is never a candidate of ``"auto"``.
            Plans that run further ahead hold more batches in memory.
        sparse_optimizer: ``class_path`` and ``init_args`` of the optimizer for tables without one from TorchRec's
            ``apply_optimizer_in_backward`` (default None: every table must have one).
        sparse_lr_scheduler: ``class_path`` and ``init_args`` of a learning-rate scheduler for the tables, stepped after
            every optimizer step (default None). Without it, the rate of each table follows the first group of the dense
            optimizer: its base rate times the group's rate divided by its initial rate (``OneCycleLR``: ``max_lr``).
        sharding: plan, constraints and replicas of the tables; see :class:`~lightning_pipe.recsys.ShardingOptions`.
        rewrite: method that finds the inputs of sharded modules in a batch; see
            :class:`~lightning_pipe.recsys.RewriteOptions`.
        wire: precision of embeddings, integer type of ids and their deduplication in messages; see
            :class:`~lightning_pipe.recsys.WireOptions`.
        memory: early release of the ids of batches in flight; see :class:`~lightning_pipe.recsys.MemoryOptions`.
        checks: checks of ids and of the loss; see :class:`~lightning_pipe.recsys.CheckOptions`.
        balancer: exchange of samples between ranks in training, so that all ranks have about the same workload: True, a
            :class:`~lightning_pipe.recsys.BatchBalancer`, or a mapping of its arguments (default None: no exchange).
            Use it if the cost of samples varies; :attr:`balance_report` shows the effect.
        auto: size of the search and file for its result under ``plan="auto"``; see
            :class:`~lightning_pipe.strategies.auto_plan_options.AutoOptions`.
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
        average_tables: True to average the tables as well under Lightning's ``WeightAveraging`` and
            ``EMAWeightAveraging`` (default False: the dense part only). Each rank averages its shards, which takes the
            memory of the shards once more, and each update of the averages reads and writes all their rows.
        extra_tasks: additional training tasks, each by the name of the task that it follows in serial order (default
            none). *plan* must schedule them. An evaluation does not run them.
        transfer_on_worker: True to call the user's ``transfer_batch_to_device`` and ``on_after_batch_transfer`` in the
            worker thread of a plan such as ``"threaded_input"`` (default False). They must then draw no random numbers
            and call neither ``log`` nor collectives.
        init_from: checkpoint that a new run starts with, also if its tables differ: a path, or a
            :class:`~lightning_pipe.strategies.WarmStartOptions` (default None).
        arguments: arguments of Lightning's ``DDPStrategy``, and ``async_checkpoints`` (default False): True to copy
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
        uneven_batches: UnevenPolicy = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        accumulate_tables: Literal["micro_batch", "window"] = "micro_batch",
        average_tables: bool = False,
        extra_tasks: Mapping[str, RecsysTask] | None = None,
        transfer_on_worker: bool = False,
        init_from: str | Path | WarmStartOptions | Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        groups = {"rewrite": rewrite, "wire": wire, "memory": memory, "checks": checks}
        self._options = parse_option_group(SessionOptions, "options", groups)
        self._sharding = parse_option_group(ShardingOptions, "sharding", sharding)
        self._auto = parse_option_group(AutoOptions, "auto", auto)
        self._auto.refuse_without_auto(plan)
        self._set_uneven_policies(uneven_batches, uneven_evaluation)
        # An unknown plan is an error here, not only when training begins.
        self._balancer = make_balancer(balancer)
        replicated = (self._sharding.replicas or 1) > 1
        tasks = recsys_tasks(
            balanced=self._balancer is not None, replicated=replicated, divided=True, extra=extra_tasks
        )
        self._declared = None if plan == AUTO else recsys_plan(plan, tasks)
        if extra_tasks and plan == AUTO:
            raise PlanError(
                "plan='auto' chooses among plans that do not schedule the tasks of extra_tasks. Pass a plan that does."
            )
        self._extra_tasks = extra_tasks
        self._plan = plan
        self._sparse_optimizer = sparse_optimizer
        self._sparse_lr_scheduler = sparse_lr_scheduler
        check_choice("accumulate_tables", accumulate_tables, ("micro_batch", "window"))
        self._in_every_batch = accumulate_tables == "micro_batch"
        check_booleans(transfer_on_worker=transfer_on_worker, average_tables=average_tables)
        self._average_tables = average_tables
        self.transfer_on_worker = transfer_on_worker
        self._init_from = WarmStartOptions.from_config(init_from)
        self.plan_choice: PlanChoice | None = None
        self._sharded: ShardedModel | None = None
        self._session: RecsysSession | None = None
        # State of the training. The rates stay after it, for checkpoints that are written then.
        self._program: TrainingProgram | None = None
        self._rates: TableLearningRates | None = None
        self._gradients: TablePrecisionPluginAdapter | None = None
        self._evaluation: RecsysEvaluation | None = None
        self._averages: ShardedWeightAverages | None = None
        self._users_transfer = TransferThreadPolicy(transfer_on_worker)

    # ------------------------------------------------------------------ current pipeline, traces and profiles

    @property
    def pipeline(self) -> SWPipeline:
        """Pipeline of the training, while ``Trainer.fit`` runs."""
        if (pipeline := self._training_pipeline_or_none()) is None:
            raise SetupError("the strategy has no pipeline outside of training. Access it while Trainer.fit runs")
        return pipeline

    @property
    def sharded_model(self) -> ShardedModel:
        """Sharded module with its tables and their optimizers, available after set-up."""
        if self._sharded is None:
            raise SetupError(
                "the model is not sharded yet. Access it after set-up by Trainer.fit, validate, test or predict"
            )
        return self._sharded

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

    def strategy_info(self) -> StrategyInfo:
        """Description of the strategy's work for callbacks."""
        return StrategyInfo(profile=self.profile)

    def profile(
        self, batches: Sequence[Any], tasks: Sequence[str] | None = None, *, rounds: int = 7, iterations: int = 10
    ) -> ProfileResult:
        """Measure the exposed time of each task in an iteration of the current plan, by replaying the task.

        The model is not trained: tables, dense parameters, optimizers, metrics and random generators are restored from
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
        pipeline = self.pipeline  # raises outside of training
        assert self._session is not None and self.lightning_module is not None
        with self._session.suspend_training(pipeline):
            profile = RecsysProfiler(self.lightning_module.trainer, self._session, extract_loss, pipeline.plan)
            return profile.measure(batches, tasks, rounds, iterations)

    def _training_pipeline_or_none(self) -> SWPipeline | None:
        return None if self._program is None else self._program.pipeline

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._averages = prepare_averaging(self.lightning_module.trainer, self._average_tables)

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert self.accelerator is not None and module is not None
        self.accelerator.setup(trainer)
        self._disable_sampler_if_single_process(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_precision(self.precision_plugin)
        if fitting:
            check_training_options(trainer, module, self.precision_plugin, self._in_every_batch)
            check_fp16_comms(trainer, self.precision_plugin, self._options.wire.resolved_quantized_comms.backward)
            if (batch_norm := get_layer_sync_plugin(self)) is not None:
                batch_norm.apply(module)
        self.precision_plugin.convert_module(module)
        self._sharded = shard_module_once(
            module,
            self._sharding,
            sparse_optimizer=self._sparse_optimizer,
            quantized_comms=self._options.wire.quantized_comms,
            dedup=self._options.wire.dedup,
            device=self.root_device,
            ranks_per_node=self.num_processes,
            init_from=self._init_from,
            trains=fitting,
        )
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # FBGEMM's fused lookups have no CPU kernel for inference tensors; no_grad computes the same.
            loop.inference_mode = False
        install_loops(trainer)
        setting = self._sharded, self._declared, self.root_device, self._options
        self._session = RecsysSession(*setting, balancer=self._balancer, extra_tasks=self._extra_tasks)
        self._evaluation = RecsysEvaluation(self._session, self.precision_plugin, self._training_pipeline_or_none)
        if fitting:
            self.setup_optimizers(trainer)
            self._rates = TableLearningRates(self._sharded, lambda: self.optimizers[0], self._sparse_lr_scheduler)
            self._gradients = None
            log_fused_optimizer_defaults(self._sharded)
            if clips_gradients(trainer):
                refuse_clipping(self._sharded.replicas)
            self._session.create_dense_gradient_reducer(self._rates.apply)
            if self._averages is not None:
                self._averages.start(self._sharded, self.root_device)
        elif self._averages is not None:
            self._averages.discard_unless_of(self._sharded)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        remove_tables_from_optimizers(self.optimizers, self.sharded_model)

    # ------------------------------------------------------------------ programs

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build the tasks and the plan of the training. The training loop calls this method when training begins."""
        session, sharded, precision = self._session, self.sharded_model, self.precision_plugin
        assert session is not None
        clipped, loss_scaled = clips_gradients(trainer), get_grad_scaler(precision) is not None
        if clipped or loss_scaled:
            # The scale of the tables' gradients is known only after the optimizer step.
            check_trainable_after_dense_step(sharded.sharded_modules)
        tasks = session.training_tasks(
            "training_step",
            transfer=wrap_transfer_with_batch_check(trainer, transfer),
            loss_of=extract_loss,
            lookup_context=precision.forward_context,
            clipped=clipped,
            loss_scaled=loss_scaled,
            accumulates=not self._in_every_batch and max_accumulate_grad_batches(trainer) > 1,
        )
        rewrite = session.rewrite
        assert rewrite is not None
        loop = trainer.fit_loop.epoch_loop
        if isinstance(loop, PipelineTrainingEpochLoop):
            rewrite.statuses = loop.status_exchange
        if clipped or loss_scaled:
            self._gradients = TablePrecisionPluginAdapter(
                precision, sharded, session.device, self._get_current_iter_context
            )
        arguments: dict[str, Any] = {
            "transfer": "H2DAndShuffle",
            "forward": "LossPostprocess",
            "backward": "FinalizeGrads",
            "step": "OptimStep",
            "last_replacing_task": find_last_task_writing_batch(tasks),
            "trains_next_alone": lambda: (
                self._program is not None and next_must_run_serially(rewrite, self._program.pipeline.plan)
            ),
            "on_close": self._restore_model_and_precision_plugin,
            "on_abandon": self._abandon,
        }
        allowed = partial(self._users_transfer.move_user_transfer_to_main_thread, trainer)
        if self._plan != AUTO:
            pipeline = SWPipeline(allowed(recsys_plan(self._plan, tasks)), session.device, session.world)
            self._program = TrainingProgram(pipeline, **arguments)
            return self._program
        from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, propose_plans  # lazy: plan="auto" only

        exploration = self._auto.search_options
        by_hand = hand_written_plans(
            tasks,
            on_disk=bool(sharded.dynamic_rows),
            can_divide=rewrite.can_divide_lookups,
            max_in_flight=self._auto.max_in_flight,
        )
        plans = [*map(allowed, by_hand)]
        propose = partial(
            propose_plans,
            plans,
            cached=any(cached_tables(module) for module in rewrite.sharded_modules.values()),
            max_in_flight=self._auto.max_in_flight,
            peers=self.world_size > 1,
            device=session.device,
            max_plans=exploration.max_generated,
        )
        self._program = AutoProgram(
            plans, propose, session.device, session.world, exploration, self._store_and_report_plan_choice, **arguments
        )
        return self._program

    def _get_current_iter_context(self) -> Any:
        return None if self._program is None else self._program.current

    def _abandon(self, contexts: Sequence[Any]) -> None:
        assert self._session is not None
        self.pipeline.wait_for_workers()  # a worker may still prefetch rows
        self._session.undo_lookups_and_prefetches(contexts)

    def _restore_model_and_precision_plugin(self) -> None:
        assert self._session is not None
        self._session.restore_model_after_training()
        if self._gradients is not None:
            self._gradients.restore_precision_plugin()

    def _store_and_report_plan_choice(self, choice: PlanChoice) -> None:
        """Store the choice; rank 0 prints it and writes the plan."""
        self.plan_choice = choice
        if self.global_rank == 0:
            report_choice(choice, self._auto.save_plan)

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Build the tasks and the plan that evaluate the batches of one dataloader."""
        assert self._evaluation is not None
        # Until "auto" has chosen a plan, evaluation follows the default plan.
        plan = self.plan_choice.plan if self.plan_choice else self._declared or recsys_plan("prefetch", recsys_tasks())
        plan = self._users_transfer.move_user_transfer_to_main_thread(trainer, plan)
        return self._evaluation.build(trainer, wrap_transfer_with_batch_check(trainer, transfer), step, plan)

    # ------------------------------------------------------------------ Lightning's calls during a batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._program is not None and self._session is not None
        if self._gradients is not None:
            self._gradients.record_loss_scale()
        if (window := self._session.window) is not None:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            loop = trainer.fit_loop.epoch_loop
            window.is_last = not is_accumulating(loop)
            if loop.batch_idx % trainer.accumulate_grad_batches == 0:
                window.drop()  # Lightning clears the dense gradients here, too, if an earlier window has no end
        ctx = self._program.set_training_step(partial(super().training_step, *args, **kwargs))
        self._program.pipeline.run_until(self._program.forward)
        output = ctx.output
        if output is None and self.world_size > 1:
            # Lightning refuses None on several ranks, because DDP would wait forever for the rank's gradients. Here the
            # rank sends zero gradients. The returned loss satisfies Lightning; no backward runs from it.
            return torch.zeros((), device=self.root_device, requires_grad=True)
        return output

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        module, precision = self.lightning_module, self.precision_plugin
        assert self._program is not None and module is not None
        self.pre_backward(closure_loss)
        scaled = precision.pre_backward(closure_loss, module)
        self._program.run_backward(lambda: precision.backward(scaled, module, optimizer, *args, **kwargs))
        # After the tasks of backward, so that on_after_backward sees gradients averaged over ranks.
        detached = precision.post_backward(scaled, module)
        self.post_backward(detached)
        return detached

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        program, gradients = self._program, self._gradients
        assert program is not None and self._rates is not None

        def closure_and_open_step() -> Any:
            result = closure()
            program.begin_step_task()
            if gradients is not None:
                gradients.report_overflow(optimizer)
                if gradients.scaler_has_no_dense_gradients(optimizer):
                    return None  # Lightning treats None as a batch without a loss
            return result

        if gradients is None:
            output = super().optimizer_step(optimizer, closure_and_open_step, model, **kwargs)
        else:
            with gradients.skipping_tables_if_step_skipped(optimizer):
                output = super().optimizer_step(optimizer, closure_and_open_step, model, **kwargs)
        program.end_step_task()
        self._rates.step()
        return output

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
        return self._evaluation.run_step(step)

    @contextmanager
    def announce_collectives_to_ranks(
        self, coordinator: UnevenBatchCoordinator, step: str
    ) -> Generator[None, None, None]:
        """Context in which lookups and reductions of an evaluation step are announced to *coordinator*."""
        assert self._evaluation is not None
        with (
            super().announce_collectives_to_ranks(coordinator, step),
            self._evaluation.announce_lookups_to_ranks(coordinator, step),
        ):
            yield

    def join_collective_of_other_rank(self, action: str, payload: Any) -> None:
        """Take part with empty input in a collective that another rank has announced."""
        if action.startswith(LOOKUP):
            assert self._evaluation is not None
            self._evaluation.join_lookup_of_other_rank(payload)
        else:
            super().join_collective_of_other_rank(action, payload)

    # ------------------------------------------------------------------ begin and end of training and evaluations

    def on_train_start(self) -> None:
        assert self._evaluation is not None
        self._evaluation.check_no_existing_rows()
        super().on_train_start()
        for rows in self.sharded_model.dynamic_rows.values():
            rows.saves = self._saves

    def on_validation_start(self) -> None:
        assert self._evaluation is not None
        self._evaluation.sync_buffers_and_replicas()

    on_test_start = on_predict_start = on_validation_start

    def on_train_end(self) -> None:
        super().on_train_end()
        # Otherwise the final buffers of ranks would depend on the points at which checkpoints were written.
        self.sharded_model.broadcast_buffers()
        self.sharded_model.sync_replicas()
        if self.sharded_model.dynamic_rows:
            self.sharded_model.commit_rows()

    # ------------------------------------------------------------------ checkpoints

    def _warm_start_from_checkpoint(self, path: Any) -> None:
        """Read ``init_from``, unless a checkpoint is resumed or the module has had its initial values before."""
        assert self.lightning_module is not None
        pending = get_pending_warm_start(self.lightning_module)
        if pending is not None and not path:
            start_from_checkpoint(pending, self.sharded_model, self._weights_only)
            mark_warm_started(self.lightning_module)
        elif self._init_from is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            reason = f"the run resumes from {str(path)!r}" if path else "the module has been used before"
            rank_zero_info(f"init_from={self._init_from.path!r} is not read, since {reason}")

    def finish_saves(self) -> None:
        try:
            super().finish_saves()
        finally:
            for rows in self._sharded.dynamic_rows.values() if self._sharded is not None else ():
                rows.saves = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint folder, to which every rank writes its own shards (``torch.distributed.checkpoint``)."""
        path = self._agreed_path(filepath, storage_options)
        if self._rates is not None and self._rates.schedule is not None:
            checkpoint["sparse_lr_scheduler"] = self._rates.schedule.state_dict()
        self.sharded_model.broadcast_buffers()  # in place, so the buffers in the state dict are updated too
        if self._averages is not None:
            self._averages.add_to_checkpoint(checkpoint)
        save_sharded_checkpoint(checkpoint, path, self.sharded_model, self._write_folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder that :meth:`save_checkpoint` wrote on any number of ranks."""
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        checkpoint = load_sharded_checkpoint(
            checkpoint_path,
            self.sharded_model,
            with_optimizers=fitting,
            strict=module.strict_loading,
            weights_only=self._resolve_weights_only(weights_only),
            averages=self._averages,
        )
        schedule = None if self._rates is None else self._rates.schedule
        if fitting and schedule is not None and "sparse_lr_scheduler" in checkpoint:
            schedule.load_state_dict(checkpoint["sparse_lr_scheduler"])
        mark_warm_started(module)
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.sharded_model.drop_dynamic_entries(self.sharded_model.dmp.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has already filled the module's tensors."""

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None and self._rates is not None:
            for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
                search = callback.optimal_lr if isinstance(callback, LearningRateFinder) else None
                if search is not None and (rate := search.suggestion()) is not None:
                    self._rates.record_found_lr(rate)
        for part in (self._program, self._evaluation, self._session):
            if part is not None:
                part.close()
        self._program = self._evaluation = self._session = None
        if module is not None and (batch_norm := get_layer_sync_plugin(self)) is not None:
            batch_norm.revert(module)
        super().teardown()
