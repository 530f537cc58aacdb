"""The strategy for recommenders sharded by TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import ClusterEnvironment, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipe.engine import (
    IterContext,
    PipelinePlan,
    ProfileResult,
    SetupError,
    SWPipeline,
    TaskSpan,
)
from lightning_pipe.engine.plans.flags import check_flags
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.exchanges import exchanging
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.loops import EvaluationProgram, PipelineTrainingEpochLoop, TrainingProgram
from lightning_pipe.loops.data.batch_source import Uneven
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.loops.programs.auto_program import AutoProgram, PlanChoice
from lightning_pipe.loops.programs.default_program import default_evaluation
from lightning_pipe.loops.turns import Turn, UnevenEvaluation
from lightning_pipe.recsys.balancing.balancer import BalanceReport, BatchBalancer, make_balancer
from lightning_pipe.recsys.batches.device_buffers import DeviceBuffers
from lightning_pipe.recsys.batches.transfer import check_movable
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer
from lightning_pipe.recsys.kernels.fused import evaluating, prefetches_set_aside
from lightning_pipe.recsys.kernels.kernel_calls import check_tables_wait
from lightning_pipe.recsys.kernels.loss_check import check_finite_loss
from lightning_pipe.recsys.kernels.optimizers import base_learning_rate, learning_rate_factor, take_tables_out
from lightning_pipe.recsys.kernels.table_schedule import TableSchedule
from lightning_pipe.recsys.modules.ids_on_wire import IdsOnWire, check_ids_on_wire
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms
from lightning_pipe.recsys.plans.named import evaluation_plan, looks_ahead, needs_input_group, recsys_plan
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.sharding.replicas import refuse_norm
from lightning_pipe.recsys.sharding.shard import ShardedModel
from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, propose_plans
from lightning_pipe.recsys.tasks.training import RecsysActions, recsys_tasks
from lightning_pipe.strategies.auto import AUTO, IN_FLIGHT, exploration_of, refuse_without_auto, tell_choice
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy
from lightning_pipe.strategies.recommender.shard_once import shard_once
from lightning_pipe.strategies.recommender.sharded_checkpoint import load_sharded_checkpoint, save_sharded_checkpoint
from lightning_pipe.strategies.recommender.table_gradients import TableGradients
from lightning_pipe.strategies.recommender.table_profile import Profiled, profile_tables
from lightning_pipe.strategies.refusals import (
    clips_gradients,
    loss_scaler,
    refuse_other_precision,
    refuse_scaled_fp16,
    refuse_training,
)
from lightning_pipe.strategies.running import Running

_log = pl.utilities.rank_zero.rank_zero_info
_log_names = pl.utilities.rank_zero.rank_zero_debug


# Prefix of the announced name of a lookup; the name of the sharded module follows.
_LOOKUP = "lookup in "


class RecsysPipelineStrategy(FolderCheckpointStrategy):
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
    sparse optimiser, plan of sharding, constraints or topology is refused.

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
        rewrite: how the inputs of sharded modules are found in a batch: ``"record"`` (the first batch trains alone,
            with recorders on), ``"direct"`` (by keys), ``"fx"`` (by tracing ``training_step``), or ``"auto"`` (each in
            turn).
        sharding_plan: a TorchRec ``ShardingPlan`` to use as it is, instead of the planner's.
        constraints: the planner's constraints, table name to ``sharding_types``, ``compute_kernels`` and the like.
        topology: the planner's topology: ``hbm_cap``, ``ddr_cap``, ``local_world_size`` and the like.
        replicas: into how many groups of neighbouring ranks to divide all ranks, each of which shards all tables (2D
            parallelism); 1 where it is None. An all-to-all then goes over the ranks of a group, and the tables, and
            their optimisers' states, are averaged over groups. It refuses dynamic tables, tables sharded
            ``table_row_wise``, ``grid_shard`` or ``data_parallel``, and clipping.
        sync_every: how many steps of the tables there are between two averages of replicas; 1 where it is None. With
            more, groups train apart for so long, and are averaged also before validation, test, prediction and
            checkpoints, and when training ends; plans that look batches up ahead are refused.
        quantized_comms: what embeddings and their gradients are on their way between ranks: ``forward`` and
            ``backward``, each ``fp32``, ``fp16``, ``bf16`` or ``int8``, and options; see
            :class:`~lightning_pipe.recsys.modules.quantized_comms.QuantizedComms`.
        ids_on_wire: what ids are on theirs: ``"int64"``; ``"auto"``, int32 for each module whose tables have rows that
            few; or ``"int32"``, which refuses a module with a larger table.
        validate_ids: check that every id is inside its table before the lookup; costs a pass over the ids.
        detect_nan: check the loss on all ranks together; costs a small all-reduce and, on a GPU, a synchronisation.
        balancer: exchange samples between ranks in training, so that all have about as much to do: ``True``, or the
            arguments of :class:`~lightning_pipe.recsys.balancing.balancer.BatchBalancer`, or one of these. What it does
            for the batches is in :attr:`balance_report`.
        copy_in_place: copy batches into device memory of batches that nobody holds any more, in place of asking the
            allocator for each; see :class:`~lightning_pipe.recsys.batches.device_buffers.DeviceBuffers`.
        free_features_early: let go of a batch's ids and weights once the input dist has sent them, where only pipelined
            sharded modules are fed by them. Steps, hooks and callbacks may still read keys, lengths and batch sizes; to
            use ids is an error.
        uneven_batches: where some ranks have fewer batches, end the epoch with the ``shortest``, or raise an ``error``.
        uneven_evaluation: where some ranks have fewer batches to validate, test or predict: ``join`` lets them take
            part in the others' lookups, so that each row is evaluated once; such batches are not pipelined. ``error``
            refuses to validate and test, and leaves Lightning's sampler, which repeats rows.
        exploration: of ``"auto"``: ``iterations``, ``rounds``, ``extra_rounds``, ``found`` and ``replan_above`` of
            :class:`~lightning_pipe.loops.programs.auto_program.Exploration`.
        max_in_flight: of ``"auto"``: the most batches in flight, each of which takes its memory.
        save_plan: of ``"auto"``: where to write the plan that was chosen, in YAML, for ``plan`` to name later.
        pipelined_evaluation: validate, test and predict under the same plan, as far as it concerns them; or without,
            for steps that call the sharded modules in another way from batch to batch.
        async_checkpoints: while training, copy what is saved to the host and write it as training goes on. The next
            save, and the end of training, wait for it and raise what went wrong. Costs the memory of the copy.
        accelerator: as Lightning's ``DDPStrategy``, and so are the others.
        parallel_devices: see there.
        cluster_environment: see there.
        precision_plugin: see there.
        process_group_backend: see there.
        timeout: see there.
        start_method: see there.
    """

    evaluates_together = True

    def __init__(
        self,
        plan: str | Path | PipelinePlan = "prefetch",
        *,
        sparse_optimizer: Mapping[str, Any] | None = None,
        sparse_lr_scheduler: Mapping[str, Any] | None = None,
        rewrite: Literal["auto", "record", "direct", "fx"] = "auto",
        sharding_plan: Any = None,
        constraints: Mapping[str, Any] | None = None,
        topology: Mapping[str, Any] | None = None,
        replicas: int | None = None,
        sync_every: int | None = None,
        quantized_comms: Mapping[str, Any] | None = None,
        ids_on_wire: IdsOnWire = "auto",
        validate_ids: bool = False,
        detect_nan: bool = False,
        balancer: bool | Mapping[str, Any] | BatchBalancer | None = None,
        copy_in_place: bool = False,
        free_features_early: bool = False,
        uneven_batches: Uneven = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        exploration: Mapping[str, Any] | None = None,
        max_in_flight: int = IN_FLIGHT,
        save_plan: str | Path | None = None,
        pipelined_evaluation: bool = True,
        async_checkpoints: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            async_checkpoints=async_checkpoints,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        check_flags(
            validate_ids=validate_ids,
            detect_nan=detect_nan,
            copy_in_place=copy_in_place,
            free_features_early=free_features_early,
            pipelined_evaluation=pipelined_evaluation,
            async_checkpoints=async_checkpoints,
        )
        self._take_uneven(uneven_batches, uneven_evaluation)
        # A name that does not exist is said when the strategy is made, not when training begins.
        recsys_plan("serial" if plan == AUTO else plan, recsys_tasks())
        self._quantized_comms = QuantizedComms.from_config(quantized_comms)
        check_ids_on_wire(ids_on_wire)
        refuse_without_auto(plan, exploration, max_in_flight, save_plan)
        self._exploration = exploration_of(exploration)
        self._max_in_flight = max_in_flight
        self._save_plan = save_plan
        self.plan_choice: PlanChoice | None = None
        self._plan = plan
        self._sparse_lr_scheduler_config = sparse_lr_scheduler
        self._method: Literal["auto", "record", "direct", "fx"] = rewrite
        self._ids_on_wire: IdsOnWire = ids_on_wire
        self._validate_ids = validate_ids
        self._detect_nan = detect_nan
        self._balancer = make_balancer(balancer)
        self._copy_in_place = copy_in_place
        self.device_buffers: DeviceBuffers | None = None
        self._free_features_early = free_features_early
        self._pipelined_evaluation = pipelined_evaluation
        self._asked = {
            "sparse_optimizer": sparse_optimizer,
            "sharding_plan": sharding_plan,
            "constraints": constraints,
            "topology": topology,
            "replicas": replicas,
            "sync_every": sync_every,
            "quantized_comms": quantized_comms,
        }
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._input: dist.ProcessGroup | None = None
        self._rows_are_known = False
        self._sharded: ShardedModel | None = None
        self._reducer: DenseGradientReducer | None = None
        self._program: TrainingProgram | None = None
        self._sparse_lr_scheduler: TableSchedule | None = None
        self._table_gradients: TableGradients | None = None
        self._base_learning_rate: float | None = None
        self._rewrite: ModelRewrite | None = None
        self._evaluations: list[EvaluationProgram] = []
        # Rewrites for batches that only some ranks have, by the name of the step.
        self._turn_rewrites: dict[str, ModelRewrite] = {}

    # ------------------------------------------------------------------ set-up

    @property
    def sharded_model(self) -> ShardedModel:
        """The sharded module, its tables and their optimisers; there once the trainer has set the strategy up."""
        if self._sharded is None:
            raise SetupError("the model is not sharded yet; Trainer.fit, validate, test or predict shards it")
        return self._sharded

    @property
    def pipeline(self) -> SWPipeline:
        """The pipeline at work, while ``Trainer.fit`` runs."""
        if self._program is None:
            raise SetupError("there is no pipeline; Trainer.fit makes one when training begins")
        return self._program.pipeline

    @property
    def balance_report(self) -> BalanceReport | None:
        """How uneven the work of ranks was before samples were exchanged, and after; the same on every rank.

        None without a balancer.
        """
        return None if self._balancer is None else self._balancer.report

    def start_trace(self) -> None:
        """Record when and where each task runs from now on."""
        self.pipeline.start_trace()

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the spans in the order in which they ended."""
        return self.pipeline.stop_trace()

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert self.accelerator is not None and module is not None
        self.accelerator.setup(trainer)
        self._leave_loaders_of_one_process(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        refuse_other_precision(self.precision_plugin)
        if fitting:
            refuse_training(trainer, module, self.precision_plugin)
            refuse_scaled_fp16(trainer, self.precision_plugin, self._quantized_comms.backward)
            if self._layer_sync is not None:
                self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self._sharded = shard_once(
            module, self._asked, device=self.root_device, timeout=self._timeout, ranks_per_node=self.num_processes
        )
        self._rows_are_known = False
        self.model_to_device()
        self._evaluate_without_inference_mode(trainer)
        install_evaluation_loops(trainer)
        install_interrupted_saves(trainer)
        if fitting:
            _tell_left_out(self._sharded)
            if clips_gradients(trainer):
                refuse_norm(self._sharded.replicas)
            PipelineTrainingEpochLoop.install(trainer)
            self.setup_optimizers(trainer)
            self._reducer = DenseGradientReducer(self.sharded_model.dense_parameters(), self._group("dense"))
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            names = take_tables_out(optimizer, self.sharded_model.table_parameters())
            if names:
                _log(
                    f"Took {len(names)} table parameter(s) out of {type(optimizer).__name__}'s groups, since the"
                    " tables' own optimiser trains them"
                )
                _log_names(f"Taken out of {type(optimizer).__name__}'s groups: {', '.join(names)}")
            for group in optimizer.param_groups:
                # Where PyTorch's schedulers count from, but for those that step on a metric: the tables follow all.
                group.setdefault("initial_lr", group["lr"])
        if self.optimizers[0].param_groups:  # there are none where configure_optimizers returned nothing
            self._base_learning_rate = base_learning_rate(self.optimizers[0])
        config = self._sparse_lr_scheduler_config
        if config is not None:
            rates = {name: table.learning_rate for name, table in self.sharded_model.tables.items()}
            self._sparse_lr_scheduler = TableSchedule(config, rates)

    def _group(self, name: str) -> dist.ProcessGroup:
        """A process group of all ranks, made at first use: every rank asks in the same order."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = new_group(timeout=self._timeout)
        return group

    def _input_group(self) -> dist.ProcessGroup | None:
        """As :meth:`_group`, of the ranks that the tables are sharded over; None where the tables' own group serves."""
        if "input" not in self._groups:
            plan = None if self._plan == AUTO else recsys_plan(self._plan, recsys_tasks())
            # Ranks with other plans would wait for each other to make a group.
            check_agreement([("name", AUTO)] if plan is None else plan.description(), "plan", dist.group.WORLD)
            replicas = self.sharded_model.replicas
            group = None
            if plan is None or needs_input_group(plan):
                timeout = self._timeout
                group = new_group(timeout=timeout) if replicas is None else replicas.groups.new_shard_group(timeout)
            self._groups["input"] = group
            self._input = None if group is None else exchanging(group)
        return self._input

    def _leave_groups(self) -> None:
        # The user may have left the world, and with it all groups.
        if dist.is_initialized():
            for group in self._groups.values():
                if group is not None:
                    dist.destroy_process_group(group)
        self._groups.clear()
        self._input = None

    def _evaluate_without_inference_mode(self, trainer: pl.Trainer) -> None:
        # FBGEMM's fused lookups have no CPU kernel for inference tensors; no_grad computes the same.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

    # ------------------------------------------------------------------ the program

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build tasks and plan for the sharded module; the training loop asks for it when training begins."""
        module = self.lightning_module
        assert module is not None
        sharded = self.sharded_model
        scaled_late = self._scaled_late(trainer)
        if scaled_late:
            check_tables_wait(sharded.sharded_modules)

        if self._balancer is not None:
            self._balancer.open(self._group("balance"), dist.group.WORLD, self.root_device)
        ahead = self._plan == AUTO or looks_ahead(recsys_plan(self._plan, recsys_tasks()))
        rewrite = self._rewrite = self._make_rewrite(
            "training_step", split_backward=clips_gradients(trainer), look_ahead=ahead
        )
        tables = self._table_gradients = (
            TableGradients(self.precision_plugin, sharded, self.root_device, self._batch_in_training)
            if scaled_late
            else None
        )

        def close() -> None:
            self._rewrite = None
            rewrite.restore()
            if tables is not None:
                tables.close()

        actions = RecsysActions(
            rewrite,
            transfer=self._checked(trainer, transfer),
            loss_of=_lightning_loss,
            reducer=self._reducer,
            before_lookup=self._update_table_learning_rates,
            after_embedding_backward=sharded.step_data_parallel_tables,
            check_loss=(lambda loss: check_finite_loss(loss, self._group("dense"))) if self._detect_nan else None,
            lookup_context=self.precision_plugin.forward_context,
            agree_overflow=loss_scaler(self.precision_plugin) is not None,
            balancer=self._balancer,
            replicas=sharded.replicas,
        )
        tasks = recsys_tasks(actions, scaled_late=scaled_late)
        arguments: dict[str, Any] = {
            "transfer": "H2DAndShuffle",
            "forward": "LossPostprocess",
            "backward": "FinalizeGrads",
            "step": "OptimStep",
            "prepared": None if self._balancer is None else "BalanceFinish",
            "alone": lambda: rewrite.records and not rewrite.resolved,
            "on_close": close,
            "on_give_up": actions.give_up,
        }
        if self._plan == AUTO:
            self._program = AutoProgram(
                hand_written_plans(tasks, on_disk=bool(sharded.dynamic_rows)),
                partial(
                    propose_plans,
                    tasks,
                    max_in_flight=self._max_in_flight,
                    peers=self.world_size > 1,
                    device=self.root_device,
                    keep=self._exploration.found + 3,  # the hand-written ones may be among them
                ),
                self.root_device,
                dist.group.WORLD,
                self._exploration,
                self._plan_chosen,
                **arguments,
            )
            return self._program
        pipeline = SWPipeline(recsys_plan(self._plan, tasks), self.root_device, dist.group.WORLD)
        self._program = TrainingProgram(pipeline, **arguments)
        return self._program

    def _plan_chosen(self, choice: PlanChoice) -> None:
        """Say so, and write it down."""
        self.plan_choice = choice
        if self.global_rank == 0:
            tell_choice(choice, self._save_plan)

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Build tasks and plan for evaluating the batches of one dataloader."""
        module = self.lightning_module
        assert module is not None
        if not self._pipelined_evaluation:
            return default_evaluation(trainer, transfer, step, ahead=0)
        with self._training_set_aside():
            rewrite = self._make_rewrite(step)
            rewrite.detach()

        @contextmanager
        def around() -> Generator[None, None, None]:
            with self._training_set_aside():
                rewrite.attach()
                try:
                    yield
                finally:
                    rewrite.detach()

        actions = RecsysActions(
            rewrite,
            transfer=self._checked(trainer, transfer),
            loss_of=_lightning_loss,
            lookup_context=self.precision_plugin.forward_context,
        )
        # Where the plan is still to be found, the one that runs most ahead.
        found = None if self.plan_choice is None else self.plan_choice.plan
        training = found or recsys_plan("prefetch" if self._plan == AUTO else self._plan, recsys_tasks())
        pipeline = SWPipeline(evaluation_plan(training, recsys_tasks(actions)), self.root_device, dist.group.WORLD)
        program = EvaluationProgram(
            pipeline,
            transfer="H2DAndShuffle",
            forward="DenseForward",
            step="DenseForward",
            alone=lambda: rewrite.records and not rewrite.resolved,
            around=around,
        )
        self._evaluations.append(program)
        return program

    def running(self) -> Running:
        """Answers of this strategy to callbacks."""
        return Running(profile=self.profile)

    def profile(
        self, batches: Sequence[Any], tasks: Sequence[str] | None = None, *, rounds: int = 7, iterations: int = 10
    ) -> ProfileResult:
        """What each task costs an iteration of the present plan, by replaying it. Trains nothing: all is put back.

        ``training_step`` is called, without Lightning's hooks, and what it logs is thrown away; the optimisers step,
        and tables, dense parameters, their optimisers, metrics and random generators are as before. Every rank calls
        this at the same point between two batches, as in a callback's ``on_train_batch_end``. It takes memory on the
        host for a copy of the rank's tables and all else that is trained.

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
        plan, module = self.pipeline.plan, self.lightning_module
        assert module is not None
        of = Profiled(
            trainer=module.trainer,
            module=module,
            sharded=self.sharded_model,
            reducer=self._reducer,
            optimizers=self.optimizers,
            precision=self.precision_plugin,
            rewrite=partial(
                self._make_rewrite,
                "training_step",
                split_backward=clips_gradients(module.trainer),
                look_ahead=looks_ahead(plan),
                free_features_early=False,  # replayed iterations read their batches again
            ),
            before_lookup=self._update_table_learning_rates,
            balancer=self._balancer,
            loss_of=_lightning_loss,
            plan=plan,
            device=self.root_device,
        )
        with self._training_set_aside():
            return profile_tables(of, batches, tasks, rounds, iterations)

    def _make_rewrite(
        self,
        step: str,
        *,
        split_backward: bool = False,
        look_ahead: bool = False,
        free_features_early: bool | None = None,
    ) -> ModelRewrite:
        assert self.lightning_module is not None
        return ModelRewrite(
            self.lightning_module,
            method=self._method,
            step=step,
            input_group=self._input_group(),
            status_group=None if self.sharded_model.replicas is None else self._group("status"),
            agree_group=dist.group.WORLD,
            validate_ids=self._validate_ids,
            ids_on_wire=self._ids_on_wire,
            split_backward=split_backward,
            look_ahead=look_ahead,
            free_features_early=self._free_features_early if free_features_early is None else free_features_early,
        )

    @contextmanager
    def _training_set_aside(self) -> Generator[None, None, None]:
        """In the body the module is as if no batch were in training."""
        rewrite = self._rewrite
        if self._program is not None:
            # A worker may be fetching rows for a batch in training.
            self._program.pipeline.settle()
        with prefetches_set_aside(self.sharded_model.sharded_modules.values()):
            if rewrite is not None:
                rewrite.detach()
            try:
                yield
            finally:
                if rewrite is not None:
                    rewrite.attach()

    def _checked(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """*transfer*, of batches that Lightning can move, where it is Lightning that moves them."""
        holders = (self.lightning_module, getattr(trainer, "datamodule", None))
        if self._copy_in_place:
            self.device_buffers = self.device_buffers or DeviceBuffers(self.root_device)
            transfer = self.device_buffers.filled_by(transfer)
        if any(one is not None and is_overridden("transfer_batch_to_device", one) for one in holders):
            return transfer

        def move(batch: Any) -> Any:
            check_movable(batch)
            return transfer(batch)

        return move

    def _batch_in_training(self) -> IterContext | None:
        return None if self._program is None else self._program.current

    def _scaled_late(self, trainer: pl.Trainer) -> bool:
        """Whether what becomes of the tables' gradients is known only in the optimiser step."""
        return clips_gradients(trainer) or loss_scaler(self.precision_plugin) is not None

    def _update_table_learning_rates(self) -> None:
        if self._sparse_lr_scheduler is not None:
            self.sharded_model.set_learning_rates(self._sparse_lr_scheduler.learning_rates())
        elif self.optimizers[0].param_groups:  # there are none where configure_optimizers returned nothing
            self.sharded_model.set_learning_rate_factor(
                learning_rate_factor(self.optimizers[0], self._base_learning_rate)
            )

    # ------------------------------------------------------------------ Lightning's calls during a batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._program is not None
        step = super().training_step
        if self._table_gradients is not None:
            self._table_gradients.begin()
        output = self._program.run_forward(lambda: step(*args, **kwargs))
        if output is None and self.world_size > 1:
            # Lightning refuses this among several ranks, where DDP would wait for ever for the rank's gradients. Here
            # the rank sends zeros; the loss is for Lightning, nothing runs backward from it.
            return torch.zeros((), device=self.root_device, requires_grad=True)
        return output

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        assert self._program is not None and self.lightning_module is not None
        module, precision = self.lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)
        scaled = precision.pre_backward(closure_loss, module)
        self._program.run_backward(lambda: precision.backward(scaled, module, optimizer, *args, **kwargs))
        # After the tasks of backward, so that on_after_backward sees gradients averaged over ranks.
        detached = precision.post_backward(scaled, module)
        self.post_backward(detached)
        return detached

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        program, tables = self._program, self._table_gradients
        assert program is not None

        def closure_and_open_step() -> Any:
            result = closure()
            program.begin_step()
            if tables is not None:
                tables.after_backward(optimizer)
                if tables.leave_scaler_alone(optimizer):
                    return None  # which Lightning takes for a batch without a loss
            return result

        with nullcontext() if tables is None else tables.stepping(optimizer):
            output = super().optimizer_step(optimizer, closure_and_open_step, model, **kwargs)
        program.end_step()
        if self._sparse_lr_scheduler is not None:
            self._sparse_lr_scheduler.step()
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients accumulate on this rank, without being averaged, in the body."""
        assert self._reducer is not None
        with self._reducer.no_sync():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(partial(super().validation_step, *args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(partial(super().test_step, *args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(partial(super().predict_step, *args, **kwargs))

    def _evaluate(self, step: Callable[[], Any]) -> Any:
        for program in self._evaluations:
            if program.current is not None and not program.steps_whole_batch:
                return program.run_forward(step)
        # Lookups of the sharded modules' own forwards: those of training leave the counters to the rewrite.
        with nullcontext() if torch.is_grad_enabled() else evaluating(self.sharded_model.sharded_modules.values()):
            return step()

    def on_train_start(self) -> None:
        self._refuse_existing_rows()
        super().on_train_start()

    def on_validation_start(self) -> None:
        self._evaluate_one_model()

    def on_test_start(self) -> None:
        self._evaluate_one_model()

    def on_predict_start(self) -> None:
        self._evaluate_one_model()

    @contextmanager
    def in_turn(self, turn: Turn, step: str) -> Generator[None, None, None]:
        """Context in which lookups and sums of an evaluation step are announced to *turn*."""
        with super().in_turn(turn, step), self._training_set_aside():
            if step not in self._turn_rewrites:
                self._turn_rewrites[step] = self._make_rewrite(step)
            rewrite = self._turn_rewrites[step]
            rewrite.announce = lambda announced: turn.call(f"{_LOOKUP}{announced[0]}", announced)
            rewrite.attach()
            try:
                yield
            finally:
                rewrite.detach()

    def join_evaluation(self, what: str, detail: Any) -> None:
        """Start another rank's lookup with empty features."""
        if not what.startswith(_LOOKUP):
            super().join_evaluation(what, detail)
            return
        rewrite = next(one for one in self._turn_rewrites.values() if one.attached)
        with self.precision_plugin.forward_context():
            rewrite.join(detail)

    def _evaluate_one_model(self) -> None:
        """What ranks, or replicas, have each for themselves becomes the same on all."""
        self._refuse_existing_rows()
        self.sharded_model.share_buffers()
        self.sharded_model.sync_replicas()

    def _refuse_existing_rows(self) -> None:
        """Before a batch is fetched, and behind what may have replaced them: a checkpoint, and the user's hooks."""
        known, self._rows_are_known = self._rows_are_known, True
        modules = self.sharded_model.dynamic_rows.values()

        def refuse() -> None:
            for rows in modules:
                rows.refuse_existing()

        if modules and not known:
            on_all_ranks(refuse, "rows of an earlier run cannot be used")

    def on_train_end(self) -> None:
        super().on_train_end()
        # Or other ranks would end with buffers that depend on where checkpoints were written.
        self.sharded_model.share_buffers()
        self.sharded_model.sync_replicas()
        if self.sharded_model.dynamic_rows:
            self.sharded_model.commit_rows()

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a folder that every rank writes its own shards into (``torch.distributed.checkpoint``)."""
        path = self._agreed_path(filepath, storage_options)
        if self._sparse_lr_scheduler is not None:
            checkpoint["sparse_lr_scheduler"] = self._sparse_lr_scheduler.state_dict()
        self.sharded_model.share_buffers()  # the state dict holds the buffers themselves
        save_sharded_checkpoint(checkpoint, path, self.sharded_model, self._write_folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder that :meth:`save_checkpoint` wrote, on any number of ranks."""
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        checkpoint = load_sharded_checkpoint(
            checkpoint_path,
            self.sharded_model,
            with_optimizers=fitting,
            strict=module.strict_loading,
            weights_only=self._allowed(weights_only),
        )
        if fitting and self._sparse_lr_scheduler is not None and "sparse_lr_scheduler" in checkpoint:
            self._sparse_lr_scheduler.load_state_dict(checkpoint["sparse_lr_scheduler"])
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.sharded_model.without_dynamic(self.sharded_model.dmp.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do: :meth:`load_checkpoint` has filled the module's own tensors."""

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None
        for evaluation in self._evaluations:
            evaluation.close()
        self._evaluations = []
        self._turn_rewrites = {}
        self._table_gradients = None
        if self._balancer is not None:
            self._balancer.close()
        self.device_buffers = None
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        self._leave_groups()
        module = self.lightning_module
        if module is not None and self._layer_sync is not None:
            self._layer_sync.revert(module)
        # What Lightning's own does, but for the move to the CPU, where the tables' kernels could not follow.
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._note_end()


def _lightning_loss(output: Any) -> torch.Tensor | None:
    """The loss in what ``training_step`` returned; Lightning itself checks its form."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    return output if isinstance(output, torch.Tensor) else None


def _tell_left_out(model: ShardedModel) -> None:
    """Say which arguments of tables' optimisers have the kernel's default and not the class's."""
    tables: dict[tuple[str, str], int] = {}
    for table in model.tables.values():
        optimizer = table.known_optimizer
        for key, (kernels, classes) in optimizer.left_out.items():
            said = optimizer.name, f"{key}={kernels} (the class's default is {classes})"
            tables[said] = tables.get(said, 0) + 1
    if tables:
        values = "; ".join(f"{name} of {count} table(s) with {value}" for (name, value), count in tables.items())
        _log(
            "Arguments left out of apply_optimizer_in_backward have the fused kernel's defaults, as under TorchRec's"
            f" DistributedModelParallel: {values}. Give them to choose"
        )
