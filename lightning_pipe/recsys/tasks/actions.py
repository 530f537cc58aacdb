"""The work of the recsys tasks for one model: one method per task, over the context of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_pipe.engine import InputError, IterContext, SetupError, State
from lightning_pipe.engine.runtime.record_stream import record_stream
from lightning_pipe.engine.runtime.worker import is_worker_thread
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer
from lightning_pipe.recsys.kernels.gradient_norm import clip_dense_grads_by_global_norm
from lightning_pipe.recsys.rewrite.batch_state import Embeddings, PendingFeatures
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.rewrite.table_window import TableGradientAccumulator
from lightning_pipe.recsys.sharding.replicas import ReplicaAverage, refuse_clipping
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.context import RecsysContext
from lightning_pipe.recsys.tasks.replays import RecsysReplayDeclarations

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import BatchBalancer

TABLES = State("tables")
# Rows as they are read by a lookup ahead of the previous batch's update, which must not change them. EmbForward of the
# previous batch "writes" it: all updates of earlier batches precede that task.
ROWS_OF_EARLIER_BATCHES = State("rows_of_earlier_batches")
NEWEST_IDS = State("newest_ids")  # ids of the newest batch, which the next one is compared with
TABLE_LEARNING_RATES = State("table_learning_rates")
DENSE_PARAMETERS = State("dense_parameters")
DENSE_BUFFERS = State("dense_buffers")
DENSE_GRADIENTS = State("dense_gradients")
REPLICA_STEPS = State("replica_steps")  # number of steps since table replicas were last averaged

LookupContext = Callable[[], AbstractContextManager[Any]]

_NOTHING = nullcontext()


@dataclass(frozen=True)
class TableHooks:
    """What is called around lookups and their backward."""

    # Copies the learning rates to the tables; called again at the batch's turn if its lookup ran ahead of it.
    before_lookup: Callable[[], None] | None = None
    after_backward: Callable[[], None] | None = None  # steps the tables that no fused kernel trains
    context: LookupContext | None = None  # of the lookups, such as a precision plugin's
    # Keeps gradients for one step at the end of several batches. Requires a rewrite with a split backward.
    window: TableGradientAccumulator | None = None


class RecsysActions:
    """Actions of the tasks, for one model. One object serves every iteration, whose state is all in its context.

    Args:
        rewrite: the rewritten model.
        transfer: moves a batch to the device.
        training_step: called with the batch, unless the context has another ``training_step`` (callers with hooks set
            one); returns the step's output (default None). With neither, or without grad mode, the batch is not
            trained. All ranks must agree on that.
        loss_of: extracts from a step's output the scalar loss to call ``backward`` on, or None if the output has none.
            With a reducer, a rank without a loss sends zeros, since other ranks may have one. Without a reducer, either
            all ranks have a loss or none has.
        optimizer_step: the dense optimizer's step; None (default) if the caller runs it between ``begin_caller_task``
            and ``end_caller_task``.
        reducer: averages dense gradients over ranks; None (default) if they are averaged elsewhere.
        tables: functions called around lookups and their backward (default None).
        check_loss: called by every rank with the loss or None; raises if the loss cannot be trained (default: no
            check).
        clip: called before the optimizer step with the batch's embeddings; scales the dense gradients and returns the
            scale of the tables' gradients (default: no clipping). Requires tasks with ``scaled_late`` and a rewrite
            with a split backward.
        agree_overflow: True to let ranks agree after each dense backward whether any gradient of the embeddings is
            infinite or NaN (default False); if so, the tables are not trained. For loss scaling.
        balancer: exchanges samples between ranks; opened already (default None: samples stay on their ranks).
        replicas: averages the replicas of the tables; None (default) without replicas.
    """

    def __init__(
        self,
        rewrite: ModelRewrite,
        *,
        transfer: Callable[[Any], Any],
        training_step: Callable[[Any], Any] | None = None,
        loss_of: Callable[[Any], torch.Tensor | None],
        optimizer_step: Callable[[], None] | None = None,
        reducer: DenseGradientReducer | None = None,
        tables: TableHooks | None = None,
        check_loss: Callable[[torch.Tensor | None], None] | None = None,
        clip: Callable[[Embeddings], torch.Tensor] | None = None,
        agree_overflow: bool = False,
        balancer: BatchBalancer | None = None,
        replicas: ReplicaAverage | None = None,
    ) -> None:
        self._rewrite = rewrite
        self._tables_backward = rewrite.tables_backward
        self._transfer = transfer
        self._training_step = training_step
        self._loss_of = loss_of
        self._optimizer_step = optimizer_step
        self._reducer = reducer
        tables = TableHooks() if tables is None else tables
        self._before_lookup = tables.before_lookup
        self._after_embedding_backward = tables.after_backward
        self._lookup_context = tables.context
        self._check_loss = check_loss
        self._clip = clip
        self._agree_overflow = agree_overflow
        self.balancer = balancer
        self.replicas = replicas
        self._window = tables.window
        self.replays = RecsysReplayDeclarations(rewrite, reducer)
        self._tables_in_training = False  # from a batch's DenseForward to its EmbBackward

    @property
    def extra_states_read_by_lookup(self) -> tuple[State, ...]:
        """State besides features and tables that ``EmbForward`` reads, so that it cannot run ahead of its writers.

        Feature processors are dense parameters with gradients from ``EmbBackward``. So are replicated tables that no
        hook trains. A kernel whose calls cannot be repeated keeps the learning rate of its lookup. Replicas that differ
        between two averages are also averaged before validation.
        """
        rewrite = self._rewrite
        reads = () if rewrite.can_look_up_all_ahead else (TABLE_LEARNING_RATES,)
        if self.replicas is not None and self.replicas.groups.sync_every > 1:
            reads = (*reads, REPLICA_STEPS)
        by_optimizer = rewrite.has_replicated_tables and self._after_embedding_backward is None
        return (*reads, DENSE_PARAMETERS) if by_optimizer or not rewrite.sharded_modules_train_only_tables else reads

    def h2d_and_shuffle(self, ctx: RecsysContext) -> None:
        """Move the batch to the device. If samples are balanced, the next two tasks exchange them between ranks."""
        ctx.transfer_error = None
        try:
            loader_batch = ctx.batch
            with self._rewrite.transferring(loader_batch):
                ctx.batch = self._transfer(loader_batch)
            self._rewrite.exclude_loader_features_from_release(loader_batch, ctx.batch)
        except Exception as error:
            if not (self._rewrite.has_other_ranks or is_worker_thread()):
                raise
            # Other ranks would wait for this one. The input dist reports the error, and raises it on all of them. From
            # a worker, the error would end the batch that the main thread trains.
            ctx.transfer_error = error

    def balance_start(self, ctx: RecsysContext) -> None:
        """Submit the all-gather of the samples' workloads; a thread of the balancer computes the partition from it.

        Without grad mode (evaluation) samples stay on their rank, since the step's output belongs to its own samples.
        """
        assert self.balancer is not None
        ctx.balance = None
        if torch.is_grad_enabled():
            record_stream(ctx.batch)
            ctx.balance = self.balancer.start(ctx.batch, ctx.transfer_error)

    def balance_finish(self, ctx: RecsysContext) -> None:
        """Wait for the partition and exchange samples."""
        assert self.balancer is not None
        if ctx.balance is not None:
            record_stream(ctx.batch)
            try:
                ctx.batch = self.balancer.finish(ctx.batch, ctx.balance)
            except Exception as error:  # on the rank of the bad batch, the user's own
                if not is_worker_thread():
                    raise
                ctx.transfer_error = error  # for the input dist
        del ctx.balance

    def emb_input_dist_start(self, ctx: RecsysContext) -> None:
        """Permute the features and submit one all-to-all of splits for all modules."""
        record_stream(ctx.batch)
        ctx.splits = self._rewrite.start_input_dist(ctx.batch, ctx.transfer_error)

    def emb_input_dist_wait(self, ctx: RecsysContext) -> None:
        """Wait for the splits and submit the all-to-all of lengths and values."""
        try:
            ctx.input_requests = self._rewrite.wait_splits(ctx.splits)
        except Exception as error:  # on the rank of the bad batch, the user's own
            if not is_worker_thread():
                raise
            # The main threads of all ranks must raise it at one point, or some would wait for a rank that has stopped.
            ctx.input_requests = PendingFeatures(ctx.splits.inputs, {}, error)
        del ctx.splits

    def emb_prefetch(self, ctx: RecsysContext) -> None:
        """Wait for lengths and values; prefetch rows into the cache of modules that have one."""
        ctx.features = self._rewrite.wait_inputs(ctx.input_requests)
        del ctx.input_requests

    def emb_overlap(self, ctx: RecsysContext) -> None:
        """Find the rows that the batch before has, too, and tell the ranks that will receive them."""
        ctx.divided = self._rewrite.divide_lookups(ctx.features)

    def emb_forward_ahead(self, ctx: RecsysContext) -> None:
        """Look up the batch and send the rows that the batch before does not have, while that batch trains."""
        divided = ctx.pop("divided")
        if not self._tables_in_training:
            self._apply_learning_rates()
        with self._lookup_context() if self._lookup_context else _NOTHING, torch.enable_grad():
            ctx.ahead = self._rewrite.look_up_ahead(ctx.features, divided)

    def emb_forward(self, ctx: RecsysContext) -> None:
        """Look up the rows and exchange the outputs; the only wait is for that exchange.

        After ``EmbForwardAhead``, only the rows that are not sent yet. Raises an error of the batch that a worker
        thread has found.
        """
        ahead = self._rewrite.looks_ahead
        if not self._tables_in_training:
            self._apply_learning_rates()
        # It is only known later whether the batch will be trained. If it is not, the lookup's step count is undone.
        with self._lookup_context() if self._lookup_context else _NOTHING, torch.enable_grad() if ahead else _NOTHING:
            ctx.embeddings = self._rewrite.look_up_embeddings(ctx.features, ctx.pop("ahead"))
        del ctx.features

    def dense_forward(self, ctx: RecsysContext) -> None:
        """Run the user's step, with the embeddings in place of the sharded modules' calls."""
        record_stream(ctx.batch)
        if self._rewrite.looks_ahead:
            self._apply_learning_rates()
            self._tables_in_training = True
        step = ctx.pop("training_step")
        if step is None and self._training_step is not None:
            step = partial(self._training_step, ctx.batch)
        ctx.output = None
        ctx.trained = step is not None and torch.is_grad_enabled()
        if step is not None:
            with self._rewrite.using_looked_up_embeddings(ctx.embeddings, ctx.batch):
                ctx.output = step()
        ctx.training_step = _completed_step_placeholder

    def loss_postprocess(self, ctx: RecsysContext) -> None:
        """Extract the loss from the step's output and, on request, let all ranks check it together."""
        ctx.loss = self._loss_of(ctx.output) if ctx.trained and ctx.output is not None else None
        if ctx.trained and self._check_loss is not None:
            self._check_loss(ctx.loss)

    def dense_backward(self, ctx: RecsysContext) -> None:
        """Backward of the dense part down to the embeddings, overlapped with the reduction of full gradient buckets."""
        loss, backward = ctx.loss, ctx.pop("run_backward")
        ctx.loss = None
        takes_part = ctx.trained and self._reducer is not None and self._rewrite.has_other_ranks
        ctx.has_gradients = loss is not None or takes_part
        if ctx.has_gradients and self._reducer is not None:
            self._reducer.prepare_for_backward()
        if loss is not None:
            if backward is not None:
                backward()
            else:
                loss.backward()
        ctx.tables_skipped = (
            self._agree_overflow and ctx.has_gradients and self._tables_backward.overflowed(ctx.embeddings)
        )
        if ctx.has_gradients and self._rewrite.splits_backward:
            # The output dists' part of EmbBackward runs here, so that it overlaps with the reduction of dense
            # gradients.
            try:
                self._tables_backward.run_to_kernels(ctx.embeddings, self._rewrite.skips_unused_in_backward)
            except RuntimeError as error:
                _refuse_uneven_rows(error)
                raise
        if self._window is not None:
            self._accumulate_table_gradients(self._window, ctx)

    def _accumulate_table_gradients(self, window: TableGradientAccumulator, ctx: RecsysContext) -> None:
        """Leave the tables' step of this batch to the last batch of the window, or complete the window."""
        if window.is_last:
            ctx.tables_skipped |= window.take_overflow()
            if ctx.has_gradients or window:  # a batch without a loss ends a window as well
                window.complete(ctx.embeddings)
                ctx.has_gradients = True
        elif ctx.has_gradients:
            if ctx.tables_skipped:
                window.note_overflow()
            else:
                window.add(ctx.embeddings)
            ctx.has_gradients = False  # the step is the last batch's

    def emb_backward(self, ctx: RecsysContext) -> None:
        """Backward of the lookups from the gradients of their outputs; fused optimizers step inside."""
        if ctx.tables_skipped or not ctx.has_gradients:
            self._tables_backward.discard(ctx.embeddings)
        else:
            try:
                self._rewrite.run_embedding_backward(
                    ctx.embeddings,
                    scale=ctx.gradient_scale if ctx.has("gradient_scale") else None,
                    agree_unused=self._rewrite.skips_unused_in_backward,
                )
            except RuntimeError as error:
                _refuse_uneven_rows(error)
                raise
            if self._after_embedding_backward is not None:
                self._after_embedding_backward()
        self._tables_in_training = False
        del ctx.embeddings

    def sync_replicas(self, ctx: RecsysContext) -> None:
        """Average the replicas of the tables if the average is due."""
        assert self.replicas is not None
        if ctx.has_gradients and not ctx.tables_skipped:
            self.replicas.step()

    def finalize_grads(self, ctx: RecsysContext) -> None:
        """Wait until the dense gradients are averaged over all ranks."""
        if self._reducer is not None and ctx.has_gradients:
            self._reducer.finalize()

    def optim_step(self, ctx: RecsysContext) -> None:
        """Step the dense optimizer, unless the caller steps it or the batch has no gradients."""
        if not ctx.has_gradients:
            return
        if self._clip is not None:
            ctx.gradient_scale = self._clip(ctx.embeddings)
        if self._optimizer_step is not None:
            self._optimizer_step()

    def abandon(self, contexts: Iterable[IterContext]) -> None:
        """Undo the lookups of batches that will not be trained, since the tables' optimizers may have counted them."""
        for ctx in contexts:
            if (embeddings := ctx.pop("embeddings")) is not None:
                self._tables_backward.discard(embeddings)
            if (ahead := ctx.pop("ahead")) is not None:
                self._rewrite.discard_ahead(ahead)
        self._tables_in_training = False

    def _apply_learning_rates(self) -> None:
        if self._before_lookup is not None:
            self._before_lookup()


def make_clip_function(model: ShardedModel, max_norm: float) -> Callable[[Embeddings], torch.Tensor]:
    """Function that scales the gradients of a batch down to a norm of at most *max_norm*."""
    if not max_norm > 0:
        raise SetupError(f"max_norm must be a number above 0, or None for no clipping, got {max_norm!r}")
    refuse_clipping(model.replicas)
    dense = [parameter for _, parameter in model.dense_parameters()]

    def clip(embeddings: Embeddings) -> torch.Tensor:
        assert embeddings.kernel_gradients is not None
        return clip_dense_grads_by_global_norm(dense, model.table_gradient_norm(embeddings.kernel_gradients), max_norm)

    return clip


def _refuse_uneven_rows(error: RuntimeError) -> None:
    if "invalid tensor size" in str(error):  # of Gloo's all-gather
        raise InputError(
            "The batches of this step must have the same number of rows on every rank, because Gloo cannot exchange the"
            " gradients of tables that are sharded by rows otherwise; got different numbers. Use drop_last=True, or"
            " shard these tables table_wise or column_wise (constraints)."
        ) from error


def _completed_step_placeholder() -> None:
    """Placeholder for a step that has run: it tells the caller so, and lets the batch be freed."""
