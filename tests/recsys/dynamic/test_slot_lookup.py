"""The lookup of slots is FBGEMM's own, to the bit, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from lightning_pipe.recsys.dynamic.slot_lookup import look_slots_up

ROWS = ((50, 8), (30, 4))


def kernel(optimizer: Any, pooling: Any, **options: Any) -> Any:
    """Two tables, one of them for two features."""
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, width in ROWS],
        feature_table_map=[0, 0, 1],
        optimizer=optimizer,
        learning_rate=0.1,
        pooling_mode=pooling,
        bounds_check_mode=BoundsCheckMode.NONE,
        **options,
    )
    for table, weights in enumerate(made.split_embedding_weights()):
        torch.nn.init.normal_(weights, generator=torch.Generator().manual_seed(table))
    return made


def state(made: Any) -> list[torch.Tensor]:
    return [*made.split_embedding_weights(), *(part for parts in made.split_optimizer_states() for part in parts)]


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN], ids=["sum", "mean"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (EmbOptimType.EXACT_SGD, {}),
        (EmbOptimType.EXACT_ADAGRAD, {"eps": 1e-6}),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"eps": 1e-8}),
    ],
    ids=["sgd", "adagrad", "row-wise adagrad"],
)
def test_results_and_training_are_the_modules_own_to_the_bit(
    optimizer: Any, options: dict[str, Any], pooling: Any, weighted: bool
) -> None:
    if weighted and pooling == PoolingMode.MEAN:
        pytest.skip("a weighted mean is refused")
    whole, fast = (kernel(optimizer, pooling, **options) for _ in range(2))
    before = [part.clone() for part in state(whole)]
    assert look_slots_up(fast)
    for step in range(5):
        for made in (whole, fast):
            made.set_learning_rate(0.1 / (step + 1))
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 4, (12,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        slots = torch.randint(0, 30, (int(offsets[-1]),), generator=generator)
        weights = torch.rand(len(slots), generator=generator) if weighted else None
        outputs = [made(indices=slots, offsets=offsets, per_sample_weights=weights) for made in (whole, fast)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.backward(torch.rand(output.shape, generator=torch.Generator().manual_seed(step)))
        assert all(map(torch.equal, state(whole), state(fast)))
    assert not any(map(torch.equal, state(fast), before))


def test_kernels_that_do_not_pool_are_left_as_they_are() -> None:
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)], pooling_mode=PoolingMode.NONE
    )
    assert not look_slots_up(made)
    assert "forward" not in made.__dict__


def test_what_is_not_known_goes_the_usual_way() -> None:
    whole, fast = (kernel(EmbOptimType.EXACT_SGD, PoolingMode.SUM) for _ in range(2))
    assert look_slots_up(fast)
    slots, offsets = torch.tensor([3, 4, 5], dtype=torch.int32), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    assert torch.equal(whole(slots, offsets), fast(slots, offsets))
