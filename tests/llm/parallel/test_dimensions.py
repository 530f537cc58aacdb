"""How ranks are laid out."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.parallel.dimensions import Dimensions, StageMeshes
from tests.distributed import run_ranks


def test_the_pipeline_takes_what_the_other_dimensions_leave() -> None:
    assert Dimensions(replicate=2, shard=3).fit(24, None).pipeline == 4
    assert Dimensions(context=2).fit(4, 2) == Dimensions(pipeline=2, context=2)


@pytest.mark.parametrize(
    ("dimensions", "world", "pipeline", "words"),
    [
        (Dimensions(shard=2), 4, 3, ["pipeline_parallel_size=3", "data_parallel_shard_size=2", "the 4 ranks"]),
        (Dimensions(tensor=3), 4, None, ["tensor_parallel_size=3", "the 4 ranks"]),
        (Dimensions(context=0), 4, None, ["context_parallel_size=0"]),
        (Dimensions(replicate=-2), 4, -2, ["data_parallel_replicate_size=-2"]),
        (Dimensions(shard=4, expert=3), 4, None, ["expert_parallel_size=3", "the 4 ranks", "divisor"]),
        (Dimensions(replicate=4, expert=2), 4, None, ["expert_parallel_size=2", "the 1 ranks"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(
    dimensions: Dimensions, world: int, pipeline: int | None, words: list[str]
) -> None:
    with pytest.raises(SetupError) as error:
        dimensions.fit(world, pipeline)
    for word in words:
        assert word in str(error.value)


CASES: dict[str, tuple[Dimensions, dict[str, list[int] | None], list[list[int]]]] = {
    # what rank 1 shares which meshes with, and which ranks have one batch
    "stages": (Dimensions(), {"pipeline": [0, 1, 2, 3], "data": None}, [[0, 1, 2, 3]]),
    "replicas": (Dimensions(replicate=2), {"pipeline": [1, 3], "replicate": [0, 1]}, [[0, 2], [1, 3]]),
    "shards": (Dimensions(shard=2), {"pipeline": [1, 3], "shard": [0, 1]}, [[0, 2], [1, 3]]),
    "context without sharding": (
        Dimensions(context=2),
        {"pipeline": [1, 3], "replicate": [0, 1], "context": [0, 1]},
        [[0, 1, 2, 3]],
    ),
    "context with sharding": (
        Dimensions(shard=2, context=2),
        {"pipeline": [1], "shard": [0, 1, 2, 3], "context": [0, 1]},
        [[0, 1], [2, 3]],
    ),
    "context and tensor": (
        Dimensions(context=2, tensor=2),
        {"pipeline": [1], "replicate": [1, 3], "context": [1, 3], "tensor": [0, 1]},
        [[0, 1, 2, 3]],
    ),
    "experts among shards": (
        Dimensions(shard=4, expert=2),
        {"shard": [0, 1, 2, 3], "expert": [0, 1], "expert shard": [1, 3]},
        [[0], [1], [2], [3]],
    ),
    "experts among shards and context": (
        Dimensions(shard=2, context=2, expert=4),
        {"expert": [0, 1, 2, 3], "expert shard": None},
        [[0, 1], [2, 3]],
    ),
}


def meshes(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for case, (dimensions, _, _) in CASES.items():
        made = StageMeshes(dimensions.fit(world, None), "cpu")
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
