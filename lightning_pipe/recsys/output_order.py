"""Sharded modules whose outputs have the order of the unsharded ones.

TorchRec orders a sharded module's outputs by where its tables lie. A model that asks for each output by its key does
not notice; one that takes ``KeyedTensor.values()`` for one feature vector would silently feed its dense layers permuted
columns, and other ones for another number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

__all__ = ["OrderedEmbeddingBagCollection", "OrderedEmbeddingCollection"]


def _names(configs: list[Any]) -> list[str]:
    return [name for names in get_embedding_names_by_table(configs) for name in names]


class OrderedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """Pooled embeddings with their columns in the unsharded order; a copy of the output where TorchRec's differs."""

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]) -> LazyAwaitable[KeyedTensor]:
        """TorchRec's, in order."""
        return self._ordered(super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """TorchRec's, in order."""
        return self._ordered(super().compute_and_output_dist(ctx, input))

    def _ordered(self, awaitable: LazyAwaitable[KeyedTensor]) -> LazyAwaitable[KeyedTensor]:
        awaitable.callbacks.append(self._reorder)
        return awaitable

    def _reorder(self, found: KeyedTensor) -> KeyedTensor:
        wanted = _names(self._embedding_bag_configs)
        keys = found.keys()
        if keys == wanted:
            return found
        lengths = found.length_per_key()
        columns = dict(zip(keys, zip(lengths, found.values().split(lengths, dim=1), strict=True), strict=True))
        return KeyedTensor(
            keys=wanted,
            length_per_key=[columns[name][0] for name in wanted],
            values=torch.cat([columns[name][1] for name in wanted], dim=1),
        )


class OrderedEmbeddingCollection(ShardedEmbeddingCollection):
    """Sequence embeddings as a dictionary in the unsharded order."""

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """TorchRec's, in order."""
        return self._ordered(super().output_dist(ctx, output))

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """TorchRec's, in order."""
        return self._ordered(super().compute_and_output_dist(ctx, input))

    def _ordered(self, awaitable: LazyAwaitable[dict[str, JaggedTensor]]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        awaitable.callbacks.append(lambda found: {name: found[name] for name in _names(self._embedding_configs)})
        return awaitable
