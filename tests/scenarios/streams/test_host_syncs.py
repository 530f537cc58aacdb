"""The host waits for the device in the tasks of the input alone, as docs/gpu.md says."""

from __future__ import annotations

import pytest

from lightning_pipe.recsys import PLANS
from tests.distributed import run_ranks
from tests.recsys.stream_cases import watch

INPUT = {"EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch"}


@pytest.mark.parametrize("plan", PLANS)
def test_no_plan_waits_in_the_step_itself(plan: str) -> None:
    for seen in run_ranks(watch, 2, plan, "pooled"):
        assert {sync.site.task for sync in seen.syncs} == INPUT
