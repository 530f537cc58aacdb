"""Dynamic modules as TorchRec's sharded modules: by id over the ranks, with a third split, the prefetch, of their own.

input_dist        ids, mixed, to the ranks that own them     (TorchRec's row-wise input dist, by id modulo ranks)
prefetch          ids ──► slots; rows missing in the cache read from the store, others written back
compute           TorchRec's fused lookup of slots, in tables as large as the rank's part of the cache
output_dist       TorchRec's row-wise one
backward          TorchRec's fused optimisers, in place in the cache
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import kernels_of, make_input_dists_by_id, with_tensors
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.ranks.together import raise_together
from lightning_pipe.recsys.dynamic.tables.batch_rows import BatchRows, end_step
from lightning_pipe.recsys.dynamic.tables.id_mixing import mix
from lightning_pipe.recsys.dynamic.tables.row_tables import RowTables
from lightning_pipe.recsys.kernels.row_optimizer import row_optimizer
from lightning_pipe.recsys.modules.dynamic_modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    DynamicTable,
    Storage,
)
from lightning_pipe.recsys.modules.output_order import OrderedEmbeddingBagCollection, OrderedEmbeddingCollection
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms

__all__ = [
    "DynamicBagSharder",
    "DynamicSequenceSharder",
    "ShardedDynamicEmbeddingBagCollection",
    "ShardedDynamicEmbeddingCollection",
    "ShardedDynamicModule",
]


class ShardedDynamicModule:
    """What is the same of bags and sequences: slots in place of ids between the input dist and the lookup.

    Attributes:
        dynamic_tables: what each table is.
        storage: where rows live.
    """

    dynamic_tables: dict[str, DynamicTable]
    storage: Storage
    _rows: RowTables | None = None

    def __init__(self, module: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(module, *arguments, **named)  # type: ignore[call-arg]  # TorchRec's class beside this one
        self.dynamic_tables = module.dynamic_tables
        self.storage = module.storage
        self._unclaimed: list[BatchRows] = []

    @property
    def rows(self) -> RowTables:
        """The caches.

        Raises:
            SetupError: none were opened.
        """
        if self._rows is None:
            raise SetupError(
                f"this {type(self).__name__} has no rows: it was sharded by TorchRec alone; shard the model with"
                " lightning_pipe.recsys.shard_model, or train it under a recsys strategy"
            )
        return self._rows

    def table_columns(self) -> Iterator[tuple[str, list[str], list[torch.Tensor]]]:
        """This rank's tables in the order of the distributed features.

        Yields:
            the table's name, its features, and its tensors as the kernel holds them: weights, slots x dimensions, and
            the optimiser's states, slots or slots x dimensions.
        """
        for fused, tables in kernels_of(self):
            own = row_optimizer(fused)
            states = fused.split_optimizer_states() if own is None else own.states
            for index, (table, weights) in enumerate(zip(tables, fused.split_embedding_weights(), strict=True)):
                tensors = [weights, *(states[index] if states else ())]
                yield table.name, list(table.feature_names), [tensor.detach() for tensor in tensors]

    def use_rows(self, rows: RowTables | None) -> None:
        """The caches from now on; None to let go of them."""
        self._unclaimed.clear()
        self._rows = rows

    # ------------------------------------------------------------------ the steps of a batch

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """TorchRec's, of mixed ids.

        Raises:
            InputError: ids that are no whole numbers.
        """
        mixed = with_mixed_ids(features)
        # TorchRec's own first time would warn of ids beyond the rows of the cache.
        make_input_dists_by_id(self, mixed)
        awaitable: Awaitable[Awaitable[KJTList]] = super().input_dist(ctx, mixed)  # type: ignore[misc]
        return awaitable

    def prefetch(self, ctx: Any, dist_input: KJTList, forward_stream: torch.Stream | None = None) -> None:
        """Brings the batch's rows into the cache. Needs no other rank, and changes nothing that is trained.

        What goes wrong here is kept for the lookup, where all ranks raise it together.
        """
        assert len(dist_input) == 1
        ctx.rows = self.rows.prefetch(dist_input[0])

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[Any]:
        """TorchRec's, of slots. With grad mode the batch is counted, and its rows wait for :meth:`claim_rows`.

        Raises:
            InputError: on every rank, if the rows of any could not be fetched.
        """
        if getattr(ctx, "rows", None) is None:
            self.prefetch(ctx, input)
        rows: BatchRows = ctx.rows
        ctx.rows = None
        trains = torch.is_grad_enabled()
        if trains:
            # Of a call that nobody served: whatever trained them has run by now.
            end_step(self._unclaimed, trained=True)
            self._unclaimed = [rows]
        raise_together(_begun(rows, trains), "", self.rows.group, InputError)
        assert rows.features is not None
        slots = KJTList([rows.features])
        output: LazyAwaitable[Any] = super().compute_and_output_dist(ctx, slots)  # type: ignore[misc]
        if not trains:
            rows.end(trained=False)
        return output

    def claim_rows(self) -> list[BatchRows]:
        """The rows of the calls since the last claim, for whoever runs their backward to end."""
        rows, self._unclaimed = self._unclaimed, []
        return rows


class ShardedDynamicEmbeddingBagCollection(ShardedDynamicModule, OrderedEmbeddingBagCollection):
    """Pooled embeddings of any ids."""


class ShardedDynamicEmbeddingCollection(ShardedDynamicModule, OrderedEmbeddingCollection):
    """Sequence embeddings of any ids."""


def _begun(rows: BatchRows, trains: bool) -> Exception | None:
    """Begins a batch, or shows its rows; returns what has gone wrong with them on this rank, now or before."""
    if rows.error is not None:
        return rows.error
    try:
        if trains:
            rows.begin()
        else:
            rows.show()
    except Exception as error:  # of users' functions of initial values
        return error
    return None


def with_mixed_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """*features* with mixed ids, in a copy; everything else is shared."""
    ids = features.values()
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"ids of a dynamic table are {ids.dtype}; needed are whole numbers, int64 or int32")
    return with_tensors(features, values=mix(ids.to(torch.int64)))


# ---------------------------------------------------------------------- sharders


class _RowWise:
    """The one way: by id, with fused kernels."""

    fused_params: dict[str, Any] | None

    def __init__(self, comms: QuantizedComms) -> None:
        super().__init__(qcomm_codecs_registry=comms.registry())  # type: ignore[call-arg]  # TorchRec's, beside this one
        self._comms = comms

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    def _arguments(self, params: dict[str, ParameterSharding]) -> dict[str, Any]:
        # Slots come from the cache: a look at each, as FBGEMM takes for ids of users, is a tenth of the lookup's time.
        kernels = {**(self.fused_params or {}), "bounds_check_mode": BoundsCheckMode.NONE}
        return {"fused_params": kernels, "qcomm_codecs_registry": self._comms.registry(params)}


class DynamicBagSharder(_RowWise, EmbeddingBagCollectionSharder):
    """Shards a ``DynamicEmbeddingBagCollection``."""

    @property
    def module_type(self) -> type[DynamicEmbeddingBagCollection]:
        return DynamicEmbeddingBagCollection

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingBagCollection:
        return ShardedDynamicEmbeddingBagCollection(
            module, params, env, device=device, module_fqn=module_fqn, **self._arguments(params)
        )


class DynamicSequenceSharder(_RowWise, EmbeddingCollectionSharder):
    """Shards a ``DynamicEmbeddingCollection``."""

    @property
    def module_type(self) -> type[DynamicEmbeddingCollection]:
        return DynamicEmbeddingCollection

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicEmbeddingCollection:
        return ShardedDynamicEmbeddingCollection(
            module, params, env, device=device, module_fqn=module_fqn, **self._arguments(params)
        )
