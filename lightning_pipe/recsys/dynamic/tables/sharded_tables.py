"""Dynamic modules as TorchRec sharded modules: ids are distributed over ranks, with an additional stage, the prefetch.

input_dist        mixed ids to the ranks that own them       (TorchRec's row-wise input dist, by id modulo ranks)
prefetch          ids ──► slots; missing rows are read from the store, evicted ones written back
compute           TorchRec's fused lookup of slots, in tables as large as the rank's part of the cache
output_dist       TorchRec's row-wise output dist
backward          TorchRec's fused optimizers, in place in the cache
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import (
    copy_kjt_with_tensors,
    create_input_dists_keeping_ids,
    iter_lookup_kernels_with_tables,
)
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.ranks.object_collectives import all_reduce_any_async, raise_gathered
from lightning_pipe.engine.runtime.record_stream import record_stream
from lightning_pipe.recsys.dynamic.tables.id_mixing import mix_ids
from lightning_pipe.recsys.dynamic.tables.row_tables import BatchRows, RowTables, end_lookups
from lightning_pipe.recsys.kernels.row_adam import get_attached_row_optimizer
from lightning_pipe.recsys.modules.dynamic_modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    DynamicTable,
    RowStorageOptions,
)
from lightning_pipe.recsys.modules.output_order import (
    OrderedEmbeddingBagCollection,
    OrderedEmbeddingCollection,
    OrderedSharder,
)


class ShardedDynamicModule:
    """Common part of pooled and sequence modules: slots replace ids between the input dist and the lookup."""

    dynamic_tables: dict[str, DynamicTable]
    storage: RowStorageOptions
    _rows: RowTables | None = None

    def __init__(self, module: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(module, *arguments, **named)  # type: ignore[call-arg]  # TorchRec's class is the next base
        self.dynamic_tables = module.dynamic_tables
        self.storage = module.storage
        self._unclaimed: list[BatchRows] = []

    @property
    def row_tables(self) -> RowTables:
        """Caches of the tables."""
        if self._rows is None:
            raise SetupError(
                f"this {type(self).__name__} has no rows because it was sharded by TorchRec alone. Shard the model with"
                " lightning_pipe.recsys.shard_model, or train it under a recsys strategy"
            )
        return self._rows

    def table_columns(self) -> Iterator[tuple[str, list[str], list[torch.Tensor]]]:
        """Yield this rank's tables in the order of the distributed features."""
        for fused, tables in iter_lookup_kernels_with_tables(self):
            row_adam = get_attached_row_optimizer(fused)
            states = fused.split_optimizer_states() if row_adam is None else row_adam.states
            for index, (table, weights) in enumerate(zip(tables, fused.split_embedding_weights(), strict=True)):
                tensors = [weights, *(states[index] if states else ())]
                yield table.name, list(table.feature_names), [tensor.detach() for tensor in tensors]

    def set_row_tables(self, rows: RowTables) -> None:
        """Set the caches."""
        self._rows = rows

    # ------------------------------------------------------------------ the steps of a batch

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Start TorchRec's input dist with mixed ids."""
        mixed = copy_with_mixed_ids(features)
        # Created here because TorchRec's creation would warn about ids beyond the rows of the cache.
        create_input_dists_keeping_ids(self, mixed)
        awaitable: Awaitable[Awaitable[KJTList]] = super().input_dist(ctx, mixed)  # type: ignore[misc]
        return awaitable

    def prefetch(self, ctx: Any, dist_input: KJTList, forward_stream: torch.Stream | None = None) -> None:
        """Cache the batch's rows. Does not communicate and has no effect on training results.

        An error is stored and raised at the lookup, on all ranks together.
        """
        assert len(dist_input) == 1
        ctx.rows = self.row_tables.prefetch(dist_input[0])

    def replay_prefetch(self, ctx: Any, dist_input: KJTList) -> None:
        """Replay a prefetch, whose rows stay in the cache between replays."""
        ctx.rows = self.row_tables.prefetch(dist_input[0], replay=True)

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[Any]:
        """Run TorchRec's lookup and output dist with slots.

        With gradients enabled, the batch is counted, and its rows stay pinned until they are claimed with
        :meth:`take_pinned_rows` and ended, or until the next such call.

        If the rows of any rank could not be fetched, the wait for the output raises an InputError on every rank. The
        ranks exchange that during the lookup and the output dist, which a rank without its rows takes part in.
        """
        if getattr(ctx, "rows", None) is None:
            self.prefetch(ctx, input)
        rows: BatchRows = ctx.rows
        ctx.rows = None
        trains = torch.is_grad_enabled()
        if trains:
            # Rows of an earlier call that were never claimed. Their backward has run by now.
            end_lookups(self._unclaimed, trained=True)
            self._unclaimed = [rows]
            self.row_tables.commit_if_due()
        error = _begin_batch_or_get_error(rows, trains)
        any_failed = all_reduce_any_async(error is not None, self.row_tables.group)
        slots = rows.features
        if slots is None:
            slots = copy_kjt_with_tensors(input[0], values=torch.zeros_like(input[0].values()))
        record_stream(slots)
        output: LazyAwaitable[Any] = super().compute_and_output_dist(ctx, KJTList([slots]))  # type: ignore[misc]
        if not trains:
            rows.release(trained=False)

        def raise_if_any_rank_failed(embeddings: Any) -> Any:
            if any_failed():
                end_lookups(self.take_pinned_rows(), trained=False)
                raise_gathered(error, "", self.row_tables.group, InputError)
            return embeddings

        output.callbacks.append(raise_if_any_rank_failed)
        return output

    def take_pinned_rows(self) -> list[BatchRows]:
        """Return the rows of the last call, unless already claimed. The caller runs the backward and ends them."""
        rows, self._unclaimed = self._unclaimed, []
        return rows


class ShardedDynamicEmbeddingBagCollection(ShardedDynamicModule, OrderedEmbeddingBagCollection):
    """Sharded pooled embeddings of any int64 ids."""


class ShardedDynamicEmbeddingCollection(ShardedDynamicModule, OrderedEmbeddingCollection):
    """Sharded sequence embeddings of any int64 ids."""


def _begin_batch_or_get_error(rows: BatchRows, trains: bool) -> Exception | None:
    """Begin a batch, or prepare it for a lookup without training; return its error on this rank, from now or before."""
    if rows.error is not None:
        return rows.error
    try:
        if trains:
            rows.begin_batch_and_count_ids()
        else:
            rows.reset_expired_rows()
    except Exception as error:  # a user's function of initial values may raise any exception
        return error
    return None


def copy_with_mixed_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Copy of *features* with mixed ids; all other tensors are shared."""
    ids = features.values()
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"ids of a dynamic table are {ids.dtype}; expected int64 or int32. Convert the ids")
    return copy_kjt_with_tensors(features, values=mix_ids(ids.to(torch.int64)))


# ---------------------------------------------------------------------- sharders


class _DynamicModuleSharder(OrderedSharder):
    """Sharding options of dynamic modules: row-wise, with fused kernels."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    def kernel_arguments(self) -> dict[str, Any]:
        """Those of the other sharders, without a check of bounds and without random numbers."""
        # Slots from the cache are always valid. FBGEMM's bounds check takes a tenth of the lookup's time. Stochastic
        # rounding of FP16 rows on a GPU depends on their slots, and so on the plan and the size of the cache.
        overrides = {"bounds_check_mode": BoundsCheckMode.NONE, "stochastic_rounding": False}
        return {**(super().kernel_arguments() or {}), **overrides}


class DynamicEmbeddingBagCollectionSharder(_DynamicModuleSharder, EmbeddingBagCollectionSharder):
    """Sharder of ``DynamicEmbeddingBagCollection``."""

    kind = ShardedDynamicEmbeddingBagCollection
    module_type = DynamicEmbeddingBagCollection


class DynamicEmbeddingCollectionSharder(_DynamicModuleSharder, EmbeddingCollectionSharder):
    """Sharder of ``DynamicEmbeddingCollection``."""

    kind = ShardedDynamicEmbeddingCollection
    module_type = DynamicEmbeddingCollection
