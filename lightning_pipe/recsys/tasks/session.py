"""Assembles the parts that training and evaluation of one sharded model share.

RecsysSession ── process groups ── input dist, dense gradients, balancer, statuses of ranks
     │
     ├── training      rewrite + reducer + balancer + replicas ──► tasks
     ├── profiling     another rewrite, training suspended ──────► tasks (for a profile)
     └── evaluations   one rewrite each ─────────────────────────► tasks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe._compat.torchrec import cached_tables
from lightning_pipe.engine import PipelinePlan, PipelineTask, SetupError, SWPipeline
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.gloo_all_to_all import is_multi_host_gloo_group, wrap_full_duplex_group
from lightning_pipe.engine.ranks.loss_check import check_finite_loss
from lightning_pipe.engine.ranks.object_collectives import all_reduce_any
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.engine.ranks.tensors_at_exit import keep_tensors_alive_at_exit
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer
from lightning_pipe.recsys.kernels.fused_kernels import (
    clear_prefetches,
    find_fused_kernels,
    hide_prefetch_queues_of_modules,
    preserve_pending_lookups,
)
from lightning_pipe.recsys.plans.recsys_plans import (
    divides_lookups,
    looks_up_embeddings_ahead,
    needs_input_dist_process_group,
    plan_supports_cached_tables,
    runs_input_on_worker,
)
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.rewrite.table_window import TableGradientAccumulator
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.actions import TABLES, LookupContext, RecsysActions, TableHooks
from lightning_pipe.recsys.tasks.declarations import RecsysTask
from lightning_pipe.recsys.tasks.options import SessionOptions
from lightning_pipe.recsys.tasks.task_list import recsys_tasks

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import BatchBalancer

Transfer = Callable[[Any], Any]


class RecsysSession:
    """Builds and holds the shared parts of the training and the evaluations of one sharded model, until it is closed.

    Process groups are made at first use, so every rank makes the same calls in the same order.
    """

    def __init__(
        self,
        model: nn.Module | ShardedModel,
        plan: PipelinePlan | None,
        device: torch.device,
        options: SessionOptions,
        *,
        balancer: BatchBalancer | None = None,
        extra_tasks: Mapping[str, RecsysTask] | None = None,
        input_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self.world is not None:
            keep_tensors_alive_at_exit()
        self.device = device
        self.module: nn.Module = model.module if isinstance(model, ShardedModel) else model
        self._sharded = model if isinstance(model, ShardedModel) else None
        self._replicas = None if self._sharded is None else self._sharded.replicas
        self._plan = plan
        self.options = options
        self._balancer = balancer
        self._extra_tasks = extra_tasks
        self._undo = ExitStack()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._input_group = input_group
        self._input_group_known = input_group is not None
        self._output_group: dist.ProcessGroup | None = None
        self._output_group_known = False
        self._bring_rates: Callable[[], None] | None = None
        self._actions: RecsysActions | None = None
        self.reducer: DenseGradientReducer | None = None  # in training, unless the model's wrapper averages gradients
        self.rewrite: ModelRewrite | None = None  # in training
        self.window: TableGradientAccumulator | None = None  # in a training that accumulates the gradients of tables

    @property
    def sharded_model(self) -> ShardedModel:
        """The result of ``shard_model``, in sessions that were built with one."""
        assert self._sharded is not None, "the module was sharded elsewhere"
        return self._sharded

    # ------------------------------------------------------------------ training

    def create_dense_gradient_reducer(self, bring_rates: Callable[[], None] | None) -> None:
        """Prepare the averaging of dense gradients. Every rank calls this method."""
        self._bring_rates = bring_rates
        if self._sharded is not None:
            self._sharded.refuse_untrainable_tables()
            # Not the input group: the input dists of later batches overlap with the reduction of gradients.
            self.reducer = DenseGradientReducer(self._sharded.dense_parameters(), self._group("dense"))
            self._undo.callback(self.reducer.close)

    def training_tasks(
        self,
        step: str,
        *,
        transfer: Transfer,
        clipped: bool = False,
        loss_scaled: bool = False,
        accumulates: bool = False,
        **actions: Any,
    ) -> list[PipelineTask]:
        """Rewrite the model and build its tasks, after :meth:`create_dense_gradient_reducer`. Every rank calls it."""
        if self._balancer is not None:
            self._balancer.attach_to_process_group(None if self.world is None else self._group("balance"), self.device)
            self._undo.callback(self._balancer.close)
        ahead = self._plan is None or looks_up_embeddings_ahead(self._plan)
        divide = self._plan is None or divides_lookups(self._plan)
        self.rewrite = self.new_rewrite(
            step,
            split_backward=clipped or accumulates,
            look_ahead=ahead,
            divide_lookups=divide,
            undivided_reason=self._find_undivided_reason(accumulates) if divide else "",
        )
        self._undo.callback(self.rewrite.restore)
        self._refuse_wrong_caches(self.rewrite)
        clear_prefetches(
            self.rewrite.sharded_modules.values()
        )  # of an earlier training that ended with batches in flight
        if accumulates:
            self._refuse_caches_with_accumulation(self.rewrite)
            self.window = TableGradientAccumulator(self.rewrite.sharded_modules)
        if self.options.checks.detect_nan:
            group = self.world if self.reducer is None else self._group("dense")
            actions["check_loss"] = partial(check_finite_loss, group=group)
        self._actions = self._training_actions(
            self.rewrite, window=self.window, transfer=transfer, agree_overflow=loss_scaled, **actions
        )
        return recsys_tasks(self._actions, scaled_late=clipped or loss_scaled, divided=divide, extra=self._extra_tasks)

    def _find_undivided_reason(self, accumulates: bool) -> str:
        """Why updates may change rows that the batch before does not have; empty if they do not."""
        writers = [task.name for task in (self._extra_tasks or {}).values() if TABLES in task.writes]
        if writers:
            return f"has tables that the task {', '.join(writers)} writes"
        if self._replicas is not None:
            return "has replicas of its tables, whose averages change rows of other ranks' batches"
        return "accumulates gradients over several batches" if accumulates else ""

    def _refuse_wrong_caches(self, rewrite: ModelRewrite) -> None:
        """Refuse tables with a cache under a plan for which FBGEMM's cache may give old values.

        After a prefetch, it corrects the backward of one lookup, the newest. A prefetch two batches ahead, or a lookup
        before the previous batch's backward, requires more.
        """
        tables = [name for module in rewrite.sharded_modules.values() for name in cached_tables(module)]
        if not tables or self._plan is None or plan_supports_cached_tables(self._plan):
            return
        raise SetupError(
            f"plan {self._plan.name!r} looks up a batch before the backward of the previous batch, or prefetches two"
            f" batches ahead, but tables {', '.join(tables)} have the compute kernel fused_uvm_caching, whose cache"
            " would give old values. Use another plan such as 'prefetch', or the compute kernel fused or fused_uvm."
        )

    def _refuse_caches_with_accumulation(self, rewrite: ModelRewrite) -> None:
        """Refuse windows of tables with a cache: their repeated lookups would move rows that are prefetched already."""
        kernels = (kernel for module in rewrite.sharded_modules.values() for kernel in find_fused_kernels(module))
        if all_reduce_any([any(kernel.lxu_cache_weights.numel() for kernel in kernels)], self.world)[0]:
            raise SetupError(
                "accumulate_tables is 'window', but tables have the compute kernel fused_uvm_caching, whose rows a"
                " repeated lookup would move. Use 'micro_batch', or the compute kernel fused or fused_uvm"
            )

    def undo_lookups_and_prefetches(self, contexts: Any) -> None:
        """Undo the lookups and prefetches of all batches in flight, which will not be trained.

        The workers have finished their tasks.
        """
        if self._actions is not None:
            self._actions.abandon(contexts)
        if self.rewrite is not None:
            clear_prefetches(self.rewrite.sharded_modules.values())

    def restore_model_after_training(self) -> None:
        """Restore the model. The process groups and the reducer stay for another training."""
        rewrite, self.rewrite, self._actions = self.rewrite, None, None
        if self.window is not None:
            self.window.close()
            self.window = None
        if rewrite is not None:
            rewrite.restore()

    @contextmanager
    def suspend_training(self, pipeline: SWPipeline | None) -> Iterator[None]:
        """Context that suspends training: the model is as if no batch were in flight, and these batches stay valid."""
        if pipeline is not None:
            pipeline.wait_for_workers()  # a worker may still prefetch rows for a training batch
        rewrite = self.rewrite
        sharded = (
            self._sharded.sharded_modules if self._sharded is not None else rewrite.sharded_modules if rewrite else {}
        )
        with hide_prefetch_queues_of_modules(sharded.values()), preserve_pending_lookups(sharded.values()):
            if rewrite is not None:
                rewrite.detach()
            try:
                yield
            finally:
                if rewrite is not None:
                    rewrite.attach()

    @contextmanager
    def profiling_tasks(
        self, step: str, plan: PipelinePlan, *, clipped: bool, **actions: Any
    ) -> Iterator[list[PipelineTask]]:
        """Context with tasks that train as the training's tasks do, while that is suspended. Every rank enters it."""
        # Replayed iterations read their batches again, so ids must not be released.
        rewrite = self.new_rewrite(
            step,
            split_backward=clipped,
            look_ahead=looks_up_embeddings_ahead(plan),
            divide_lookups=divides_lookups(plan),
            undivided_reason=self._find_undivided_reason(accumulates=False),
            free_features_early=False,
        )
        report = None if self._balancer is None else self._balancer.report
        try:
            training = self._training_actions(rewrite, **actions)
            yield recsys_tasks(training, scaled_late=clipped, divided=divides_lookups(plan), extra=self._extra_tasks)
        finally:
            rewrite.restore()
            if self._balancer is not None and report is not None:
                self._balancer.report = report

    def _training_actions(
        self,
        rewrite: ModelRewrite,
        lookup_context: LookupContext | None = None,
        window: TableGradientAccumulator | None = None,
        **actions: Any,
    ) -> RecsysActions:
        steps = None if self._sharded is None else self._sharded.step_data_parallel_tables
        return RecsysActions(
            rewrite,
            reducer=self.reducer,
            tables=TableHooks(self._bring_rates, steps, lookup_context, window),
            balancer=self._balancer,
            replicas=self._replicas,
            **actions,
        )

    # ------------------------------------------------------------------ evaluation

    def evaluation_tasks(
        self, step: str, *, transfer: Transfer, lookup_context: LookupContext | None = None, **actions: Any
    ) -> tuple[ModelRewrite, list[PipelineTask]]:
        """Rewrite the model for an evaluation while training is suspended. Every rank calls this method."""
        rewrite = self.new_rewrite(step)
        rewrite.detach()
        tables = TableHooks(context=lookup_context)
        return rewrite, recsys_tasks(
            RecsysActions(rewrite, transfer=transfer, loss_of=_no_loss, tables=tables, **actions)
        )

    def new_rewrite(
        self,
        step: str,
        *,
        split_backward: bool = False,
        look_ahead: bool = False,
        divide_lookups: bool = False,
        undivided_reason: str = "",
        free_features_early: bool | None = None,
    ) -> ModelRewrite:
        """Rewrite the model once more while its current rewrite is detached. Every rank calls this method."""
        early = self.options.memory.free_features_early if free_features_early is None else free_features_early
        return ModelRewrite(
            self.module,
            method=self.options.rewrite.method,
            step=step,
            input_group=self._get_input_dist_process_group(),
            output_group=self._get_output_dist_process_group(),
            status_group=None if self._replicas is None else self._group("status"),
            agree_group=self.world,
            validate_ids=self.options.checks.validate_ids,
            ids_on_wire=self.options.wire.ids,
            split_backward=split_backward,
            look_ahead=look_ahead,
            divide_lookups=divide_lookups,
            undivided_reason=undivided_reason,
            free_features_early=early,
        )

    # ------------------------------------------------------------------ process groups, memory, end

    def _group(self, name: str) -> dist.ProcessGroup:
        """Return the process group *name* of all ranks, made at its first use."""
        if name not in self._groups:
            self._groups[name] = self._destroy_group_at_close(new_group())
        return self._groups[name]

    def _get_input_dist_process_group(self) -> dist.ProcessGroup | None:
        """Return the input dist's group, over the ranks that share the tables; None to use the tables' group."""
        if not self._input_group_known:
            # Ranks with different plans would wait for each other in new_group.
            plan = self._plan
            check_agreement([("name", "auto")] if plan is None else plan.description(), "plan", self.world)
            if self.world is not None and (plan is None or needs_input_dist_process_group(plan)):
                self._input_group = self._new_full_duplex_group()
            self._input_group_known = True
        return self._input_group

    def _get_output_dist_process_group(self) -> dist.ProcessGroup | None:
        """Return a group for full-duplex exchanges of embeddings between machines; None to use the tables' group."""
        if not self._output_group_known:
            self._output_group_known = True
            if self.world is not None and is_multi_host_gloo_group(self.world):
                self._output_group = self._new_full_duplex_group()
        return self._output_group

    def _new_full_duplex_group(self) -> dist.ProcessGroup:
        make = new_group if self._replicas is None else self._replicas.groups.new_shard_group
        return wrap_full_duplex_group(self._destroy_group_at_close(make()))

    def _destroy_group_at_close(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        def destroy_group() -> None:
            # The user may have destroyed the world, and with it all groups, before the session was closed.
            if dist.is_initialized():
                dist.destroy_process_group(group)

        self._undo.callback(destroy_group)
        return group

    def close(self) -> None:
        """Restore the model and leave the process groups. May be called again."""
        self.rewrite = self._actions = None
        self._undo.close()


def next_must_run_serially(rewrite: ModelRewrite, plan: PipelinePlan) -> bool:
    """Return True if the next batch must run alone, with all tasks in serial order in the calling thread.

    The first batch resolves the rewrite, from an observed step or with collectives that only the main thread may call.
    """
    return not rewrite.is_resolved and (rewrite.needs_recording or runs_input_on_worker(plan))


def _no_loss(output: Any) -> None:
    return None
