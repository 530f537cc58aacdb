"""Contracts with TorchRec: its private names are there, and do what the wrappers say.

A failure means that TorchRec has changed: look for a public way first, then adapt
``lightning_pipe/_compat/torchrec.py``, with a branch for each version where versions differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from lightning_pipe._compat import torchrec as compat
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def features_of(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def bags(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    pooling = PoolingType.SUM if is_weighted else PoolingType.MEAN
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"], pooling=pooling)
    return EmbeddingBagCollection([config], is_weighted=is_weighted, device=CPU)


def sharded(sharder: Any, module: nn.Module, world: int) -> Any:
    plan = construct_module_sharding_plan(
        module, {"t": row_wise()}, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    group = dist.group.WORLD
    assert group is not None
    return sharder.shard(module, plan, ShardingEnv.from_process_group(group), CPU, "model.tables")


def with_cache(module: Any) -> nn.Module:
    """The module, with the name of the kernel in its plan changed."""
    assert compat.cached_tables(module) == []
    module.module_sharding_plan["t"].compute_kernel = "fused_uvm_caching"
    return nn.ModuleDict({"tables": module})


def contracts(rank: int, world: int) -> dict[str, Any]:
    module, group = sharded(EmbeddingBagCollectionSharder(), bags(), world), dist.group.WORLD
    assert group is not None
    found: dict[str, Any] = {
        "group": compat.sharding_group(module) is group,
        "name": compat.module_name(module),
        "tables": [table.name for table in compat.table_configs(module)],
        "types": compat.get_module_sharding_types(module),
        "cached": compat.cached_tables(with_cache(sharded(EmbeddingBagCollectionSharder(), bags(), world))),
        "weighted": compat.is_weighted(module),
        "divides": module._has_mean_pooling_callback,
        "columns": compat.disable_mean_pooling(module),
        "kernels": [
            (type(kernel).__name__, tables[0].name) for kernel, tables in compat.iter_lookup_kernels_with_tables(module)
        ],
        "fast": [type(compat.get_single_kernel_of_lookup(lookup)).__name__ for lookup in compat.lookups_of(module)],
        "before": compat.get_input_dist_all_to_alls(module),
    }

    compat.create_input_dists_keeping_ids(module, features_of([0]))
    request = module.input_dist(module.create_context(), features_of([100 + rank, 201 - rank]))
    found["received"] = request.wait().wait()[0].values().tolist()
    (all_to_all,) = compat.get_input_dist_all_to_alls(module)
    found["group of input dist"] = compat.get_all_to_all_group(all_to_all) is group
    found["keys"] = compat.get_all_to_all_splits_and_stagger(all_to_all)
    processed = FeatureProcessedEmbeddingBagCollection(
        bags(is_weighted=True), PositionWeightedModuleCollection({"f": 5}, device=CPU)
    )
    processed_module = sharded(FeatureProcessedEmbeddingBagCollectionSharder(), processed, world)
    sequences = EmbeddingCollection([EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])])
    found["by sharding"] = compat.tables_by_sharding(sharded(EmbeddingCollectionSharder(), sequences, world))
    found["processors"] = [tuple(one.shape) for one in compat.feature_processor_parameters(processed_module)]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(contracts, 2)


def test_a_sharded_module_says_what_it_is(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["group"], "a sharded module does not keep its environment in _env"
        assert found["name"] == "model.tables", "a sharded module does not keep its name in _module_fqn"
        assert found["tables"] == ["t"], "a sharded module does not keep its tables in _embedding_bag_configs"
        assert found["cached"] == ["t"], "a sharded module does not keep the kernels in module_sharding_plan"
        assert found["types"] == {"row_wise"}, "a sharded module does not keep its kinds in _sharding_types"
        assert found["weighted"] is False, "ShardedEmbeddingBagCollection has no _is_weighted"
        assert found["divides"], "_has_mean_pooling_callback does not say that means of row-wise tables are divided"
        assert found["columns"] == (["f"], [4]), "_embedding_names and _embedding_dims are not the outputs' columns"
        assert found["by sharding"] == [[(8, 1)]], "_sharding_type_to_sharding does not hold the tables"
        assert found["processors"] == [(5,)], "a sharded module does not keep its processors in _feature_processors"


def test_kernels_are_found_in_lookups(ranks: list[dict[str, Any]]) -> None:
    kernel = "DenseTableBatchedEmbeddingBagsCodegen"  # without an optimizer
    for found in ranks:
        assert found["kernels"] == [(kernel, "t")], "_lookups, _emb_modules or _config do not lead to FBGEMM's kernels"
        assert found["fast"] == [kernel], "_feature_processor of a lookup is another one, or its kernels are more"


def test_ids_go_unchanged_to_the_rank_that_is_their_remainder(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["before"] == [], "TorchRec makes input dists before the first batch"
        words = "blocks of no rows, or _keep_original_indices, send other ids"
        assert sorted(found["received"]) == [[100, 200], [101, 201]][rank], words


def test_an_all_to_all_says_what_it_sends_to_each_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["group of input dist"], "KJTAllToAll does not keep its group in _pg"
        assert found["keys"] == ([1, 1], 1), "KJTAllToAll does not keep its keys in _splits, or its nodes in _stagger"


def test_segments_of_any_size_are_permuted() -> None:
    values, sizes, order = torch.tensor([1, 2, 2, 3]), torch.tensor([1, 2, 0, 1]), torch.tensor([3, 1, 2, 0]).int()
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    permuted, weighted = compat.permute_segments(values, sizes, order, weights)
    assert permuted.tolist() == [3, 2, 2, 1]
    assert weighted is not None
    assert torch.equal(weighted, weights[[3, 1, 2, 0]])
    assert compat.permute_segments(values, sizes, order)[1] is None


def test_tensors_of_features_can_be_replaced() -> None:
    features = features_of([1, 2])
    assert features["f"].values().tolist() == [1, 2]  # which TorchRec keeps
    other = compat.copy_kjt_with_tensors(features, values=torch.tensor([3, 4]))
    assert other.values().tolist() == [3, 4], "KeyedJaggedTensor does not keep its values in _values"
    assert other["f"].values().tolist() == [3, 4], "KeyedJaggedTensor does not keep what it has cut in _jt_dict"
    assert features["f"].values().tolist() == [1, 2]
    assert compat.kjts_share_tensors(features, compat.copy_kjt_with_tensors(features))
    assert not compat.kjts_share_tensors(features, other)
    weighted = compat.copy_kjt_with_tensors(features, weights=torch.ones(2), lengths=torch.tensor([2]), offsets=None)
    assert weighted.weights().tolist() == [1, 1], "KeyedJaggedTensor does not keep its weights in _weights"
    assert weighted.offsets().tolist() == [0, 2], "KeyedJaggedTensor does not compute missing _offsets from _lengths"
    inverse = (["f"], torch.tensor([[0, 1]]))
    compat.set_kjt_tensors(weighted, inverse_indices=inverse)
    assert weighted.inverse_indices() is inverse, "KeyedJaggedTensor does not keep them in _inverse_indices"


def test_a_trace_does_not_enter_leaf_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert compat.leaf_module_names(model) == [], "_get_leaf_module_names takes a module of PyTorch's for a leaf"


def test_a_kernel_keeps_its_newest_lookup_under_the_names_that_its_backward_hook_reads() -> None:
    table = 8, 4, EmbeddingLocation.HOST, ComputeDevice.CPU
    kernel: Any = SplitTableBatchedEmbeddingBagsCodegen([table], device=CPU)
    newest = compat.snapshot_last_lookup(kernel)
    read = set(type(kernel)._update_cache_counter_and_locations.__code__.co_names)
    assert {"lxu_cache_locations", "_indices", "_offsets"} <= set(newest) <= read
    kernel._indices = torch.ones(1)
    compat.restore_last_lookup(kernel, newest)
    assert kernel._indices is newest["_indices"]
