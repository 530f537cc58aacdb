"""What the recsys tasks hand to each other in one iteration.

Tested in ``tests/recsys/tasks/test_task_list.py``.
"""

from __future__ import annotations

from torch import Tensor

from lightning_pipe.engine import TrainingContext
from lightning_pipe.recsys.balancing.balancer import Balance
from lightning_pipe.recsys.rewrite.batch_state import Embeddings, Features, Requests, Splits


class RecsysContext(TrainingContext):
    """Context of an iteration of a sharded recommender.

    Attributes:
        transfer_error: what the transfer raised on this rank, for the input dist to raise on all.
        balance: the partition of the samples that ranks are agreeing on; None for a batch that stays as it is.
        splits: the all-to-all of splits that was submitted.
        input_requests: the all-to-alls of lengths and values that were submitted.
        features: the features after the input dist.
        embeddings: what was looked up, and what its backward needs.
        trained: whether the batch is trained; with a step and in grad mode.
        loss: scalar, until the backward; None where the step gave none.
        has_gradients: whether the batch takes part in the optimiser step, on this rank or through a peer.
        tables_skipped: whether the tables are not trained, after an overflow.
        gradient_scale: scalar tensor that multiplies the embeddings' gradients; absent where nothing scales them.
    """

    transfer_error: Exception | None
    balance: Balance | None
    splits: Splits
    input_requests: Requests
    features: Features
    embeddings: Embeddings
    trained: bool
    loss: Tensor | None
    has_gradients: bool
    tables_skipped: bool
    gradient_scale: Tensor
