"""State that the recsys tasks pass to each other in one iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_pipe.engine import TrainingContext
from lightning_pipe.recsys.rewrite.batch_state import (
    AheadLookup,
    DistributedFeatures,
    DividedFeatures,
    Embeddings,
    PendingFeatures,
    PendingSplits,
)

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import PendingSampleExchange


class RecsysContext(TrainingContext):
    """Context of an iteration of a sharded recommender.

    Attributes:
        transfer_error: error of the transfer on this rank, which the input dist raises on all ranks.
        balance: partition of the samples that ranks are agreeing on; None if samples stay on their ranks.
        splits: the submitted all-to-all of splits.
        input_requests: the submitted all-to-alls of lengths and values.
        features: the features after the input dist.
        divided: rows of the batch that the batch before also has, under a plan that computes ahead.
        ahead: lookups whose other rows are sent already, under such a plan.
        embeddings: outputs of the lookups and the state that their backward needs.
        trained: True if the batch is trained: the context has a step and grad mode is on.
        loss: scalar loss, until the backward; None if the step returned none.
        has_gradients: True if the batch takes part in the optimizer step, on this rank or through a peer.
        tables_skipped: True if the tables are not trained, after an overflow.
        gradient_scale: scalar tensor that multiplies the embeddings' gradients; absent if they are not scaled.
    """

    transfer_error: Exception | None
    balance: PendingSampleExchange | None
    splits: PendingSplits
    input_requests: PendingFeatures
    features: DistributedFeatures
    divided: DividedFeatures
    ahead: dict[str, AheadLookup]
    embeddings: Embeddings
    trained: bool
    loss: Tensor | None
    has_gradients: bool
    tables_skipped: bool
    gradient_scale: Tensor
