"""Declarations of the recsys tasks, each in one place.

The names and the division of an iteration into tasks follow NVIDIA's recsys-examples (``SWSerialTrainPipeline``). Some
tasks are no-ops there; here every task does work, since the embedding part and the dense part each have a forward and a
backward. The tasks are eleven, plus two if samples are balanced between ranks, two if a plan looks up batches in two
parts, and one if tables have replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning_pipe.engine import State
from lightning_pipe.engine.plans.task import DeclaredIO
from lightning_pipe.recsys.plans.recsys_plans import SYNC_REPLICAS
from lightning_pipe.recsys.tasks.actions import (
    DENSE_BUFFERS,
    DENSE_GRADIENTS,
    DENSE_PARAMETERS,
    NEWEST_IDS,
    REPLICA_STEPS,
    ROWS_OF_EARLIER_BATCHES,
    TABLE_LEARNING_RATES,
    TABLES,
    RecsysActions,
)
from lightning_pipe.recsys.tasks.replays import RecsysReplayDeclarations

if TYPE_CHECKING:
    from lightning_pipe.engine.planning.costs import Resource


@dataclass(frozen=True)
class TaskChangesForLateScaling:
    """Changes of a task if gradients are scaled late, that is, in the optimizer step."""

    reads: tuple[str, ...] = ()  # further context fields
    writes: tuple[str, ...] | None = None  # all that the task writes; None for no change
    after_step: bool = False  # True if the task follows the optimizer step


@dataclass(frozen=True)
class RecsysTask:
    """A task of a sharded recommender's training iteration.

    Args:
        name: unique among the tasks.
        action: called with the model's actions and an iteration's
            :class:`~lightning_pipe.recsys.RecsysContext`.
        reads: context fields (strings) and persistent state (``State``) that it reads.
        writes: context fields and persistent state that it writes, in-place changes included.
        model_reads: function of the actions that returns further state which the task reads in some models.
        replay: effects that a replay of the task restores, in addition to tensors of the context.
        not_replayable: reason why it cannot be replayed (default empty: it can).
        needs: feature that a model, or its plan, must have for the task to exist; None for every model.
        device: resource that the task keeps busy on a GPU: compute units or copy engine.
        waited_by: task that waits for this task's messages, possibly the same task; None if it submits none.
        trains: True if the caller runs it between its hooks, or if it reads state that the previous batch has written.
        late: changes if gradients are scaled late, that is, in the optimizer step; None for no change.
        collectives: process groups that it submits collectives to: the input dist's, the tables', the one of dense
            gradients, the balancer's, the replicas', and all ranks' (``world``). A ``training_step`` that calls
            collectives is not included.
    """

    name: str
    action: Callable[[RecsysActions, Any], None]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    model_reads: Callable[[RecsysActions], tuple[State, ...]] | None = None
    replay: Callable[[RecsysReplayDeclarations], tuple[DeclaredIO, ...]] | None = None
    not_replayable: str = ""
    needs: Literal["balancer", "replicas", "division"] | None = None
    device: Resource = "compute"
    waited_by: str | None = None
    trains: bool = False
    late: TaskChangesForLateScaling | None = None
    collectives: tuple[str, ...] = ()


# Tasks in the order of a serial iteration.
TASKS: tuple[RecsysTask, ...] = (
    RecsysTask(
        "H2DAndShuffle",
        RecsysActions.h2d_and_shuffle,
        reads=("batch",),
        writes=("batch", "transfer_error"),
        device="copy",
    ),
    RecsysTask(
        "BalanceStart",
        RecsysActions.balance_start,
        reads=("batch", "transfer_error"),
        writes=("balance",),
        replay=RecsysReplayDeclarations.balance_start,
        needs="balancer",
        waited_by="BalanceFinish",
        collectives=("balance",),
    ),
    RecsysTask(
        "BalanceFinish",
        RecsysActions.balance_finish,
        reads=("batch", "balance"),
        writes=("batch", "balance", "transfer_error"),
        needs="balancer",
        waited_by="BalanceFinish",
        collectives=("balance",),
    ),
    RecsysTask(
        "EmbInputDistStart",
        RecsysActions.emb_input_dist_start,
        reads=("batch", "transfer_error"),
        writes=("splits",),
        replay=RecsysReplayDeclarations.emb_input_dist_start,
        waited_by="EmbInputDistWait",
        collectives=("input",),
    ),
    RecsysTask(
        "EmbInputDistWait",
        RecsysActions.emb_input_dist_wait,
        reads=("splits",),
        writes=("splits", "input_requests"),
        replay=RecsysReplayDeclarations.emb_input_dist_wait,
        waited_by="EmbPrefetch",
        collectives=("input",),
    ),
    RecsysTask(
        "EmbPrefetch",
        RecsysActions.emb_prefetch,
        reads=("input_requests",),
        writes=("input_requests", "features"),
        replay=RecsysReplayDeclarations.emb_prefetch,
    ),
    RecsysTask(
        "EmbOverlap",
        RecsysActions.emb_overlap,
        reads=("features", NEWEST_IDS),
        writes=("divided", NEWEST_IDS),
        replay=RecsysReplayDeclarations.divided_lookup,
        not_replayable="it compares its batch with the batch before",
        needs="division",
        waited_by="EmbForwardAhead",
        collectives=("tables",),
        trains=True,
    ),
    # It reads only rows that EmbBackward of the batch before does not write. All earlier writes precede EmbForward of
    # the batch before.
    RecsysTask(
        "EmbForwardAhead",
        RecsysActions.emb_forward_ahead,
        reads=("features", "divided", ROWS_OF_EARLIER_BATCHES),
        writes=("divided", "ahead"),
        replay=RecsysReplayDeclarations.divided_lookup,
        not_replayable="its rows depend on the batch before",
        needs="division",
        waited_by="EmbForward",
        collectives=("tables",),
        trains=True,
    ),
    RecsysTask(
        "EmbForward",
        RecsysActions.emb_forward,
        reads=("features", "ahead", TABLES),
        writes=("features", "ahead", "embeddings", ROWS_OF_EARLIER_BATCHES),
        model_reads=lambda actions: actions.extra_states_read_by_lookup,
        replay=RecsysReplayDeclarations.emb_forward,
        waited_by="EmbForward",
        collectives=("tables",),
        trains=True,
    ),
    # A step may begin with zero_grad(). From this task on, the tables' learning rates are those of the batch.
    RecsysTask(
        "DenseForward",
        RecsysActions.dense_forward,
        reads=("batch", "embeddings", "training_step", DENSE_PARAMETERS, TABLE_LEARNING_RATES),
        writes=("embeddings", "training_step", "output", "trained", DENSE_BUFFERS, DENSE_GRADIENTS),
        replay=RecsysReplayDeclarations.dense_forward,
        trains=True,
    ),
    RecsysTask(
        "LossPostprocess",
        RecsysActions.loss_postprocess,
        reads=("output", "trained"),
        writes=("loss",),
        collectives=("dense",),
        trains=True,
    ),
    RecsysTask(
        "DenseBackward",
        RecsysActions.dense_backward,
        reads=("loss", "trained", "run_backward", DENSE_PARAMETERS),
        writes=("loss", "run_backward", "embeddings", "has_gradients", "tables_skipped", DENSE_GRADIENTS),
        replay=RecsysReplayDeclarations.dense_backward,
        waited_by="FinalizeGrads",
        collectives=("dense", "tables", "world"),
        trains=True,
    ),
    RecsysTask(
        "EmbBackward",
        RecsysActions.emb_backward,
        reads=("embeddings", "has_gradients", "tables_skipped", "gradient_scale"),
        writes=("embeddings", TABLES, DENSE_GRADIENTS),
        replay=RecsysReplayDeclarations.emb_backward,
        waited_by="EmbBackward",
        collectives=("tables", "world"),
        trains=True,
        late=TaskChangesForLateScaling(writes=("embeddings", TABLES), after_step=True),
    ),
    RecsysTask(
        SYNC_REPLICAS,
        RecsysActions.sync_replicas,
        reads=("has_gradients", "tables_skipped", TABLES),
        writes=(TABLES, REPLICA_STEPS),
        needs="replicas",
        waited_by=SYNC_REPLICAS,
        collectives=("replicas",),
        trains=True,
        late=TaskChangesForLateScaling(after_step=True),
    ),
    RecsysTask(
        "FinalizeGrads",
        RecsysActions.finalize_grads,
        reads=("has_gradients", DENSE_GRADIENTS),
        writes=(DENSE_GRADIENTS,),
        replay=RecsysReplayDeclarations.finalize_grads,
        collectives=("dense",),
        trains=True,
    ),
    RecsysTask(
        "OptimStep",
        RecsysActions.optim_step,
        reads=("has_gradients", DENSE_GRADIENTS),
        writes=(DENSE_GRADIENTS, DENSE_PARAMETERS, TABLE_LEARNING_RATES),
        collectives=("world",),
        trains=True,
        late=TaskChangesForLateScaling(
            reads=("embeddings",),
            writes=(DENSE_GRADIENTS, DENSE_PARAMETERS, TABLE_LEARNING_RATES, "gradient_scale", "tables_skipped"),
        ),
    ),
)
