"""Dynamic tables under a plan that looks a batch up before the one before it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.recsys.dynamic.dynamic_cases import ROW_WISE_ADAGRAD, Model, outcome, same, shard, train

STEPS = 12


def trained(rank: int, world_size: int, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    ways = {"serial": ("serial", 4000), "large": ("semi_sync", 4000), "small": ("semi_sync", 50 * world_size)}
    for name, (plan, cache_rows) in ways.items():
        sharded = shard(Model(path / name, cache_rows=cache_rows, **options), ROW_WISE_ADAGRAD)
        scores = train(sharded, range(STEPS), plan)
        evicted = sum(cache.stats.evicted for rows in sharded.dynamic_rows.values() for cache in rows.caches.values())
        found[name] = {"all": (scores, outcome(sharded)), "evicted": evicted, "expired": _expired(sharded)}
        sharded.close()
    return found


def _expired(sharded: Any) -> int:
    return sum(cache.stats.expired for rows in sharded.dynamic_rows.values() for cache in rows.caches.values())


def counts(way: dict[str, Any]) -> dict[str, Any]:
    """Of each row in how many batches it was, and in which last."""
    tables = {name: rows for name, rows in way["all"][1].items() if name != "dense"}
    return {name: {id: columns[-1] for id, columns in rows.items()} for name, rows in tables.items()}


@pytest.mark.parametrize("options", [{"ttl": 1}, {"ttl": 2, "admission_threshold": 2}], ids=str)
def test_counts_and_expiry_are_the_serial_plans_and_eviction_changes_nothing(
    options: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run_ranks(trained, 2, tmp_path, options)
    for found in ranks:
        assert same(counts(found["large"]), counts(found["serial"]))
        assert found["large"]["expired"] == found["serial"]["expired"] > 0
        assert not same(found["large"]["all"], found["serial"]["all"])  # a batch old
        assert same(found["small"]["all"], found["large"]["all"])
    assert sum(found["small"]["evicted"] for found in ranks) > 0
