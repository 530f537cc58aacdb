"""Ids of sequence tables sent once: each rank sends an id of a table once per batch, however often it occurs.

    ids    7 3 7 | 3 3 9          of the samples
    sent   3 7 9                  input dist; output dist and its backward carry one row and one gradient for each
    rows   1 0 1 | 0 0 2          places of the samples' rows among those that arrive

The backward of copying a row to its places adds up the gradients of the copies, so the ranks of the rows get sums.

TorchRec has this for sequence tables (``use_index_dedup``), with a kernel of FBGEMM that does not exist on a CPU, and
that turns an id outside of its table into a row of the next table. The function here has neither limit. Pooled tables
need every occurrence of an id on the rank that pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import tables_by_sharding
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.modules.output_order import OrderedEmbeddingCollection
from lightning_pipe.recsys.modules.tables import Table


def modules_to_deduplicate(dedup: bool | Sequence[str], tables: Sequence[Table]) -> frozenset[str]:
    """Return the names of the modules that send each id once, or raise SetupError for one that cannot."""
    modules = {table.module_name: table for table in tables}
    able = [name for name, table in modules.items() if table.module_type is EmbeddingCollection]
    if not dedup:
        return frozenset()
    if dedup is True:
        if not able:
            raise SetupError(
                "dedup is True, but the model has no EmbeddingCollection, the only module that can send each id once."
                " Remove dedup."
            )
        return frozenset(able)
    if not isinstance(dedup, list | tuple) or not all(isinstance(name, str) for name in dedup):
        raise SetupError(f"dedup is {dedup!r}; expected True, False, or a list of names of EmbeddingCollections")
    fix = f"Name some of {', '.join(able)} instead" if able else "Remove dedup: the model has none"
    for name in dedup:
        if name in able:
            continue
        table = modules.get(name)
        if table is None:
            why = ", which is no embedding module of the model"
        elif table.is_dynamic or table.maps_ids:
            why = (
                f" of class {table.module_type.__name__}, which maps ids to rows, and counts them, after they are sent"
            )
        else:
            why = f" of class {table.module_type.__name__}, which needs every occurrence of an id where it pools"
        raise SetupError(f"dedup names {name!r}{why}; expected EmbeddingCollections. {fix}.")
    return frozenset(dedup)


class DeduplicatedEmbeddingCollection(OrderedEmbeddingCollection):
    """Sequence embeddings whose ids are sent once."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, use_index_dedup=True, **named)

    def _dedup_indices(
        self, ctx: EmbeddingCollectionContext, input_feature_splits: list[KeyedJaggedTensor]
    ) -> list[KeyedJaggedTensor]:
        """Replace TorchRec's method. TorchRec's awaitable of the output reads what *ctx* gets here."""
        sent = []
        for features, tables in zip(input_feature_splits, tables_by_sharding(self), strict=True):
            unique, places = deduplicate_ids(features, tables)
            ctx.input_features.append(features)
            ctx.reverse_indices.append(places)
            sent.append(unique)
        return sent


def deduplicate_ids(features: KeyedJaggedTensor, tables: Sequence[tuple[int, int]]) -> tuple[KeyedJaggedTensor, Tensor]:
    """Return *features* with each id of a table once, in ascending order, and the place of each id among them.

    *tables* are the number of rows and of features of each table, in the order of the features.
    """
    # Each table has numbers of its own: one before its first row, its rows, and one after its last row. An id outside
    # of its table becomes one of these two and is no row afterwards either.
    starts = list(accumulate((rows + 2 for rows, _ in tables), initial=1))
    parts = features.split([count for _, count in tables])
    numbers = torch.cat(
        [
            part.values().long().clamp(-1, rows) + start
            for part, (rows, _), start in zip(parts, tables, starts, strict=False)
        ]
    )
    unique, places = torch.unique(numbers, return_inverse=True)
    firsts = torch.tensor(starts, device=unique.device)
    counts = torch.searchsorted(unique, firsts - 1).diff()
    ids = unique - firsts[:-1].repeat_interleave(counts, output_size=len(unique))
    # The ids of a table are spread evenly over its lengths: kernels work on the ids of a length one after the other.
    slots = [features.stride() * count for _, count in tables]
    lengths = [(counts[i] + torch.arange(n - 1, -1, -1, device=ids.device)) // n for i, n in enumerate(slots)]
    sent = KeyedJaggedTensor(
        keys=features.keys(),
        values=ids.to(features.values().dtype),
        lengths=torch.cat(lengths).to(features.lengths().dtype),
        stride=features.stride(),
    )
    return sent, places
