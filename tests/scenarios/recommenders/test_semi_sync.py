"""The semi-synchronous plan: trained on rows that are one batch stale, exactly one, and as a loop written out does."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import difference
from tests.recsys.semi_sync_cases import TRAININGS, Trained, by_hand, by_pipeline, falling


def same(one: Trained, other: Trained) -> bool:
    return not difference(one.values, other.values) and all(map(torch.equal, one.losses, other.losses))


def compare(rank: int, world_size: int, training: str) -> dict[str, bool]:
    """What is to be true of a training whose learning rates fall with every batch."""
    case = TRAININGS[training]
    stale = by_pipeline(case, after_batch=falling, rewrite={"method": "direct"})
    serial = by_pipeline(case, "serial", falling)
    return {
        "as the loop": same(stale, by_hand(case, after_batch=falling)),
        "recorded, as the loop": same(by_pipeline(case, after_batch=falling), by_hand(case, (0, 1), falling)),
        "not as the serial plan": not same(stale, serial),
        "the fused plan is exact": same(by_pipeline(case, "fused_sparse_dist", falling), serial),
        "the loop is, without stale batches": same(by_hand(case, range(len(stale.losses)), falling), serial),
    }


# Each kind of sharding, and each optimizer.
@pytest.mark.parametrize("training", ["SGD, of all kinds", "Adagrad, table_wise", "row-wise Adagrad, row_wise"])
def test_it_trains_on_rows_one_batch_stale_to_the_bit_and_the_others_on_none(training: str) -> None:
    for found in run_ranks(compare, 2, training):
        assert [what for what, is_true in found.items() if not is_true] == []
