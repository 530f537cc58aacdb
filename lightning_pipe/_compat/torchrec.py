"""Private names of TorchRec.

TorchRec has no public API for three things: replacing the tensors of a ``KeyedJaggedTensor`` without losing its caches,
access to the lookups, kernels and input dists of a sharded module, and permuting segments of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import KJTAllToAll, PooledEmbeddingsAllToAll, SequenceEmbeddingsAllToAll
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.train_pipeline import tracing
from torchrec.distributed.types import QuantizedCommCodecs
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, _permute_tensor_by_segments

K = TypeVar("K", bound=KeyedJaggedTensor)
leaf_module_names = tracing._get_leaf_module_names

# ---------------------------------------------------------------------- features


def set_kjt_tensors(features: KeyedJaggedTensor, **tensors: Any) -> None:
    """Replace tensors of *features* in place, by name, and drop the cached jagged tensors of single features."""
    for name, tensor in tensors.items():
        setattr(features, f"_{name}", tensor)
    features._jt_dict = None


def copy_kjt_with_tensors(features: K, **tensors: Any) -> K:
    """Shallow copy of *features* with tensors replaced as by :func:`set_kjt_tensors`."""
    copied: K = object.__new__(type(features))  # equivalent to copy.copy, in half the time
    copied.__dict__.update(features.__dict__)
    set_kjt_tensors(copied, **tensors)
    return copied


def kjts_share_tensors(first: KeyedJaggedTensor, second: KeyedJaggedTensor) -> bool:
    """Return True if both hold the same tensor objects. Tensors that are computed lazily stay uncomputed."""
    names = ("_values", "_weights", "_lengths", "_offsets")
    return all(getattr(first, name) is getattr(second, name) for name in names)


# ---------------------------------------------------------------------- sharded modules


def sharding_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Process group that a module is sharded over; None if the module has no such attribute."""
    return getattr(getattr(module, "_env", None), "process_group", None)


def module_name(module: nn.Module) -> str:
    """Name of a sharded module in its model, or the name of its class if unknown."""
    return str(getattr(module, "_module_fqn", None) or type(module).__name__)


def table_configs(module: nn.Module) -> Iterator[BaseEmbeddingConfig]:
    """Configs of the tables of a sharded module and of its sub-modules."""
    for child in module.modules():
        yield from getattr(child, "_embedding_bag_configs", None) or getattr(child, "_embedding_configs", None) or ()


def is_weighted(module: Any) -> bool:
    """Return True if a ``ShardedEmbeddingBagCollection`` uses per-sample weights."""
    return bool(module._is_weighted)


def get_module_sharding_types(module: nn.Module) -> set[str]:
    """Sharding types of the tables of a sharded module and of its sub-modules."""
    return {kind for child in module.modules() for kind in getattr(child, "_sharding_types", ())}


def tables_by_sharding(module: Any) -> list[list[tuple[int, int]]]:
    """Rows and number of features of each table of a ``ShardedEmbeddingCollection``, in the order of each sharding."""
    shardings = module._sharding_type_to_sharding.values()
    return [
        [(table.num_embeddings, table.num_features()) for table in sharding.embedding_tables()]
        for sharding in shardings
    ]


def disable_mean_pooling(module: Any) -> tuple[list[str], list[int]]:
    """Switch off the division of mean-pooled outputs of a ``ShardedEmbeddingBagCollection``."""
    module._has_mean_pooling_callback = False
    return module._embedding_names, module._embedding_dims


def feature_processor_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of the feature processors of a sharded module."""
    processors = getattr(module, "_feature_processors", None)
    return [] if processors is None else list(processors.parameters())


def unwrap_managed_collision_module(module: Any) -> Any:
    """Embedding module in a managed-collision module; other modules are returned themselves."""
    return getattr(module, "_embedding_module", module)


def lookups_of(module: Any) -> list[nn.Module]:
    """Lookups of a sharded module (or of its embedding module), one per sharding type, as the module's own list."""
    lookups: list[nn.Module] = getattr(unwrap_managed_collision_module(module), "_lookups", [])
    return lookups


def iter_lookup_kernels_with_tables(module: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """FBGEMM kernels in the lookups of a sharded module, each with its tables in order."""
    for lookup in lookups_of(module):
        for kernel in lookup._emb_modules:  # type: ignore[union-attr]  # a ModuleList
            yield kernel.emb_module, kernel._config.embedding_tables


def get_single_kernel_of_lookup(lookup: Any) -> Any:
    """FBGEMM kernel of a ``GroupedPooledEmbeddingsLookup``; None with several kernels or a feature processor."""
    alone = len(lookup._emb_modules) == 1 and lookup._feature_processor is None
    return lookup._emb_modules[0].emb_module if alone else None


def snapshot_last_lookup(kernel: Any) -> dict[str, Any]:
    """What an FBGEMM kernel with ``prefetch_pipeline`` keeps of its newest lookup, which its backward hook reads."""
    names = ("lxu_cache_locations", "_indices", "_offsets", "_vbe_B_offsets", "_vbe_max_B")
    return {name: getattr(kernel, name) for name in names if hasattr(kernel, name)}


def restore_last_lookup(kernel: Any, newest: dict[str, Any]) -> None:
    """Undo the effect of later lookups on :func:`snapshot_last_lookup`."""
    for name, value in newest.items():
        setattr(kernel, name, value)


def cached_tables(model: nn.Module) -> list[str]:
    """Names of the tables of sharded modules that have a cache of rows, in the order of the modules."""
    kernels = [entry for child in model.modules() for entry in compute_kernels(child).items()]
    return [name for name, kernel in kernels if kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value]


def compute_kernels(module: nn.Module) -> dict[str, str]:
    """Compute kernel of each table of a sharded module, on all ranks; empty for other modules."""
    plan = getattr(module, "module_sharding_plan", {})
    return {name: sharding.compute_kernel for name, sharding in plan.items()}


def tables_of_lookup(lookup: Any) -> list[tuple[str, int, int]]:
    """Name, rows on this rank, and number of features, of each table of a lookup, in the features' order."""
    return [
        (table.name, table.local_rows, len(table.feature_names))
        for config in lookup.grouped_configs
        for table in config.embedding_tables
    ]


# ---------------------------------------------------------------------- output dists


def output_dists_of(module: Any) -> list[nn.Module]:
    """Output dists of a sharded module, in the order of its lookups."""
    dists: list[nn.Module] = getattr(module, "_output_dists", [])
    return dists


def get_output_all_to_all(output_dist: Any) -> PooledEmbeddingsAllToAll | SequenceEmbeddingsAllToAll:
    """All-to-all of an output dist for which :func:`sends_by_all_to_all` holds; made now if it has not sent yet."""
    if output_dist._dist is None:
        output_dist._create_output_dist_module()
    all_to_all: PooledEmbeddingsAllToAll | SequenceEmbeddingsAllToAll = output_dist._dist
    return all_to_all


def sends_by_all_to_all(output_dist: Any) -> bool:
    """Return True if an output dist sends rows by an all-to-all."""
    return isinstance(output_dist, (TwPooledEmbeddingDist, TwSequenceEmbeddingDist, RwSequenceEmbeddingDist))


def get_output_group(output_dist: Any) -> dist.ProcessGroup | None:
    """Process group of an output dist that sends by an all-to-all; None for others."""
    senders = _output_senders(output_dist)
    return senders[0]._pg if senders else None


def set_output_group(output_dist: Any, group: dist.ProcessGroup) -> None:
    """Set the process group of an output dist that sends by an all-to-all."""
    for sender in _output_senders(output_dist):
        sender._pg = group


def _output_senders(output_dist: Any) -> list[Any]:
    """Objects that hold the group: the output dist, if it makes all-to-alls when it first sends, and those made."""
    if not sends_by_all_to_all(output_dist):
        return []
    holders = (output_dist, output_dist._dist, getattr(output_dist, "_variable_dist", None))
    return [holder for holder in holders if hasattr(holder, "_pg")]


def get_output_group_and_codecs(all_to_all: Any) -> tuple[dist.ProcessGroup, QuantizedCommCodecs | None]:
    """Process group and codecs of an all-to-all of outputs."""
    return all_to_all._pg, all_to_all._codecs


def pooled_columns_by_rank(output_dist: Any) -> list[list[int]]:
    """Columns of each feature on each rank, of an output dist with a ``PooledEmbeddingsAllToAll``."""
    columns: list[list[int]] = output_dist._emb_dim_per_rank_per_feature
    return columns


# ---------------------------------------------------------------------- input dists


def create_input_dists_keeping_ids(module: Any, features: KeyedJaggedTensor) -> None:
    """Create the row-wise input dists of a sharded module, if it has none yet, such that ids are sent unchanged."""
    if not module._has_uninitialized_input_dist:
        return
    module._create_input_dist(features.keys())
    module._has_uninitialized_input_dist = False
    if features.variable_stride_per_key() and hasattr(module, "_create_inverse_indices_permute_indices"):
        module._create_inverse_indices_permute_indices(features.inverse_indices_or_none())
    for input_dist in module._input_dists:
        # With a block size of 0 FBGEMM uses the id modulo the number of ranks.
        input_dist._feature_block_sizes_tensor.zero_()
        input_dist._keep_original_indices = True


def get_input_dist_all_to_alls(module: nn.Module) -> list[KJTAllToAll]:
    """All-to-alls of the input dists of a sharded module. TorchRec creates them in the first ``input_dist`` call."""
    all_to_alls: dict[int, KJTAllToAll] = {}
    for child in module.modules():
        for input_dist in getattr(child, "_input_dists", ()):  # a plain list: not among the child's modules
            all_to_all = getattr(input_dist, "_dist", None)
            if isinstance(all_to_all, KJTAllToAll):
                all_to_alls[id(all_to_all)] = all_to_all
    return list(all_to_alls.values())


def get_all_to_all_group(all_to_all: KJTAllToAll) -> dist.ProcessGroup:
    """Process group of an all-to-all returned by :func:`get_input_dist_all_to_alls`."""
    group: dist.ProcessGroup = all_to_all._pg
    return group


def get_all_to_all_splits_and_stagger(all_to_all: KJTAllToAll) -> tuple[list[int], int]:
    """Number of keys that an all-to-all sends to each rank, and its stagger: the number of nodes that it crosses."""
    return list(all_to_all._splits), all_to_all._stagger


def permute_segments(
    values: Tensor, sizes: Tensor, order: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Permute segments of *values*, and of *weights*. The host does not read their *sizes*."""
    permuted: tuple[Tensor, Tensor | None] = _permute_tensor_by_segments(values, sizes, order, weights, values.numel())
    return permuted
