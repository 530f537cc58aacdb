"""How ranks are laid out."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims, ParallelMeshes
from tests.distributed import run_ranks


def test_the_pipeline_takes_what_the_other_dimensions_leave() -> None:
    assert ParallelDims(dp_replicate=2, dp_shard=3).resolve(24).pp == 4
    assert ParallelDims(pp=2, cp=2).resolve(4) == ParallelDims(pp=2, cp=2)


def test_so_can_replicas_or_shards_under_a_pipeline_of_given_size() -> None:
    assert ParallelDims(pp=2, dp_replicate=-1, tp=2).resolve(12).dp_replicate == 3
    assert ParallelDims(pp=2, dp_shard=-1, ep=2).resolve(8).dp_shard == 4


@pytest.mark.parametrize(
    ("dimensions", "world", "words"),
    [
        (ParallelDims(pp=3, dp_shard=2), 4, ["parallel.pp=3", "parallel.dp_shard=2", "the 4 ranks"]),
        (ParallelDims(tp=3), 4, ["parallel.tp=3", "the 4 ranks"]),
        (ParallelDims(dp_shard=8), 4, ["parallel.dp_shard=8", "the 4 ranks"]),
        (ParallelDims(dp_shard=4, ep=3), 4, ["parallel.ep=3", "the 4 ranks", "divisor"]),
        (ParallelDims(dp_replicate=4, ep=2), 4, ["parallel.ep=2", "the 1 ranks"]),
        (ParallelDims(pp=2, dp_replicate=-1), 3, ["parallel.pp=2", "parallel.dp_replicate=-1", "the 3 ranks"]),
        (ParallelDims(pp=1, dp_shard=-1, ep=2), 3, ["parallel.ep=2", "the 3 ranks", "parallel.dp_shard=3"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(dimensions: ParallelDims, world: int, words: list[str]) -> None:
    with pytest.raises(SetupError) as error:
        dimensions.resolve(world)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cp": 0}, "parallel.cp is 0; expected a whole number, 1 or more"),
        ({"pp": 0}, "parallel.pp is 0"),
        ({"pp": -2}, "parallel.pp is -2"),
        ({"dp_replicate": -1}, "parallel.pp and parallel.dp_replicate are -1, but only one"),
        ({"pp": 1, "dp_shard": -2}, "parallel.dp_shard is -2"),
        ({"pp": 1, "tp": -1}, "parallel.tp is -1"),
        ({"ep": True}, "parallel.ep is True"),
        ({"tp": "2"}, "parallel.tp is '2'"),
        ({"cp_method": "rings"}, "parallel.cp_method is 'rings'; expected one of 'ulysses', 'ring'"),
        ({"reshard_after_forward": "yes"}, "parallel.reshard_after_forward is 'yes'; expected one of True, False"),
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        ParallelDims(**given)


CASES: dict[str, tuple[ParallelDims, dict[str, list[int] | None], list[list[int]]]] = {
    # what rank 1 shares which meshes with, and which ranks have one batch
    "stages": (ParallelDims(), {"pipeline": [0, 1, 2, 3], "data": None}, [[0, 1, 2, 3]]),
    "replicas": (ParallelDims(dp_replicate=2), {"pipeline": [1, 3], "replicate": [0, 1]}, [[0, 2], [1, 3]]),
    "shards": (ParallelDims(dp_shard=2), {"pipeline": [1, 3], "shard": [0, 1]}, [[0, 2], [1, 3]]),
    "context without sharding": (
        ParallelDims(cp=2),
        {"pipeline": [1, 3], "replicate": [0, 1], "context": [0, 1]},
        [[0, 1, 2, 3]],
    ),
    "context with sharding": (
        ParallelDims(dp_shard=2, cp=2),
        {"pipeline": [1], "shard": [0, 1, 2, 3], "context": [0, 1]},
        [[0, 1], [2, 3]],
    ),
    "context and tensor": (
        ParallelDims(cp=2, tp=2),
        {"pipeline": [1], "replicate": [1, 3], "context": [1, 3], "tensor": [0, 1]},
        [[0, 1, 2, 3]],
    ),
    "experts among shards": (
        ParallelDims(dp_shard=4, ep=2),
        {"shard": [0, 1, 2, 3], "expert": [0, 1], "expert shard": [1, 3]},
        [[0], [1], [2], [3]],
    ),
    "experts among shards and context": (
        ParallelDims(dp_shard=2, cp=2, ep=4),
        {"expert": [0, 1, 2, 3], "expert shard": None},
        [[0, 1], [2, 3]],
    ),
}


def meshes(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for case, (dimensions, _, _) in CASES.items():
        made = ParallelMeshes(dimensions.resolve(world), "cpu")
        by_name: dict[str, Any] = {"data": made.data}
        for prefix, mesh in (("", made.data), ("expert ", made.expert_data)):
            if mesh is not None:
                by_name |= {f"{prefix}{name}": mesh[name] for name in mesh.mesh_dim_names or ()}
        by_name |= {"pipeline": made.root["pipeline"], "context": made.context, "tensor": made.tensor}
        by_name["expert"] = made.expert
        found[case] = {name: mesh.mesh.flatten().tolist() for name, mesh in by_name.items() if mesh is not None}
        found[case]["same batch"] = made.same_batch
    return found


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return run_ranks(meshes, 4)[1]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_shares_each_dimension_with_the_right_others(case: str, made: dict[str, Any]) -> None:
    _, shared, same_batch = CASES[case]
    for name, ranks in shared.items():
        assert made[case].get(name) == ranks, name
    assert made[case]["same batch"] == same_batch
