"""The lookup of slots is FBGEMM's own, to the bit, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

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
from torch.distributed import ProcessGroup
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys import shard_model
from lightning_pipe.recsys.dynamic.tables.slot_lookup import bypass_grouped_lookup, install_fast_cpu_lookup

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


@pytest.mark.parametrize(
    ("optimizer", "options", "pooling", "weighted"),
    [
        (EmbOptimType.EXACT_SGD, {}, PoolingMode.SUM, True),
        (EmbOptimType.EXACT_ADAGRAD, {"eps": 1e-6}, PoolingMode.MEAN, False),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"eps": 1e-8}, PoolingMode.SUM, False),
    ],
    ids=["sgd", "adagrad", "row-wise adagrad"],
)
def test_results_and_training_are_the_modules_own_to_the_bit(
    optimizer: Any, options: dict[str, Any], pooling: Any, weighted: bool
) -> None:
    whole, fast = (kernel(optimizer, pooling, **options) for _ in range(2))
    before = [part.clone() for part in state(whole)]
    assert install_fast_cpu_lookup(fast)
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


def test_what_is_not_known_goes_the_usual_way() -> None:
    whole, fast = (kernel(EmbOptimType.EXACT_SGD, PoolingMode.SUM) for _ in range(2))
    assert install_fast_cpu_lookup(fast)
    slots, offsets = torch.tensor([3, 4, 5], dtype=torch.int32), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    assert torch.equal(whole(slots, offsets), fast(slots, offsets))


def lookup(group: ProcessGroup, *poolings: PoolingType) -> Any:
    """TorchRec's, with a table for each pooling, and a kernel for each kind of it."""
    tables = [
        EmbeddingBagConfig(
            name=f"table {index}",
            num_embeddings=30,
            embedding_dim=4,
            feature_names=[f"feature {index}"],
            pooling=pooling,
            init_fn=partial(torch.nn.init.normal_, generator=torch.Generator().manual_seed(index)),
        )
        for index, pooling in enumerate(poolings)
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=tables))
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    sharded = shard_model(model, device=torch.device("cpu"), group=group, sparse_optimizer=optimizer)
    (module,) = sharded.sharded_modules.values()
    (made,) = cast("Any", module)._lookups
    assert isinstance(made, GroupedPooledEmbeddingsLookup)
    return made


def features(kind: str) -> KeyedJaggedTensor:
    given: dict[str, Any] = {"lengths": torch.tensor([2, 0, 1, 3])}
    if kind == "weighted":
        given["weights"] = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, -1.0])
    if kind == "a batch size of their own":
        given["stride_per_key_per_rank"] = [[4]]
    return KeyedJaggedTensor(["feature 0"], torch.tensor([3, 29, 3, 0, 7, 7]), **given)


@pytest.mark.parametrize("kind", ["plain", "weighted", "a batch size of their own"])
def test_straight_to_the_kernel_is_torchrecs_way_to_the_bit(one_rank: ProcessGroup, kind: str) -> None:
    whole, fast = (lookup(one_rank, PoolingType.SUM) for _ in range(2))
    assert bypass_grouped_lookup(fast)
    calls = []
    kernel = fast._emb_modules[0]
    kernel.register_forward_hook(lambda *_: calls.append(kind))
    for step in range(3):
        outputs = [made(features(kind)) for made in (whole, fast)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.backward(torch.rand(output.shape, generator=torch.Generator().manual_seed(step)))
        tables = [made._emb_modules[0].emb_module.split_embedding_weights()[0] for made in (whole, fast)]
        assert torch.equal(*tables)
    assert len(calls) == (0 if kind == "plain" else 3), "whether it went through TorchRec's module"
