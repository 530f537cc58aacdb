"""The semi-synchronous plan: trained on rows that are one batch stale, exactly one, and as a loop written out does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import InParts, run_ranks
from tests.recsys.pipeline_cases import difference
from tests.recsys.semi_sync_cases import RATES, TRAININGS, Trained, by_hand, by_pipeline
from tests.tiers import sampled


def same(one: Trained, other: Trained) -> bool:
    return not difference(one.values, other.values) and all(map(torch.equal, one.losses, other.losses))


def often(training: str) -> bool:
    return training.startswith("row-wise")


def compare(rank: int, world_size: int, training: str) -> dict[str, dict[str, bool]]:
    """For each schedule of the learning rate, what is to be true of a training."""
    found, case = {}, TRAININGS[training]
    for rates, after_batch in RATES.items():
        stale = by_pipeline(case, after_batch=after_batch, rewrite={"method": "direct"})
        serial = by_pipeline(case, "serial", after_batch)
        found[f"{training}, {rates}"] = {
            "as the loop": same(stale, by_hand(case, after_batch=after_batch)),
            "recorded, as the loop": same(
                by_pipeline(case, after_batch=after_batch), by_hand(case, (0, 1), after_batch)
            ),
            "not as the serial plan": not same(stale, serial),
            "the fused plan is exact": same(by_pipeline(case, "fused_sparse_dist", after_batch), serial),
            "the loop is, without stale batches": same(by_hand(case, range(len(stale.losses)), after_batch), serial),
        }
    return found


@pytest.fixture(scope="module", params=sampled([1, 2], lambda ranks: ranks == 1, "world_{}".format))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, bool]]]:
    parts = InParts(lambda training: run_ranks(compare, request.param, training), lambda key: key.rsplit(", ", 1)[0])
    return parts.of_ranks(request.param)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("training", sampled(TRAININGS, often))
def test_it_trains_on_rows_one_batch_stale_to_the_bit_and_the_others_on_none(
    ranks: list[dict[str, Any]], training: str, rates: str
) -> None:
    for found in ranks:
        assert [what for what, is_true in found[f"{training}, {rates}"].items() if not is_true] == []
