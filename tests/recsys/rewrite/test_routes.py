"""Features arrive as TorchRec's own all-to-all brings them, with all that its output dist reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.rewrite.input_dist import (
    FusableAllToAll,
    SplitsMessageLayout,
    SplitsRequest,
    collect_outgoing_features,
    defer_input_dists,
)
from tests.distributed import run_ranks

CPU = torch.device("cpu")
KEYS = ["a", "b", "c", "d", "e", "f"]
SPLITS = [2, 0, 3, 1]  # keys of each of four ranks


@dataclass
class Context:
    sharding_contexts: list[Any] = field(default_factory=lambda: [SequenceShardingContext()])


def features(batch_sizes: list[int], weighted: bool, variable: bool, known: bool, longest: int = 3) -> Any:
    """Features of this rank. *known*: the host knows the number of ids of each key."""
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    strides = [batch_sizes[dist.get_rank()] + (index % 3 if variable else 0) for index in range(len(KEYS))]
    lengths = torch.randint(0, longest + 1, (sum(strides),), generator=generator)
    ids = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator)
    made = KeyedJaggedTensor(
        KEYS,
        ids,
        weights=torch.rand(len(ids), generator=generator) if weighted else None,
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides] if variable else None,
    )
    return made.sync() if known else made


CASES: dict[str, dict[str, Any]] = {
    "one batch size": {"batch_sizes": [3, 3, 3, 3]},
    "weights": {"batch_sizes": [3, 3, 3, 3], "weighted": True},
    "a batch size per rank": {"batch_sizes": [3, 1, 2, 4], "weighted": True},
    "a rank without samples": {"batch_sizes": [3, 0, 2, 4]},
    "no samples": {"batch_sizes": [0, 0, 0, 0]},
    "no ids": {"batch_sizes": [2, 2, 2, 2], "longest": 0},
    "a batch size per key": {"batch_sizes": [3, 1, 2, 4], "variable": True, "weighted": True},
}


def content(received: KeyedJaggedTensor, context: Context) -> dict[str, Any]:
    weights = received.weights_or_none()
    (sharding,) = context.sharding_contexts
    recat = sharding.sparse_features_recat
    return {
        "keys": received.keys(),
        "tensors": [
            (tensor.dtype, tensor.tolist()) for tensor in (received.values(), received.lengths(), received.offsets())
        ],
        "weights": None if weights is None else weights.tolist(),
        "strides": (received.stride(), received.stride_per_key(), received.stride_per_key_per_rank()),
        "sums": (received.length_per_key(), received.offset_per_key()),
        "context": (sharding.input_splits, sharding.output_splits, sharding.batch_size_per_rank),
        "of each feature": sharding.batch_size_per_rank_per_feature,
        "recat": None if recat is None else (recat.dtype, recat.tolist()),
    }


def exchanged(rank: int, world: int) -> dict[str, tuple[Any, Any]]:
    """What arrives by TorchRec's all-to-all and by this project's, twice: the second time again from the same sizes."""
    group = dist.group.WORLD
    assert group is not None
    results: dict[str, tuple[Any, Any]] = {}
    for name, case in CASES.items():
        for stagger in (1, 2):
            for int32 in (False, True):
                for known in (False, True):
                    made = features(**{"weighted": False, "variable": False, **case}, known=known)
                    all_to_all, theirs, ours = KJTAllToAll(group, SPLITS, stagger), Context(), Context()
                    plain = KJTListSplitsAwaitable([all_to_all(made)], theirs).wait().wait()
                    expected = content(plain[0], theirs)
                    fusable = FusableAllToAll(all_to_all, group, int32)
                    made = features(**{"weighted": False, "variable": False, **case}, known=known)
                    with defer_input_dists():
                        request: Any = KJTListSplitsAwaitable([fusable(made)], ours)
                    (part,) = collect_outgoing_features(request)
                    part.route.variable = part.variable
                    layout = SplitsMessageLayout([part.route], CPU)
                    sizes = SplitsRequest(layout, {"module": request}, {"module": ours})
                    for again in (False, True):
                        received = sizes.wait_and_send_tensors()["module"].wait()[0]
                        key = f"{name}, stagger {stagger}, int32 {int32}, known {known}, again {again}"
                        results[key] = content(received, ours), expected
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Any, Any]]]:
    return run_ranks(exchanged, 4)


@pytest.mark.parametrize("name", CASES)
def test_features_arrive_as_by_torchrecs_all_to_all(ranks: list[dict[str, tuple[Any, Any]]], name: str) -> None:
    for results in ranks:
        cases = {key: pair for key, pair in results.items() if key.startswith(f"{name}, ")}
        assert len(cases) == 16
        for key, (found, expected) in cases.items():
            assert found == expected, key
