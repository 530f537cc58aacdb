"""Sharding plans: from TorchRec's planner on one rank, the same plan in every run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from lightning_pipe._compat.managed_collision import IdMapEmbeddingEnumerator
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.ranks.object_collectives import run_on_rank
from lightning_pipe.recsys.modules.tables import Table
from lightning_pipe.recsys.sharding.sharders import check_sharding_types

logger = logging.getLogger(__name__)

_TYPE_ORDER = [sharding_type.value for sharding_type in ShardingType]
_RESERVED_PART = 0.15  # of a rank's memory, for memory that no estimate covers
_COPIES_OF_DENSE = 6  # parameters, two optimizer states, gradients and their reduction buckets


class OrderedEnumerator(IdMapEmbeddingEnumerator):
    """Lists sharding options in a fixed order.

    TorchRec's enumerator iterates over sets of strings, whose order differs from run to run, and the planner takes the
    first of equally good plans.
    """

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Return TorchRec's options grouped by table, with sharding types in the order of ``ShardingType``."""
        options = super().enumerate(module, sharders)
        tables = {name: index for index, name in enumerate(dict.fromkeys(option.fqn for option in options))}
        return sorted(
            options,
            key=lambda o: (tables[o.fqn], _TYPE_ORDER.index(o.sharding_type), o.compute_kernel),
        )


def make_sharding_plan(
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    constraints: dict[str, ParameterConstraints],
    topology: Topology,
    batch_size: int | None,
    group: dist.ProcessGroup,
) -> ShardingPlan:
    """Plan on rank 0, and send the plan, or the planner's error, to every rank."""
    return run_on_rank(
        lambda: _planner(module, constraints, topology, batch_size).plan(module, sharders),
        "TorchRec's planner found no plan for these tables. Relax the constraints, or give the topology more memory"
        " (hbm_cap and ddr_cap, in bytes per rank)",
        group,
    )


def _planner(
    module: nn.Module, constraints: dict[str, ParameterConstraints], topology: Topology, batch_size: int | None
) -> EmbeddingShardingPlanner:
    """TorchRec's default planner, without warnings about its own estimates."""
    dense_bytes = sum(
        parameter.numel() * parameter.element_size()
        for child in module.modules()
        if not any(isinstance(child, kind) for kind in (nn.Embedding, nn.EmbeddingBag))
        for parameter in child.parameters(recurse=False)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        reservation = HeuristicalStorageReservation(
            _RESERVED_PART, dense_tensor_estimate=max(1, dense_bytes * _COPIES_OF_DENSE)
        )
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=OrderedEnumerator(topology, batch_size or BATCH_SIZE, constraints),
        storage_reservation=reservation,
        constraints=constraints,
        debug=False,
    )


def check_sharding_plan(plan: ShardingPlan, tables: Sequence[Table]) -> dict[str, str]:
    """Check that all tables can be trained under a plan, which may be the user's."""
    types: dict[str, str] = {}
    for table in tables:
        module_plan = plan.get_plan_for_module(table.module_name)
        sharding = module_plan.get(table.config.name) if isinstance(module_plan, EmbeddingModuleShardingPlan) else None
        if not isinstance(sharding, ParameterSharding):
            raise SetupError(
                f"the sharding plan has no entry for table {table.config.name} of module"
                f" {table.module_name or 'given'}. Add its sharding to the plan."
            )
        assert table.optimizer is not None
        check_sharding_types(f"the sharding plan of table {table.name}", [sharding.sharding_type], table)
        replicated = sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        if not replicated and sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value:
            raise SetupError(
                f"the sharding plan gives table {table.name} the compute kernel dense with {sharding.sharding_type},"
                " which no sparse optimizer trains. Use the compute kernel fused."
            )
        shards = getattr(sharding.sharding_spec, "shards", ())
        if narrow := [columns for shard in shards if (columns := shard.shard_sizes[1]) % 4]:
            raise SetupError(
                f"table {table.name} has embedding_dim {table.config.embedding_dim}, of which a rank gets {narrow[0]}"
                f" columns under {sharding.sharding_type}, but FBGEMM's kernels need a multiple of 4. Change"
                " embedding_dim, or min_partition if columns are split. data_parallel allows any number in an"
                " EmbeddingBagCollection."
            )
        if table.maps_ids and any(shard.shard_sizes[0] < 2 for shard in shards):
            raise SetupError(
                f"table {table.name} must have at least two rows on each of its {len(shards)} ranks, one of them for"
                f" ids without a row, got {table.config.num_embeddings} rows. Give it more rows."
            )
        if sharding.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
            if table.maps_ids:
                raise SetupError(
                    f"the sharding plan gives table {table.name} the compute kernel fused_uvm_caching, whose cache does"
                    " not see that rows are evicted. Use fused or fused_uvm for tables of a managed-collision module."
                )
            if table.is_frozen:
                raise SetupError(
                    f"the sharding plan gives the frozen table {table.name} the compute kernel fused_uvm_caching, whose"
                    " cache releases rows in a backward. Use fused or fused_uvm for frozen tables."
                )
        if table.optimizer.row_wise_state and _splits_columns(sharding, table):
            logger.warning(
                "table %s is split by columns (%s), so its optimizer %s keeps one state per row and shard and differs"
                " slightly from an unsharded table's. If that matters, remove %s from the table's sharding_types.",
                table.name,
                sharding.sharding_type,
                table.optimizer.name,
                sharding.sharding_type,
            )
        types[table.name] = sharding.sharding_type
    return types


def _splits_columns(sharding: ParameterSharding, table: Table) -> bool:
    shards = getattr(sharding.sharding_spec, "shards", ())
    return any(shard.shard_sizes[1] < table.config.embedding_dim for shard in shards)
