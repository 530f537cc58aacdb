"""Sharded managed-collision modules.

Ids are mapped to rows on the rank of the rows, when the rows are looked up, as in TorchRec. The map and the rows that
it evicts are part of the training state, so a lookup must not run before the checkpoint of the previous batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.managed_collision import IdMapShard, sharded_id_maps
from lightning_pipe._compat.torchrec import (
    copy_kjt_with_tensors,
    iter_lookup_kernels_with_tables,
    table_configs,
    unwrap_managed_collision_module,
)
from lightning_pipe.recsys.modules.output_order import drop_added_sample_from_output

_TOLD = "_lightning_pipe_told_of_evictions"


def set_eviction_hook(module: nn.Module, hook: Callable[[Any, int, torch.Tensor], None] | None) -> None:
    """Let a sharded module call *hook* when it has evicted rows, in place of an earlier function."""
    if hook is None:
        module.__dict__.pop(_TOLD, None)
    else:
        module.__dict__[_TOLD] = hook


class _ShardedManagedCollisionMixin:
    """What both kinds of modules do in another way than TorchRec."""

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """TorchRec's input dist, of features in the form of the first batch, with ids of 64 bits."""
        features = unwrap_managed_collision_module(self).prepare_features(ctx, features)
        if features.values().dtype != torch.int64:
            features = copy_kjt_with_tensors(features, values=features.values().long())
        return super().input_dist(ctx, features)  # type: ignore[misc]

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        """TorchRec's remapping, eviction and lookup; a filter of ids draws the same numbers in every run."""
        maps = list(sharded_id_maps("", self))  # type: ignore[arg-type]
        with _fork_rng_for_id_map(maps[0]) if any(id_map.has_id_filter for id_map in maps) else nullcontext():
            output = super().compute(ctx, dist_input)  # type: ignore[misc]
        for id_map in maps:
            id_map.defer_history_sizing()
        return output

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """TorchRec's output dist. A batch without samples has remapped features of none."""
        embeddings, remapped = super().output_dist(ctx, output)  # type: ignore[misc]
        drop_added_sample_from_output(ctx, remapped)
        return embeddings, remapped

    def _evict(self, evictions_per_table: Mapping[str, torch.Tensor | None]) -> None:
        _reset_rows(self, evictions_per_table)  # type: ignore[arg-type]


class ManagedCollisionBags(_ShardedManagedCollisionMixin, ShardedManagedCollisionEmbeddingBagCollection):
    """Pooled embeddings of remapped ids, with correct means."""


class ManagedCollisionSequences(_ShardedManagedCollisionMixin, ShardedManagedCollisionEmbeddingCollection):
    """Sequence embeddings of remapped ids."""


@contextmanager
def _fork_rng_for_id_map(id_map: IdMapShard) -> Iterator[None]:
    """Context in which random numbers depend only on a map and its number of batches, and are no one else's."""
    with torch.random.fork_rng(devices=[id_map.step_counter[1].device] if id_map.step_counter[1].is_cuda else []):
        torch.manual_seed(id_map.evicted_row_seed())
        yield


@torch.no_grad()
def _reset_rows(module: nn.Module, evicted: Mapping[str, torch.Tensor | None]) -> None:
    """Give rows new values by the table's ``init_fn``, and clear the states of their optimizer.

    TorchRec's own method leaves the states of all optimizers but row-wise Adagrad to the next id. And it draws from the
    global generator, whose values depend on the order of lookups: modules of the first batch look up when they are
    called. Here the values depend on the table, its number of batches and the rank's first row only.
    """
    maps = {id_map.table: id_map for id_map in sharded_id_maps("", module)}
    configs = {config.name: config for config in table_configs(module)}
    for kernel, tables in iter_lookup_kernels_with_tables(module):
        states = kernel.split_optimizer_states()
        for index, (table, weights) in enumerate(zip(tables, kernel.split_embedding_weights(), strict=True)):
            rows = evicted.get(table.name)
            if rows is None or not rows.numel():
                continue
            fresh = weights.new_empty((len(rows), weights.shape[1]))
            with _fork_rng_for_id_map(maps[table.name]):
                init_fn = configs[table.name].init_fn  # the kernel's own config has another
                assert init_fn is not None
                filled = init_fn(fresh)
                fresh = fresh if filled is None else filled
            weights[rows] = fresh
            if (hook := module.__dict__.get(_TOLD)) is not None:
                hook(kernel, index, rows)
            for state in states[index] if states else ():
                if state.dim() and state.shape[0] == weights.shape[0]:
                    state[rows] = 0
