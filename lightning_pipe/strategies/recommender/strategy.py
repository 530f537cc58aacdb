"""The strategy for recommenders sharded by TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import ClusterEnvironment, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipe.engine import PipelinePlan, ProfileResult, SetupError, SWPipeline, TaskSpan
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.loops import EvaluationProgram, PipelineTrainingEpochLoop, TrainingProgram
from lightning_pipe.loops.data.batch_source import Uneven
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.loops.programs.auto_program import PlanChoice
from lightning_pipe.loops.turns import Turn, UnevenEvaluation
from lightning_pipe.recsys.balancing.balancer import BalanceReport, BatchBalancer, make_balancer
from lightning_pipe.recsys.batches.device_buffers import DeviceBuffers
from lightning_pipe.recsys.batches.transfer import check_movable
from lightning_pipe.recsys.kernels.optimizers import take_tables_out
from lightning_pipe.recsys.kernels.table_schedule import TableSchedule
from lightning_pipe.recsys.modules.ids_on_wire import IdsOnWire
from lightning_pipe.recsys.plans.named import recsys_plan
from lightning_pipe.recsys.sharding.replicas import refuse_norm
from lightning_pipe.recsys.sharding.shard import ShardedModel
from lightning_pipe.recsys.tasks.options import (
    CheckOptions,
    MemoryOptions,
    RewriteOptions,
    ShardingOptions,
    WireOptions,
)
from lightning_pipe.recsys.tasks.session import RecsysSession
from lightning_pipe.recsys.tasks.training import recsys_tasks
from lightning_pipe.strategies.auto import AUTO, AutoOptions, tell_choice
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy
from lightning_pipe.strategies.recommender.evaluation import LOOKUP, TableEvaluation
from lightning_pipe.strategies.recommender.shard_once import shard_once
from lightning_pipe.strategies.recommender.sharded_checkpoint import load_sharded_checkpoint, save_sharded_checkpoint
from lightning_pipe.strategies.recommender.training import TableTraining
from lightning_pipe.strategies.refusals import (
    clips_gradients,
    refuse_other_precision,
    refuse_scaled_fp16,
    refuse_training,
)

_log = pl.utilities.rank_zero.rank_zero_info
_log_names = pl.utilities.rank_zero.rank_zero_debug


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
        max_in_flight: int = AutoOptions.max_in_flight,
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
        self._rewrite = RewriteOptions(rewrite, pipelined_evaluation)
        self._sharding = ShardingOptions(sharding_plan, constraints, topology, replicas, sync_every)
        self._wire = WireOptions(quantized_comms, ids_on_wire)
        self._memory = MemoryOptions(copy_in_place, free_features_early)
        self._checks = CheckOptions(validate_ids, detect_nan)
        self._auto = AutoOptions(exploration, max_in_flight, save_plan)
        self._auto.refuse_without_auto(plan)
        self._take_uneven(uneven_batches, uneven_evaluation)
        # A name that does not exist is said when the strategy is made, not when training begins.
        self._declared = None if plan == AUTO else recsys_plan(plan, recsys_tasks())
        self._plan = plan
        self._sparse_optimizer = sparse_optimizer
        self._sparse_lr_scheduler = sparse_lr_scheduler
        self._balancer = make_balancer(balancer)
        self.plan_choice: PlanChoice | None = None
        self._rows_are_known = False
        self._sharded: ShardedModel | None = None
        self._session: RecsysSession | None = None
        self._training: TableTraining | None = None
        self._evaluation: TableEvaluation | None = None

    # ------------------------------------------------------------------ what runs

    @property
    def sharded_model(self) -> ShardedModel:
        """The sharded module, its tables and their optimisers; there once the trainer has set the strategy up."""
        if self._sharded is None:
            raise SetupError("the model is not sharded yet; Trainer.fit, validate, test or predict shards it")
        return self._sharded

    @property
    def pipeline(self) -> SWPipeline:
        """The pipeline at work, while ``Trainer.fit`` runs."""
        pipeline = self._pipeline_in_training()
        if pipeline is None:
            raise SetupError("there is no pipeline; Trainer.fit makes one when training begins")
        return pipeline

    @property
    def balance_report(self) -> BalanceReport | None:
        """How uneven the work of ranks was before samples were exchanged, and after; the same on every rank.

        None without a balancer.
        """
        return None if self._balancer is None else self._balancer.report

    @property
    def device_buffers(self) -> DeviceBuffers | None:
        """Device memory that batches are copied into, with ``copy_in_place``, while the trainer runs."""
        return None if self._session is None else self._session.device_buffers

    def start_trace(self) -> None:
        """Record when and where each task runs from now on."""
        self.pipeline.start_trace()

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the spans in the order in which they ended."""
        return self.pipeline.stop_trace()

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
        _ = self.pipeline  # says that training has not begun
        assert self._training is not None
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
            refuse_scaled_fp16(trainer, self.precision_plugin, self._wire.comms.backward)
            if self._layer_sync is not None:
                self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self._sharded = self._shard(module)
        self._rows_are_known = False
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # FBGEMM's fused lookups have no CPU kernel for inference tensors; no_grad computes the same.
            loop.inference_mode = False
        install_evaluation_loops(trainer)
        install_interrupted_saves(trainer)
        self._session = RecsysSession(
            self._sharded,
            self._declared,
            self.root_device,
            rewrite=self._rewrite,
            wire=self._wire,
            memory=self._memory,
            checks=self._checks,
            balancer=self._balancer,
            timeout=self._timeout,
        )
        self._evaluation = TableEvaluation(
            self._session,
            self._sharded,
            self.precision_plugin,
            pipelined=self._rewrite.evaluation,
            training=self._pipeline_in_training,
        )
        if fitting:
            _tell_left_out(self._sharded)
            if clips_gradients(trainer):
                refuse_norm(self._sharded.replicas)
            PipelineTrainingEpochLoop.install(trainer)
            self.setup_optimizers(trainer)
            self._training = TableTraining(
                trainer,
                self._session,
                self._sharded,
                lambda: self.optimizers,
                self.precision_plugin,
                plan=self._plan,
                auto=self._auto,
                chosen=self._plan_chosen,
                schedule=self._sparse_lr_scheduler,
            )
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self, module: pl.LightningModule) -> ShardedModel:
        sharding = self._sharding
        asked = {
            "sparse_optimizer": self._sparse_optimizer,
            "sharding_plan": sharding.plan,
            "constraints": sharding.constraints,
            "topology": sharding.topology,
            "replicas": sharding.replicas,
            "sync_every": sharding.sync_every,
            "quantized_comms": self._wire.quantized_comms,
        }
        return shard_once(
            module, asked, device=self.root_device, timeout=self._timeout, ranks_per_node=self.num_processes
        )

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

    # ------------------------------------------------------------------ programs

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build tasks and plan for the sharded module; the training loop asks for it when training begins."""
        assert self._training is not None
        return self._training.build(self._checked(trainer, transfer))

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
        return self._evaluation.build(trainer, self._checked(trainer, transfer), step, plan)

    def _checked(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """*transfer*, of batches that Lightning can move, where it is Lightning that moves them."""
        holders = (self.lightning_module, getattr(trainer, "datamodule", None))
        if any(one is not None and is_overridden("transfer_batch_to_device", one) for one in holders):
            return transfer

        def move(batch: Any) -> Any:
            check_movable(batch)
            return transfer(batch)

        return move

    # ------------------------------------------------------------------ Lightning's calls during a batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._training is not None
        return self._training.forward(partial(super().training_step, *args, **kwargs), self.world_size > 1)

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
        self._refuse_existing_rows()
        super().on_train_start()

    def on_validation_start(self) -> None:
        self._evaluate_one_model()

    def on_test_start(self) -> None:
        self._evaluate_one_model()

    def on_predict_start(self) -> None:
        self._evaluate_one_model()

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
        if (schedule := self._table_schedule()) is not None:
            checkpoint["sparse_lr_scheduler"] = schedule.state_dict()
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
        schedule = self._table_schedule()
        if fitting and schedule is not None and "sparse_lr_scheduler" in checkpoint:
            schedule.load_state_dict(checkpoint["sparse_lr_scheduler"])
        return checkpoint

    def _table_schedule(self) -> TableSchedule | None:
        return None if self._training is None else self._training.rates.schedule

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.sharded_model.without_dynamic(self.sharded_model.dmp.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do: :meth:`load_checkpoint` has filled the module's own tensors."""

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
