"""Ranks that differ get one and the same error, and ranks that agree exchange a digest only."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_pipe.engine.common.errors import PlanError, SetupError
from lightning_pipe.engine.ranks.agreement import check_agreement
from tests.distributed import run_ranks

Entries = list[tuple[str, str]]

BASE: Entries = [("name", "base"), ("task Forward", "stage 0"), ("task Backward", "stage 0")]

# What each of three ranks has, by what the case shows.
CASES: dict[str, list[Entries]] = {
    "all the same": [BASE, list(BASE), [*BASE]],
    "all empty": [[], [], []],
    "a value": [BASE, BASE, [BASE[0], ("task Forward", "stage 1"), ("task Backward", "stage 2")]],
    "a name": [BASE, [BASE[0], ("task Loss", "stage 0"), BASE[2]], BASE],
    "fewer": [BASE, BASE[:2], BASE[:2]],
    "more": [BASE[:1], BASE[:1], BASE],
    "cut at another place": [[("ab", "c")], [("a", "bc")], [("ab", "c")]],
}


def errors_of_cases(rank: int, world_size: int) -> tuple[dict[str, str], dict[str, Any]]:
    """The error of each case, and what else was tried."""
    errors = {}
    for name, descriptions in CASES.items():
        try:
            check_agreement(descriptions[rank], "plan", dist.group.WORLD)
        except PlanError as error:
            errors[name] = str(error)
        dist.barrier()
    others: dict[str, Any] = {}
    # Without a group nothing is compared: a collective of one rank alone would hang.
    if rank == 0:
        check_agreement(BASE[:1], "plan", None)
    alone: list[Any] = [dist.new_group([index]) for index in range(world_size)]
    with mock.patch.object(dist, "all_gather", side_effect=AssertionError("a group of one compared")):
        check_agreement(BASE[rank:], "plan", alone[rank])
    pair: Any = dist.new_group([1, 2])
    if rank > 0:
        try:
            check_agreement(BASE[rank:], "list of parameters", pair, error_class=SetupError)
        except SetupError as error:
            others["in a group of two"] = str(error)
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("entries were sent")):
        check_agreement(BASE, "plan", dist.group.WORLD)
    return errors, others


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, str], dict[str, Any]]]:
    return run_ranks(errors_of_cases, 3)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "a value",
            "the plan differs between ranks: rank 0 has 'task Forward' = 'stage 0', but rank 2 has 'task Forward' ="
            " 'stage 1'. Give every rank the same plan",
        ),
        ("a name", "rank 0 has 'task Forward' = 'stage 0', but rank 1 has 'task Loss' = 'stage 0'"),
        ("fewer", "rank 0 has 'task Backward' = 'stage 0', but rank 1 has no more entries"),
        ("more", "rank 0 has no more entries, but rank 2 has 'task Forward' = 'stage 0'"),
        ("cut at another place", "rank 0 has 'ab' = 'c', but rank 1 has 'a' = 'bc'"),
    ],
)
def test_the_first_entry_that_differs_is_named_in_the_same_error_on_every_rank(
    ranks: list[tuple[dict[str, str], dict[str, Any]]], case: str, expected: str
) -> None:
    first, *rest = (errors[case] for errors, _ in ranks)
    assert expected in first
    assert rest == [first, first]


@pytest.mark.parametrize("case", ["all the same", "all empty"])
def test_ranks_that_agree_get_no_error(ranks: list[tuple[dict[str, str], dict[str, Any]]], case: str) -> None:
    assert all(case not in errors for errors, _ in ranks)


def test_ranks_are_counted_within_the_group_and_the_error_is_of_the_class_asked_for(
    ranks: list[tuple[dict[str, str], dict[str, Any]]],
) -> None:
    assert ranks[0][1] == {}
    for _, others in ranks[1:]:
        text = others["in a group of two"]
        assert "list of parameters differs" in text
        assert "rank 0 has 'task Forward' = 'stage 0', but rank 1 has 'task Backward' = 'stage 0'" in text
