"""2D parallelism of tables: groups of ranks that each shard all tables, and average them with each other.

    ranks       0        1      │      2        3
    replica     ──── first ──── │ ──── second ────      shards: exchanges ids and embeddings
    half of the tables   other  │ half of the tables  other
                └─────── the same shard ──────┘         peers: averages it every ``sync_every`` steps

An all-to-all thus stays within a few ranks, whatever the total. The cost is a copy of the tables per replica, and their
average. Dense parameters are not affected: their gradients are averaged over all ranks in every step. TorchRec's
``DMPCollection`` implements the same idea for GPUs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType

from lightning_pipe._compat.torch import EnumerableShardingSpec, ShardedTensor, version_counters_preserved
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.recsys.modules.tables import Table

# Sharding types that TorchRec spreads over all ranks of a node, or from rank 0 on, whatever group it is given.
REFUSED_TYPES = frozenset(
    kind.value for kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD, ShardingType.DATA_PARALLEL)
)
# Kernels whose tensors hold all current rows when the average reads them: no cache has newer values.
_KERNELS = frozenset(kernel.value for kernel in (EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.FUSED_UVM))


@dataclass(frozen=True)
class ReplicaGroups:
    """Process groups of the replica that this rank belongs to, from :func:`make_replica_groups`."""

    count: int  # of replicas, at least 2
    sync_every: int  # number of table steps between two averages
    shards: dist.ProcessGroup  # of the ranks of this replica, which the tables are sharded over
    peers: dist.ProcessGroup  # of the ranks that hold the same shards as this rank, one per replica

    def new_shard_group(self) -> dist.ProcessGroup:
        """Make another group of this replica's ranks. Every rank of the world calls this method."""
        return _create_groups_and_get_own(_split_ranks_into_replicas(self.count))

    @contextmanager
    def limit_local_world_size(self) -> Generator[None, None, None]:
        """Context in which TorchRec counts only the ranks of one replica per node.

        All ranks of the node would be more than the process group has.
        """
        name = "LOCAL_WORLD_SIZE"
        previous = os.environ.get(name)
        os.environ[name] = str(gcd(get_local_size(), self.shards.size()))
        try:
            yield
        finally:
            if previous is None:
                del os.environ[name]
            else:
                os.environ[name] = previous

    def __str__(self) -> str:
        return f"{self.count} replicas of tables, averaged every {self.sync_every} steps"


def make_replica_groups(count: int | None, sync_every: int | None = None) -> ReplicaGroups | None:
    """Divide all ranks into replicas of equal size, of neighboring ranks. Every rank of the world calls this function.

    Args:
        count: number of replicas; None or 1 shards the tables over all ranks.
        sync_every: number of table steps between two averages; None for 1.

    Returns:
        The groups, for :func:`~lightning_pipe.recsys.sharding.shard_model.shard_model`; None for one replica.

    Raises:
        SetupError: a number is invalid, ranks cannot be divided into this number of groups, or another rank has other
            numbers; raised on every rank.
    """
    world = dist.group.WORLD
    numbers = [("replicas", repr(count)), ("sync_every", repr(sync_every))]
    check_agreement(numbers, "number of replicas", world, error_class=SetupError)
    replicas = 1 if count is None else count
    steps = 1 if sync_every is None else sync_every
    for name, number in (("replicas", replicas), ("sync_every", steps)):
        check_whole_number(name, number, 1)
    if replicas == 1:
        return None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks % replicas:
        raise SetupError(
            f"replicas must be a divisor of the number of ranks, {ranks}, got {replicas}. Set replicas to a divisor of"
            f" {ranks}."
        )
    shards = _create_groups_and_get_own(_split_ranks_into_replicas(replicas))
    peers = _create_groups_and_get_own(list(zip(*_split_ranks_into_replicas(replicas), strict=True)))
    return ReplicaGroups(replicas, steps, shards, peers)


def _split_ranks_into_replicas(count: int) -> list[range]:
    """Ranks of each replica. They are neighbors, so they share a node if it has enough ranks."""
    size = dist.get_world_size() // count
    return [range(first, first + size) for first in range(0, count * size, size)]


def _create_groups_and_get_own(groups: Sequence[Collection[int]]) -> dist.ProcessGroup:
    """Make all groups, in order, on every rank, and return the group that this rank is in."""
    new_groups = [new_group(list(ranks)) for ranks in groups]
    own_group = next(group for group, ranks in zip(new_groups, groups, strict=True) if dist.get_rank() in ranks)
    assert isinstance(own_group, dist.ProcessGroup)
    return own_group


# ---------------------------------------------------------------------- plans


def check_replicable(where: str, sharding_types: Sequence[str] | None, table: Table) -> None:
    """Check that a table can be sharded in this way inside each replica."""
    if table.is_dynamic or table.maps_ids:
        kind = "is a dynamic table" if table.is_dynamic else "maps ids to rows (managed collision)"
        raise SetupError(
            f"table {table.name} {kind} and cannot have replicas: each replica would hold rows of other ids, so they"
            " cannot be averaged. Remove replicas, or use a table of fixed size without a map."
        )
    wrong = sorted(REFUSED_TYPES & set(sharding_types or ()))
    if wrong:
        raise SetupError(
            f"{where} names {', '.join(wrong)} for table {table.name}, which TorchRec spreads over all ranks, while"
            " each replica of the tables has a part of the ranks. Use table_wise, row_wise, column_wise or"
            " table_column_wise, or remove replicas."
        )


def place_plan_on_replica(plan: ShardingPlan, tables: Sequence[Table], groups: ReplicaGroups) -> ShardingPlan:
    """Copy the plan of one replica, over ranks from 0, with its shards on the world's ranks of this rank's replica."""
    for table in tables:
        sharding = _sharding_of(plan, table)
        check_replicable("the sharding plan", [sharding.sharding_type], table)
        if sharding.compute_kernel not in _KERNELS:
            raise SetupError(
                f"the sharding plan gives table {table.name} the compute kernel {sharding.compute_kernel}, whose cache"
                f" is not averaged over the {groups.count} replicas of tables. Use fused or fused_uvm (constraints:"
                " compute_kernels)."
            )
    placed = copy.deepcopy(plan)
    ranks = dist.get_process_group_ranks(groups.shards)
    for table in tables:
        sharding = _sharding_of(placed, table)
        spec = sharding.sharding_spec
        if isinstance(spec, EnumerableShardingSpec):
            for index, shard in enumerate(spec.shards):
                rank, device = shard.placement.rank(), shard.placement.device()  # type: ignore[union-attr]
                assert rank is not None
                shard_placement = placement(device.type, ranks[rank], get_local_size())
                spec.shards[index] = type(shard)(shard.shard_offsets, shard.shard_sizes, shard_placement)
    return placed


def _sharding_of(plan: ShardingPlan, table: Table) -> ParameterSharding:
    module_plan = plan.get_plan_for_module(table.module_name)
    assert isinstance(module_plan, EmbeddingModuleShardingPlan)
    return module_plan[table.config.name]


# ---------------------------------------------------------------------- the average


def refuse_clipping(replicas: ReplicaAverage | None) -> None:
    """Refuse a norm over all gradients, as used for clipping."""
    if replicas is not None:
        raise SetupError(
            f"gradients cannot be clipped with {replicas.groups.count} replicas of tables: each replica steps with the"
            " gradients of its own ranks, so they have no common norm. Remove clipping, or remove replicas."
        )


class ReplicaAverage:
    """Averages the tables and the states of their optimizers over the replicas, every ``sync_every`` steps."""

    def __init__(self, groups: ReplicaGroups, states: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self.groups = groups
        self.steps = 0  # of the tables since the last average
        self._states = states
        self._tensors: list[torch.Tensor] | None = None

    def step(self) -> None:
        """Count a step of the tables, and average if it is due. Every rank calls it, in the same order."""
        self.steps += 1
        if self.steps >= self.groups.sync_every:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Average now, unless no step was made since the last average. Every rank calls it."""
        if not self.steps:
            return
        self.steps = 0
        if self._tensors is None:
            self._tensors = [tensor for state in self._states() for tensor in _shards(state)]
        # Lookups made ahead may still run backward, which changes rows but does not read them.
        with version_counters_preserved(tuple(self._tensors)):
            works = [dist.all_reduce(tensor, group=self.groups.peers, async_op=True) for tensor in self._tensors]
            for tensor, work in zip(self._tensors, works, strict=True):
                if work is not None:
                    work.wait()
                tensor.div_(self.groups.count)


def _shards(state: Any) -> list[torch.Tensor]:
    """This rank's shards at any depth, in the order of the state dict, which is equal on all peers: plans are equal."""
    if isinstance(state, ShardedTensor):
        return [shard.tensor.detach() for shard in state.local_shards()]
    if isinstance(state, Mapping):
        return [tensor for value in state.values() for tensor in _shards(value)]
    return []
