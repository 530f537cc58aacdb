"""Shards a module's embedding tables over a process group, in place, and trains every one of them as asked.

``shard_model`` reads as a list of steps: look, agree, plan, shard, fill. What can be wrong on one rank alone is
found before the first step that communicates, and is raised on all ranks. Sharding itself is TorchRec's planner and
``DistributedModelParallel``, without its data parallelism: dense gradients are reduced elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan

from lightning_pipe._compat.torch import set_optimizer_in_backward
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.together import from_rank, gather, raise_together
from lightning_pipe.recsys.dense.dense_values import broadcast_from_first_rank, materialise_dense, unfillable
from lightning_pipe.recsys.dynamic.tables.opening import check_data_type, in_kernel, open_rows
from lightning_pipe.recsys.dynamic.tables.sharded_tables import ShardedDynamicModule
from lightning_pipe.recsys.kernels.table_optimizer import SparseOptimizer, TableOptimizer, resolve_table_optimizer
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms
from lightning_pipe.recsys.modules.tables import Table, find_tables
from lightning_pipe.recsys.sharding.planner_options import read_constraints, read_topology
from lightning_pipe.recsys.sharding.planning import check_plan, make_plan
from lightning_pipe.recsys.sharding.replicas import REFUSED_TYPES, ReplicaGroups, check_replicated, place_on_ranks
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.sharding.sharders import default_sharders
from lightning_pipe.recsys.sharding.table_values import copy_values, fill_with_init_fn, pieces_of, release

__all__ = ["ShardedModel", "shard_model"]


@dataclass(frozen=True)
class _Unsharded:
    """What one rank sees of the module before it is sharded."""

    tables: list[Table]
    parameters: list[nn.Parameter]
    optimizers: list[TableOptimizer]
    constraints: dict[str, ParameterConstraints]
    topology: Topology
    batch_size: int | None
    dense: list[str]
    comms: QuantizedComms
    replicas: ReplicaGroups | None

    def signature(self) -> list[str]:
        """What ranks must agree on: a line for each property of a table, and for each dense tensor."""
        described = zip(self.tables, self.parameters, self.optimizers, strict=True)
        tables = [line for one in described for line in _describe(*one)]
        replicas = [] if self.replicas is None else [str(self.replicas)]
        return [*tables, *self.dense, f"embeddings sent as {self.comms}", *replicas]


def shard_model(
    module: nn.Module,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    sparse_optimizer: SparseOptimizer | Mapping[str, Any] | None = None,
    sharding_plan: ShardingPlan | None = None,
    constraints: Mapping[str, Mapping[str, Any] | ParameterConstraints] | None = None,
    topology: Mapping[str, Any] | Topology | None = None,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    quantized_comms: QuantizedComms | Mapping[str, Any] | None = None,
    seed: int | None = None,
    replicas: ReplicaGroups | None = None,
) -> ShardedModel:
    """Shards the TorchRec modules inside a module, in place. Every rank of the group calls it.

    Tables keep the values they hold (rank 0's); those on the meta device get their ``init_fn``'s, the same for one seed
    on any number of ranks. Dense parameters and buffers become rank 0's; those on the meta device are filled by
    ``reset_parameters``. The global random state is left as it is. The unsharded tables are freed: a parameter that the
    caller still holds is empty afterwards.

    Args:
        module: holds unsharded ``EmbeddingBagCollection``, ``EmbeddingCollection`` or
            ``FeatureProcessedEmbeddingBagCollection`` modules anywhere.
        device: where tables and dense parameters live.
        group: the process group to shard over, also used by the output exchange and its backward; all ranks.
        sparse_optimizer: optimiser of the tables that have none by TorchRec's ``apply_optimizer_in_backward``.
        sharding_plan: TorchRec's plan; rank 0's is used. Without one TorchRec's planner makes it.
        constraints: for the planner, by table; see ``planning.read_constraints``.
        topology: for the planner; see ``planning.read_topology``.
        sharders: TorchRec sharders to use instead of this project's.
        quantized_comms: what embeddings and their gradients are on their way; see ``quantized_comms.QuantizedComms``.
            Sharders of the caller's have codecs of their own.
        seed: of the tables and dense parameters on the meta device; ``torch.initial_seed()`` where none is given.
            Rank 0's counts.
        replicas: groups of ranks that each shard all tables, and average them with one another; see
            ``replicas.make_replica_groups``. The plan and the topology are then those of one group, and ``group`` is of
            all ranks. Without, all ranks shard the tables.

    Raises:
        SetupError: on every rank, if any rank finds something that cannot be sharded or trained as asked.
    """
    found, error = None, None
    per_node = nullcontext if replicas is None else replicas.counted_per_node
    try:
        comms = _look_at_comms(quantized_comms, sharders)
        with per_node():
            found = _look(module, device, group, sparse_optimizer, constraints, topology, comms, replicas)
    except Exception as caught:  # of whatever kind: the other ranks wait for an answer
        error = caught
    raise_together(error, "the module cannot be sharded", group)
    assert found is not None
    check_agreement([(line, "") for line in found.signature()], "module", group, error=SetupError)
    agreed_seed = gather(torch.initial_seed() if seed is None else seed, group)[0]
    comms = found.comms
    comms.check_backend(group, device)
    all_sharders = default_sharders(comms) if sharders is None else list(sharders)
    sharding_plan = from_rank(lambda: sharding_plan, "the first rank could not send its sharding plan", group)
    if sharding_plan is None:
        sharding_plan = make_plan(module, all_sharders, found.constraints, found.topology, found.batch_size, group)
    types = check_plan(sharding_plan, found.tables)
    comms.check_plan(sharding_plan, found.tables)
    if replicas is not None:
        sharding_plan = place_on_ranks(sharding_plan, found.tables, replicas)
    tables = [
        table.planned(optimizer, types[table.name])
        for table, optimizer in zip(found.tables, found.optimizers, strict=True)
    ]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(agreed_seed)
        materialise_dense(module, _table_modules(module, tables), device)
        for parameter, table in zip(found.parameters, tables, strict=True):
            told = in_kernel(table.known_optimizer, device) if table.is_dynamic else table.known_optimizer
            set_optimizer_in_backward(parameter, told.optimizer_class, told.fused_arguments())
        with warnings.catch_warnings(), per_node():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about how TorchRec calls it
            dmp = DistributedModelParallel(
                module,
                env=ShardingEnv.from_process_group(group if replicas is None else replicas.shards),
                device=device,
                plan=sharding_plan,
                sharders=all_sharders,
                init_data_parallel=False,
                init_parameters=False,
            )
        dmp.to(device)
        model = ShardedModel(dmp, tables, group, device, replicas)
        held = gather([not parameter.is_meta for parameter in found.parameters], group)[0]
        _fill(model, found.parameters, held, agreed_seed, device, group)
    for name, sharded in model.sharded_modules.items():
        if isinstance(sharded, ShardedDynamicModule):
            own = {table.config.name: table.known_optimizer for table in tables if table.module_name == name}
            model.dynamic_rows[name] = open_rows(name, sharded, own, agreed_seed, group, device)
    for table, parameter in zip(tables, found.parameters, strict=True):
        model.table_parameters().add_original(table.name, parameter)
        release(parameter)
    buffers = [tensor for name, tensor in model.module.named_buffers() if not name.startswith(_prefixes(tables))]
    broadcast_from_first_rank([*(tensor for _, tensor in model.dense_parameters()), *buffers], group)
    return model


def _look(
    module: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup,
    sparse_optimizer: SparseOptimizer | Mapping[str, Any] | None,
    constraints: Mapping[str, Mapping[str, Any] | ParameterConstraints] | None,
    topology: Mapping[str, Any] | Topology | None,
    comms: QuantizedComms,
    replicas: ReplicaGroups | None,
) -> _Unsharded:
    """Everything that can be wrong on one rank alone, without a word to the others."""
    pairs = find_tables(module)
    default = None if sparse_optimizer is None else SparseOptimizer.from_config(sparse_optimizer)
    optimizers: list[TableOptimizer] = []
    without: list[str] = []
    for table, parameter in pairs:
        if table.is_dynamic:
            check_data_type(table.config, device)
        optimizer = resolve_table_optimizer(table.name, parameter, default, device, table.is_dynamic)
        if optimizer is None:
            without.append(table.name)
        else:
            optimizers.append(optimizer)
    if without:
        raise SetupError(
            f"no optimiser is said for {'table' if len(without) == 1 else 'tables'} {', '.join(without)} (TorchRec"
            " would train them with SGD and not say so); call torchrec.optim.apply_optimizer_in_backward on their"
            " parameters, or give sparse_optimizer, for example"
            " {'class_path': 'torchrec.optim.RowWiseAdagrad', 'init_args': {'lr': 0.01}}"
        )
    frozen = [table.name for table, parameter in pairs if not parameter.requires_grad]
    if frozen:
        raise SetupError(
            f"{'table' if len(frozen) == 1 else 'tables'} {', '.join(frozen)} must not be trained (requires_grad is"
            " False), but the optimiser fused into a lookup trains all that it looks up; set requires_grad to True, or"
            " take what the module returns with .detach(), which leaves its tables as they are"
        )
    tables = [table.planned(optimizer, "") for (table, _), optimizer in zip(pairs, optimizers, strict=True)]
    unfillable(module, _table_modules(module, tables))
    shards = group if replicas is None else replicas.shards
    planned_topology, batch_size = read_topology(topology, device, shards.size())
    inside = _prefixes(tables)
    dense = [
        f"{kind} {name} {list(tensor.shape)} {tensor.dtype}"
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, tensor in named
        if not name.startswith(inside)
    ]
    read = read_constraints(constraints, tables, () if replicas is None else REFUSED_TYPES)
    for table in tables:
        asked = read.get(table.config.name)
        if replicas is not None:
            types = None if asked is None else asked.sharding_types
            check_replicated(f"constraints of table {table.config.name}, sharding_types,", types, table)
        if asked is not None:
            comms.check_types(f"constraints of table {table.config.name}, sharding_types,", asked.sharding_types, table)
    return _Unsharded(
        tables,
        [parameter for _, parameter in pairs],
        optimizers,
        read,
        planned_topology,
        batch_size,
        dense,
        comms,
        replicas,
    )


def _describe(table: Table, parameter: nn.Parameter, optimizer: TableOptimizer) -> list[str]:
    """A line for each property, so that only those are shown in which ranks differ."""
    rows, columns = parameter.shape
    pooling = getattr(table.config, "pooling", None)
    properties = [
        f"in a {table.module_type.__name__}",
        f"{rows} rows",
        f"{columns} columns",
        str(parameter.dtype),
        f"features {list(table.config.feature_names)}",
        *([] if pooling is None else [f"pooled by {pooling.name.lower()}"]),
        f"trained by {optimizer.describe()}",
    ]
    return [f"table {table.name} {one}" for one in properties]


def _look_at_comms(
    given: QuantizedComms | Mapping[str, Any] | None, sharders: Sequence[ModuleSharder[nn.Module]] | None
) -> QuantizedComms:
    comms = QuantizedComms.from_config(given)
    if comms.quantizes and sharders is not None:
        raise SetupError(
            f"both sharders and quantized_comms={given!r} are given, and sharders bring codecs of their own; give these"
            " sharders their qcomm_codecs_registry, or leave sharders out"
        )
    return comms


def _fill(
    model: ShardedModel,
    originals: Sequence[nn.Parameter],
    held: Sequence[bool],
    seed: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Gives every table the values it held on rank 0, or its ``init_fn``'s where rank 0 held none."""
    states = {name: sharded.state_dict() for name, sharded in model.sharded_modules.items()}
    for table, original, is_held in zip(model.tables.values(), originals, held, strict=True):
        if table.is_dynamic:
            continue  # a cache of rows, each made when it is first seen
        pieces = pieces_of(states[table.module_name][table.key])
        if is_held:
            shape = (table.config.num_embeddings, table.config.embedding_dim)
            copy_values(original.detach(), shape, original.dtype, pieces, device, group)
        else:
            fill_with_init_fn(table, original.dtype, pieces, seed)


def _table_modules(module: nn.Module, tables: Sequence[Table]) -> set[nn.Module]:
    """The modules that hold nothing but tables."""
    return {module.get_submodule(table.holder_name) for table in tables}


def _prefixes(tables: Sequence[Table]) -> tuple[str, ...]:
    """How the names of everything inside these modules begin."""
    return tuple({f"{table.holder_name}." if table.holder_name else "" for table in tables})
