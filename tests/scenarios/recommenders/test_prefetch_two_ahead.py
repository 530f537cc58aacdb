"""The plan of the benchmark that fetches rows two batches ahead trains as the serial one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_pipe.recsys import recsys_plan, recsys_tasks
from tests.distributed import run_ranks
from tests.recsys.dynamic.dynamic_cases import ROW_WISE_ADAGRAD, Model, outcome, same, shard, train

PLAN = Path(__file__).parents[3] / "benchmarks" / "prefetch_two_ahead.yaml"


def test_rows_are_fetched_two_batches_ahead_in_a_thread_of_their_own() -> None:
    plan = recsys_plan(PLAN, recsys_tasks())
    assert plan.schedule["EmbPrefetch"].stage == 2
    assert plan.schedule["EmbPrefetch"].thread_group == "prefetch"


def trained(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    found = {}
    for name, plan in (("serial", "serial"), ("two ahead", str(PLAN))):
        sharded = shard(Model(path / name, cache_rows=50 * world_size, ttl=3), ROW_WISE_ADAGRAD)
        scores = train(sharded, range(12), plan)
        evicted = sum(cache.stats.evicted for rows in sharded.dynamic_rows.values() for cache in rows.caches.values())
        found[name] = {"scores": scores, "outcome": outcome(sharded), "evicted": evicted}
        sharded.close()
    return found


def test_two_ahead_with_a_cache_that_is_too_small_equals_serial_to_the_bit(tmp_path: Path) -> None:
    for results in run_ranks(trained, 2, tmp_path):
        assert results["two ahead"]["evicted"] > 0
        for what in ("scores", "outcome"):
            assert same(results["two ahead"][what], results["serial"][what])
