"""Contracts with PyTorch's flight recorder: what it records of Gloo, and what its analysis finds in that."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipe._compat.flight_recorder import find_mismatches, process_groups, recorded, turn_on
from lightning_pipe.engine.ranks.process_groups import new_group
from tests.distributed import run_ranks

VERSION = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("torch"))[:2]))
RECORDS = pytest.mark.skipif(VERSION < (2, 14), reason="records of Gloo are known of torch 2.14 and later")


def collectives(rank: int, size: int) -> Any:
    ours: Any = new_group()
    described: Any = dist.new_group(group_desc="described")
    dist.all_reduce(torch.ones(4))
    for group in (ours, described):
        dist.broadcast(torch.ones(2), 0, group=group)
    return recorded(), process_groups()


@pytest.fixture(scope="module")
def of_ranks() -> list[Any]:
    return run_ranks(collectives, 2)


@RECORDS
def test_gloos_collectives_are_recorded_with_group_number_and_sizes(of_ranks: list[Any]) -> None:
    for (entries, completed), groups in of_ranks:
        found = [(one["profiling_name"], one["process_group"], one["collective_seq_id"]) for one in entries]
        names = list(groups)
        assert found == [
            ("gloo:all_reduce", [names[0], "default_pg"], 1),
            ("gloo:broadcast", [names[1], "undefined"], 1),
            ("gloo:broadcast", [names[2], "described"], 1),
        ]
        assert [one["input_sizes"] for one in entries] == [[[4]], [[2]], [[2]]]
        # Gloo's thread counts a collective only after the rank has gone on.
        assert completed.keys() == groups.keys()
        assert set(completed.values()) <= {-1, 1}


def test_all_groups_are_known_with_their_ranks(of_ranks: list[Any]) -> None:
    for _, groups in of_ranks:
        assert [one["ranks"] for one in groups.values()] == [[0, 1]] * 3
        assert [one["desc"] for one in groups.values()] == ["default_pg", "undefined", "described"]


def planted(of_ranks: list[Any], change: Any) -> list[Any]:
    """The mismatches where *change* was made to the records of rank 1."""
    entries = {rank: copy.deepcopy(found[0]) for rank, (found, _) in enumerate(of_ranks)}
    change(entries[1])
    return find_mismatches(entries, {rank: groups for rank, (_, groups) in enumerate(of_ranks)})


@RECORDS
def test_equal_records_have_no_mismatch(of_ranks: list[Any]) -> None:
    assert planted(of_ranks, lambda entries: None) == []


@RECORDS
def test_a_collective_that_a_rank_has_not_started_is_found(of_ranks: list[Any]) -> None:
    (found,) = planted(of_ranks, lambda entries: entries.pop())
    assert (found.missing_ranks, found.expected_ranks, found.collective_seq_id) == ({1}, {0, 1}, 1)
    assert found.collective_name == "gloo:broadcast"
    assert found.pg_desc.endswith(":described")


@RECORDS
@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("profiling_name", "gloo:reduce", "COLLECTIVE_TYPE_MISMATCH"),
        ("input_sizes", [[3]], "SIZE_OR_SYNTAX_MISMATCH"),
    ],
)
def test_a_collective_that_differs_is_found(of_ranks: list[Any], field: str, value: Any, kind: str) -> None:
    (found,) = planted(of_ranks, lambda entries: entries[0].update({field: value}))
    (rank, other), *more = found.mismatch_collectives.items()
    assert (rank, more) == (1, [])
    assert other.type_of_mismatch.state.name == kind


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_FR_", "TORCH_NCCL_"))}
    monkeypatch.setattr(os, "environ", found)
    return found


def test_the_recorder_is_turned_on(environment: dict[str, str]) -> None:
    before = dict(environment)
    assert turn_on("/log/nccl_") == "/log/nccl_"
    assert {name: value for name, value in environment.items() if name not in before} == {
        "TORCH_FR_BUFFER_SIZE": "1000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/log/nccl_",
    }


def test_variables_of_the_user_are_kept_under_either_name(environment: dict[str, str]) -> None:
    environment.update(
        TORCH_NCCL_TRACE_BUFFER_SIZE="7", TORCH_NCCL_DEBUG_INFO_TEMP_FILE="/mine", TORCH_NCCL_DUMP_ON_TIMEOUT="0"
    )
    before = dict(environment)
    assert turn_on("/log/nccl_") == "/mine"
    assert environment == before
