"""Each wait of the host in a step of a language model in stages is listed in docs/gpu.md, with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import run_ranks
from tests.llm.stream_cases import BATCHES, STAGES, watch_fault, watch_stages
from tests.scenarios.streams.host_syncs import (
    LLM_MASK_REASONS,
    LLM_REASONS,
    SCHEDULES,
    language_row,
    language_tables,
    of_schedule,
    place,
)

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.14."), reason="the page is about torch 2.14")
PAGE = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
UNMASKED = [batch for batch in BATCHES if batch != "padded"]
SAMPLED = {"1f1b": ["rows", "boundaries of rows"], "zbv_zero_bubble": ["packed", "boundaries of micro-batches"]}


@pytest.mark.parametrize(
    ("schedule", "batches"),
    [
        *SAMPLED.items(),
        *(pytest.param(schedule, UNMASKED, marks=pytest.mark.exhaustive) for schedule in SCHEDULES),
    ],
)
def test_the_row_of_a_schedule_on_the_page_is_that_of_the_detector(schedule: str, batches: list[str]) -> None:
    for syncs in of_schedule(schedule, *batches).values():
        assert language_row(schedule, syncs) in PAGE
        assert syncs.keys() == LLM_REASONS.keys()


def test_the_tables_of_the_page_have_every_schedule_and_every_reason() -> None:
    syncs = dict.fromkeys(LLM_REASONS, 1)
    assert language_tables(dict.fromkeys(SCHEDULES, syncs)) in PAGE


def test_a_padding_mask_is_read_in_each_forward() -> None:
    for rank in run_ranks(watch_stages, 2, "1f1b", "padded"):
        assert set(map(place, rank["padded"])) - LLM_REASONS.keys() == LLM_MASK_REASONS.keys()


def test_a_read_in_a_loss_has_no_reason() -> None:
    last = run_ranks(watch_fault, 2)[-1]
    assert (STAGES, "tests.llm.stream_cases.summed_loss") in map(place, last)
