"""Every plan of a recommender, with real tasks on two ranks: no race between streams, and planted faults are found.

`tests.recsys.stream_cases` trains, `tests.recsys.stream_faults` plants, `tests.engine.race_detector` finds.
"""

from __future__ import annotations

import pytest

from lightning_pipe.engine import State
from lightning_pipe.recsys import PLANS, recsys_tasks
from tests.distributed import run_ranks
from tests.recsys.stream_cases import ONE_THREAD, found_plans, watch
from tests.tiers import sampled_rows

OFTEN = {
    *((plan, "") for plan in ("threaded_input", "prefetch", "fused_sparse_dist", "semi_sync", "found 0")),
    *(("base", "balanced"), ("prefetch", "replicated"), ("prefetch", "dynamic bags")),
}
CASES = [
    *((plan, "") for plan in (*PLANS, *(f"found {number}" for number in range(4)))),
    *((plan, "balanced") for plan in ("base", "threaded_input", "prefetch", "early_prefetch")),
    *((plan, "clipped") for plan in ("base", "prefetch")),
    *((plan, "evaluated") for plan in PLANS),
    *((plan, "replayed") for plan in PLANS),
    *((plan, "replicated") for plan in ("base", "prefetch", "fused_sparse_dist", "semi_sync")),
    *((plan, "dynamic") for plan in PLANS if plan != "serial"),
    *((plan, "dynamic bags") for plan in ("prefetch", "early_prefetch")),
    ("prefetch", "profiled"),
]


@pytest.mark.parametrize(
    ("plan", "training"), sampled_rows(CASES, lambda case: case in OFTEN, lambda case: ", ".join(filter(None, case)))
)
def test_nothing_is_found_under_any_plan(plan: str, training: str) -> None:
    for seen in run_ranks(watch, 2, plan, training):
        assert seen.findings == []
        assert seen.operators > 1000


def test_the_planner_finds_plans_with_streams_of_their_own() -> None:
    assert len([one for one in found_plans() if one.name not in PLANS and one.streams]) >= 4


# Fault, plan and training: what is found.
FAULTS: dict[tuple[str, str, str], set[str]] = {
    ("no waits for events", "prefetch", ""): {"race: aten::clone", "[EmbPrefetch, recsys.rewrite.routes"},
    ("no events", "prefetch", "pooled"): {"wait without a record"},
    ("batch not recorded", ONE_THREAD, "pooled"): {"reused too early", "then [DenseForward"},
    ("features not recorded", ONE_THREAD, "pooled"): {"reused too early", "then [EmbForward", "then [EmbBackward"},
    ("written after it was handed on", "prefetch", "pooled"): {"race: aten::add_", "then [DenseForward"},
    ("collectives not waited for", "prefetch", "pooled"): {"race: c10d::alltoall_base_", "race: c10d::allreduce_"},
    ("stale lookups", "fused_sparse_dist", ""): {"[EmbBackward, recsys.sharding.data_parallel_tables.step"},
    ("rows not ordered", "prefetch", "dynamic bags"): {"race: fbgemm", "then [EmbPrefetch, recsys.dynamic.cache"},
    ("slots not recorded", ONE_THREAD, "dynamic bags"): {
        "reused too early",
        "recsys.dynamic.tables.row_tables.prefetch",
    },
    # See `test_the_prefetch_and_a_later_input_dist_share_nothing`.
    ("messages not recorded", ONE_THREAD, "pooled"): {"reused too early", "[EmbInputDistWait", "[EmbPrefetch"},
}
OFTEN_FAULTS = {"no waits for events", "batch not recorded", "slots not recorded", "messages not recorded"}


@pytest.mark.parametrize(
    ("fault", "plan", "training"), sampled_rows(FAULTS, lambda row: row[0] in OFTEN_FAULTS, lambda row: row[0])
)
def test_a_planted_fault_is_found(fault: str, plan: str, training: str) -> None:
    for seen in run_ranks(watch, 2, plan, training, fault):
        found = "\n".join(seen.findings)
        assert [part for part in FAULTS[fault, plan, training] if part not in found] == []


def test_the_prefetch_and_a_later_input_dist_share_nothing() -> None:
    """TorchRec has a report of a race between the two (meta-pytorch/torchrec, pull request 4191).

    The input dist reads and writes only fields of a later batch, and no table or cache of a table. So no edge is
    needed. The two can only share memory: messages that were received on the input dist's stream are read on the
    prefetch's, and freed there. They are recorded on it; the planted fault "messages not recorded" is found.
    """
    tasks = {task.name: task for task in recsys_tasks()}
    dist, prefetch = tasks["EmbInputDistStart"], tasks["EmbPrefetch"]
    assert not {str(name) for name in (*dist.reads, *dist.writes)} & set(map(str, (*prefetch.reads, *prefetch.writes)))
    assert not [entry for entry in (*dist.reads, *dist.writes) if isinstance(entry, State)]
