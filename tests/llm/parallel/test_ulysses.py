"""Attention over cut sequences is that of the whole ones: alone, recomputed, and in pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.llm.attention_cases import (
    CASES,
    Plain,
    Results,
    deviations,
    over_ranks,
    packed,
)

OF_PLAIN: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": True},
    "within itself": {"entered": 2},
    "not entered": {"entered": 0},
}


def on_two_ranks(rank: int, size: int) -> dict[str, Results]:
    found = {name: over_ranks(model_of, batch_of) for name, (model_of, batch_of) in CASES.items()}
    return found | {name: over_ranks(Plain, packed, **options) for name, options in OF_PLAIN.items()}


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Results]:
    return run_ranks(on_two_ranks, 2)[0]


@pytest.mark.parametrize("case", [*CASES, "recomputed", "within itself"])
def test_outputs_and_gradients_over_two_ranks_are_those_of_one_device(two_ranks: dict[str, Results], case: str) -> None:
    assert deviations(*CASES.get(case, (Plain, packed)), two_ranks[case]) == []


def test_without_it_chunks_do_not_see_each_other(two_ranks: dict[str, Results]) -> None:
    differing = deviations(Plain, packed, two_ranks["not entered"])
    assert [one for one in differing if one.startswith("output 0")] != []
