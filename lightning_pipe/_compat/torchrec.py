"""Private names of TorchRec.

TorchRec has no public way to put other tensors under a ``KeyedJaggedTensor``'s keys without its caches being lost, none
from a sharded module to its lookups, kernels and input dists, and none to send the splits of several modules together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable
from torchrec.distributed.train_pipeline import tracing
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

K = TypeVar("K", bound=KeyedJaggedTensor)
leaf_module_names = tracing._get_leaf_module_names

# ---------------------------------------------------------------------- features


def put_tensors(features: KeyedJaggedTensor, **tensors: Any) -> None:
    """Replace tensors of *features* in place: ``values``, ``weights``, ``lengths``, ``offsets``, ``inverse_indices``.

    Jagged tensors of single features, which TorchRec has cut and kept, are dropped. Other caches stay.
    """
    for name, tensor in tensors.items():
        setattr(features, f"_{name}", tensor)
    features._jt_dict = None


def with_tensors(features: K, **tensors: Any) -> K:
    """A shallow copy of *features* with other tensors: see :func:`put_tensors`."""
    copied: K = object.__new__(type(features))  # as copy.copy, in half the time
    copied.__dict__.update(features.__dict__)
    put_tensors(copied, **tensors)
    return copied


def same_tensors(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> bool:
    """Whether both hold the same tensors; none is computed for the answer."""
    names = ("_values", "_weights", "_lengths", "_offsets")
    return all(getattr(one, name) is getattr(other, name) for name in names)


# ---------------------------------------------------------------------- sharded modules


def group_of(module: nn.Module) -> dist.ProcessGroup | None:
    """The process group that a module is sharded over; None if it does not say."""
    return getattr(getattr(module, "_env", None), "process_group", None)


def module_name(module: nn.Module) -> str:
    """The name of a sharded module in its model, or else of its class."""
    return str(getattr(module, "_module_fqn", None) or type(module).__name__)


def table_configs(module: nn.Module) -> Iterator[BaseEmbeddingConfig]:
    """The tables of a sharded module and of the ones inside it."""
    for child in module.modules():
        yield from getattr(child, "_embedding_bag_configs", None) or getattr(child, "_embedding_configs", None) or ()


def is_weighted(module: Any) -> bool:
    """Whether a ``ShardedEmbeddingBagCollection`` weighs its features."""
    return bool(module._is_weighted)


def sharding_types(module: nn.Module) -> set[str]:
    """The sharding types of a sharded module's tables, and of the ones inside it."""
    return {kind for child in module.modules() for kind in getattr(child, "_sharding_types", ())}


def take_over_means(module: Any) -> tuple[list[str], list[int]]:
    """Switch off the division of mean-pooled outputs of a ``ShardedEmbeddingBagCollection``.

    Returns:
        The names of its outputs in the order of their columns, and the columns of each.
    """
    module._has_mean_pooling_callback = False
    return module._embedding_names, module._embedding_dims


def feature_processors(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a sharded module's feature processors."""
    processors = getattr(module, "_feature_processors", None)
    return [] if processors is None else list(processors.parameters())


def lookups_of(module: Any) -> list[nn.Module]:
    """The lookups of a sharded module: its own list, of one for each sharding type. A module without any has none."""
    lookups: list[nn.Module] = getattr(module, "_lookups", [])
    return lookups


def kernels_of(module: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """FBGEMM's kernels in the lookups of a sharded module, each with its tables in their order."""
    for lookup in lookups_of(module):
        for kernel in lookup._emb_modules:  # type: ignore[union-attr]  # a ModuleList
            yield kernel.emb_module, kernel._config.embedding_tables


def fast_kernel_of(lookup: Any) -> Any:
    """FBGEMM's kernel of a ``GroupedPooledEmbeddingsLookup``, if it is the only one and nothing is done before it."""
    alone = len(lookup._emb_modules) == 1 and lookup._feature_processor is None
    return lookup._emb_modules[0].emb_module if alone else None


# ---------------------------------------------------------------------- input dists


def make_input_dists_by_id(module: Any, features: KeyedJaggedTensor) -> None:
    """Make the row-wise input dists of a sharded module, if there are none yet, such that ids are sent unchanged.

    Args:
        module: sharded row-wise. Each id goes to the rank that is the id, unsigned, modulo the number of ranks.
        features: of the first batch.
    """
    if not module._has_uninitialized_input_dist:
        return
    module._create_input_dist(features.keys())
    module._has_uninitialized_input_dist = False
    if features.variable_stride_per_key() and hasattr(module, "_create_inverse_indices_permute_indices"):
        module._create_inverse_indices_permute_indices(features.inverse_indices_or_none())
    for input_dist in module._input_dists:
        # With blocks of no rows FBGEMM goes by the id modulo the ranks.
        input_dist._feature_block_sizes_tensor.zero_()
        input_dist._keep_original_indices = True


def all_to_alls_of(module: nn.Module) -> list[KJTAllToAll]:
    """The all-to-alls of a sharded module's input dists. TorchRec makes them at the module's first ``input_dist``."""
    found: dict[int, KJTAllToAll] = {}
    for child in module.modules():
        for input_dist in getattr(child, "_input_dists", ()):  # a plain list: not among the child's modules
            all_to_all = getattr(input_dist, "_dist", None)
            if isinstance(all_to_all, KJTAllToAll):
                found[id(all_to_all)] = all_to_all
    return list(found.values())


def group_of_input_dist(all_to_all: KJTAllToAll) -> dist.ProcessGroup:
    """The process group of one of :func:`all_to_alls_of`."""
    group: dist.ProcessGroup = all_to_all._pg
    return group


def forward_through(all_to_all: KJTAllToAll, group: dist.ProcessGroup) -> KJTAllToAllForward:
    """A forward of *all_to_all* that returns the splits to send, and later sends tensors through *group*."""
    return KJTAllToAllForward(pg=group, splits=all_to_all._splits, stagger=all_to_all._stagger)


def set_splits(request: FusedKJTListSplitsAwaitable, splits: Awaitable[list[list[int]]]) -> None:
    """Let a request that was made without a group, and so has sent nothing, wait for *splits*."""
    request._splits_awaitable = splits


def release_sent(tensors: Awaitable[Any]) -> None:
    """Wait for tensors on their way, and release those that were sent.

    TorchRec holds them until those that have arrived are in order: at that moment there would be three of each.

    Args:
        tensors: of a module's input dist.
    """
    for one in getattr(tensors, "awaitables", ()):
        if isinstance(one, KJTAllToAllTensorsAwaitable) and one._workers > 1:
            for work in one._awaitables:
                work.wait()
            one._awaitables.clear()  # they hold both what was sent and what has arrived
            # Not cleared: with the same list a replay sends once more. Nor is the other's form changed.
            one._input_tensors = []
            nothing: Tensor = one._input.values().new_empty(0)
            one._input = with_tensors(one._input, values=nothing, weights=None)
