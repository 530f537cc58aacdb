"""Each wait of the host for the device is listed in docs/gpu.md, with its number and a reason."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.distributed import run_ranks
from tests.recsys.stream_cases import watch
from tests.scenarios.streams import host_syncs
from tests.scenarios.streams.host_syncs import (
    AHEAD_OF_LOSS,
    DYNAMIC,
    REASONS,
    STATIC,
    by_plan,
    of_dynamic_tables,
    of_torchrec,
    place,
)

# The functions of other releases of TorchRec have other names.
pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.14."), reason="the page is about torch 2.14")
PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
# Waits in the user's step belong to the user: TorchRec's to_dense reads each length.
STEP = "recsys.tasks.train_pipeline._training_step"

plans, dynamic, torchrec = cache(by_plan), cache(of_dynamic_tables), cache(of_torchrec)


def test_the_tables_of_the_page_are_those_of_the_detector() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [
        table for table in host_syncs.tables(plans(), dynamic(), torchrec()).split("\n\n") if table not in page
    ] == []


@pytest.mark.parametrize("training", [STATIC, DYNAMIC, pytest.param("", id="everything", marks=pytest.mark.exhaustive)])
def test_each_wait_from_the_copy_to_the_loss_has_a_reason(training: str) -> None:
    for seen in run_ranks(watch, 2, "prefetch", training):
        own = [sync for sync in seen.all_syncs if not sync.site.package.startswith(STEP)]
        waits = {place(sync) for sync in own if sync.site.task in AHEAD_OF_LOSS}
        assert waits <= REASONS.keys()
        assert waits


def test_every_plan_waits_once_for_all_modules_for_the_sizes_of_messages() -> None:
    for plan, syncs in plans().items():
        # Sizes of two messages in place of one, known from the ids.
        divided = {("EmbForwardAhead", "recsys.rewrite.divided_lookup.wait"): 1} if plan == "compute_ahead" else {}
        assert syncs == {("EmbInputDistWait", "recsys.rewrite.input_dist.wait"): 1, **divided}


def test_a_read_in_the_worker_has_no_reason() -> None:
    for seen in run_ranks(watch, 2, "prefetch", STATIC, "read in a worker"):
        assert ("EmbPrefetch", "tests.recsys.stream_faults.read") in set(map(place, seen.syncs)) - REASONS.keys()
