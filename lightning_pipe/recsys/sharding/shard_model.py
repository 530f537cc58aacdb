"""Shards a module's embedding tables over a process group, in place, each with its optimizer.

``shard_model`` is a list of steps: look, agree, plan, shard, fill. Errors that may occur on one rank only are found
before the first collective, and raised on all ranks. Sharding itself is done by TorchRec's planner and
``DistributedModelParallel``, without its data parallelism, since dense gradients are reduced elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams, ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_pipe._compat.managed_collision import sharded_id_maps
from lightning_pipe._compat.torch import set_optimizer_in_backward
from lightning_pipe.checkpoints.compiled_names import plain_name
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import parse_option_group
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_all_ranks, run_on_rank
from lightning_pipe.recsys.dense.dense_values import (
    broadcast_from_first_rank,
    check_dense_initializable,
    materialize_dense,
)
from lightning_pipe.recsys.kernels.table_optimizer import (
    SparseOptimizerConfig,
    TableOptimizerSpec,
    resolve_table_optimizer,
)
from lightning_pipe.recsys.modules.dedup import modules_to_deduplicate
from lightning_pipe.recsys.modules.dynamic_modules import is_dynamic
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms
from lightning_pipe.recsys.modules.tables import Table, check_data_type, find_tables
from lightning_pipe.recsys.sharding.cached_tables import add_cache_params_to_plan, read_cache_params
from lightning_pipe.recsys.sharding.planner_options import read_constraints, read_topology
from lightning_pipe.recsys.sharding.replicas import (
    REFUSED_TYPES,
    ReplicaGroups,
    check_replicable,
    place_plan_on_replica,
)
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.sharding.sharders import default_sharders
from lightning_pipe.recsys.sharding.sharding_plan import check_sharding_plan, make_sharding_plan
from lightning_pipe.recsys.sharding.table_values import (
    LocalShard,
    copy_table_to_shards,
    fill_with_init_fn,
    free_table,
    local_shards,
)

# Optimizer of tables that are frozen or only evaluated. It has no state.
_NO_STEP = TableOptimizerSpec(torch.optim.SGD, {"lr": 0.0}, torch.optim.SGD, row_wise_state=False)


@dataclass(frozen=True)
class _UnshardedModuleInfo:
    """Properties of the module on one rank, before it is sharded."""

    tables: list[Table]
    parameters: list[nn.Parameter]
    optimizers: list[TableOptimizerSpec]
    constraints: dict[str, ParameterConstraints]
    topology: Topology
    batch_size: int | None
    dense: list[str]
    comms: QuantizedComms
    replicas: ReplicaGroups | None
    untrained: list[str]
    cache: Mapping[str, CacheParams] = field(default_factory=dict)
    dedup: frozenset[str] = frozenset()

    def signature(self) -> list[str]:
        """Properties that ranks must agree on: one line per property of a table and per dense tensor."""
        described = zip(self.tables, self.parameters, self.optimizers, strict=True)
        tables = [line for properties in described for line in _describe_table(*properties)]
        replicas = [] if self.replicas is None else [str(self.replicas)]
        wire = [f"embeddings sent as {self.comms}", *(f"ids of {name} sent once" for name in sorted(self.dedup))]
        return [*tables, *self.dense, *wire, *replicas]


def shard_model(
    module: nn.Module,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    sparse_optimizer: SparseOptimizerConfig | Mapping[str, Any] | None = None,
    sharding_plan: ShardingPlan | None = None,
    constraints: Mapping[str, Mapping[str, Any] | ParameterConstraints] | None = None,
    topology: Mapping[str, Any] | Topology | None = None,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    quantized_comms: QuantizedComms | Mapping[str, Any] | None = None,
    dedup: bool | Sequence[str] = False,
    seed: int | None = None,
    replicas: ReplicaGroups | None = None,
    trains: bool = True,
    fused_params: Mapping[str, Any] | None = None,
) -> ShardedModel:
    """Shard the TorchRec modules inside a module, in place. Every rank of the group calls this function.

    Tables keep the values that they hold on rank 0. Tables on the meta device are filled by their ``init_fn``, with
    values that depend on the seed but not on the number of ranks. Dense parameters and buffers become rank 0's; those
    on the meta device are filled by ``reset_parameters``. The global random state is left unchanged. The unsharded
    tables are freed: a parameter that the caller still holds is empty afterwards.

    Args:
        module: module that holds unsharded ``EmbeddingBagCollection``, ``EmbeddingCollection``,
            ``FeatureProcessedEmbeddingBagCollection`` or managed-collision modules at any depth.
        device: device of tables and dense parameters.
        group: process group of all ranks, to shard over; the output dist and its backward use it too.
        sparse_optimizer: optimizer of the tables that have none from TorchRec's ``apply_optimizer_in_backward``.
        sharding_plan: TorchRec's plan, of which rank 0's is used (default None: TorchRec's planner makes it).
        constraints: constraints of the planner, by table; see ``ShardingOptions``.
        topology: topology of the planner; see ``ShardingOptions``. Its ``batch_size`` is the batch size per rank.
        sharders: TorchRec sharders to use instead of this project's.
        quantized_comms: precision of embeddings and their gradients between ranks; see
            ``quantized_comms.QuantizedComms``. Not with *sharders*, which bring their own codecs.
        dedup: names of the ``EmbeddingCollection`` modules that send each id once per batch, or True for all; see
            ``WireOptions`` (default False). Not with *sharders*.
        seed: seed of the tables and dense parameters on the meta device, of which rank 0's is used (default
            ``torch.initial_seed()``).
        replicas: groups of ranks that each shard all tables and average them with each other; see
            ``replicas.make_replica_groups``. The plan and the topology are then those of one replica, while ``group``
            still has all ranks. By default all ranks shard the tables.
        trains: False to evaluate only (default True). Tables then need no optimizer, and any may be frozen. The tables
            without an optimizer, and those frozen in a module that also has other tables, cannot be trained later.
        fused_params: arguments of tables with a cache of rows; see ``ShardingOptions``. Not with
            *sharders*, which bring their own.

    Raises:
        SetupError: the module cannot be sharded or trained as requested on some rank; raised on every rank.
    """
    per_node = nullcontext if replicas is None else replicas.limit_local_world_size

    def inspect_module() -> _UnshardedModuleInfo:
        if sharders is not None:
            _refuse_options_with_sharders(
                quantized_comms=quantized_comms, dedup=dedup or None, fused_params=fused_params
            )
        comms = parse_option_group(QuantizedComms, "quantized_comms", quantized_comms)
        with per_node():
            unsharded = _inspect_unsharded_module(
                module, device, group, sparse_optimizer, constraints, topology, comms, replicas, trains
            )
        cache = read_cache_params(fused_params, unsharded.tables)
        for name, params in cache.items():  # for the planner's estimates
            table_constraints = unsharded.constraints.get(name, ParameterConstraints())
            unsharded.constraints[name] = replace(table_constraints, cache_params=params)
        return replace(unsharded, cache=cache, dedup=modules_to_deduplicate(dedup, unsharded.tables))

    unsharded = run_on_all_ranks(inspect_module, "the module cannot be sharded", group)
    check_agreement([(line, "") for line in unsharded.signature()], "module", group, error_class=SetupError)
    agreed_seed = all_gather_objects(torch.initial_seed() if seed is None else seed, group)[0]
    comms = unsharded.comms
    has_dynamic = any(table.is_dynamic for table in unsharded.tables)
    all_sharders = default_sharders(comms, unsharded.dedup, dynamic=has_dynamic) if sharders is None else list(sharders)
    sharding_plan = run_on_rank(lambda: sharding_plan, "the first rank could not send its sharding plan", group)
    if sharding_plan is None:
        sharding_plan = make_sharding_plan(
            module, all_sharders, unsharded.constraints, unsharded.topology, unsharded.batch_size, group
        )
    types = check_sharding_plan(sharding_plan, unsharded.tables)
    comms.check_sharding_plan(sharding_plan, unsharded.tables)
    if sharders is None:
        sharding_plan = add_cache_params_to_plan(sharding_plan, unsharded.tables, unsharded.cache)
    if replicas is not None:
        sharding_plan = place_plan_on_replica(sharding_plan, unsharded.tables, replicas)
    tables = [
        table.with_optimizer_and_sharding(optimizer, types[table.name])
        for table, optimizer in zip(unsharded.tables, unsharded.optimizers, strict=True)
    ]
    maps = [
        id_map
        for name in {table.module_name for table in tables}
        for id_map in sharded_id_maps(name, module.get_submodule(name))
    ]
    ids = {id_map.name: {**id_map.named_row_buffers, **dict([id_map.step_counter])} for id_map in maps}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(agreed_seed)
        materialize_dense(module, _table_modules(module, tables), device)
        for parameter, table in zip(unsharded.parameters, tables, strict=True):
            in_kernel = _resolve_kernel_optimizer(table, device)
            set_optimizer_in_backward(parameter, in_kernel.optimizer_class, in_kernel.optimizer_kwargs())
        fixed = [table for table in tables if not table.is_dynamic]
        with warnings.catch_warnings(), per_node(), _disabled_init_fns(fixed):
            warnings.simplefilter("ignore", FutureWarning)  # from torch, about TorchRec's calls
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
        model = ShardedModel(dmp, tables, group, device, replicas, unsharded.untrained)
        has_values = all_gather_objects([not parameter.is_meta for parameter in unsharded.parameters], group)[0]
        _fill_tables(model, unsharded.parameters, has_values, agreed_seed, device, group)
    model.id_maps.load_unsharded(ids)
    if has_dynamic:
        _open_dynamic_rows(model, agreed_seed, group, device)
    for table, parameter in zip(tables, unsharded.parameters, strict=True):
        model.table_parameters().add_original(table.name, parameter)
        free_table(parameter)
    buffers = [
        tensor
        for name, tensor in model.module.named_buffers()
        if not name.startswith(_get_table_module_prefixes(tables))
    ]
    broadcast_from_first_rank([*(tensor for _, tensor in model.dense_parameters()), *buffers], group)
    return model


def _inspect_unsharded_module(
    module: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup,
    sparse_optimizer: SparseOptimizerConfig | Mapping[str, Any] | None,
    constraints: Mapping[str, Mapping[str, Any] | ParameterConstraints] | None,
    topology: Mapping[str, Any] | Topology | None,
    comms: QuantizedComms,
    replicas: ReplicaGroups | None,
    trains: bool,
) -> _UnshardedModuleInfo:
    """Read and check everything that may be wrong on one rank only, without communication."""
    pairs, refused = _find_frozen_tables(find_tables(module))
    default = None if sparse_optimizer is None else SparseOptimizerConfig.from_config(sparse_optimizer)
    optimizers: list[TableOptimizerSpec] = []
    without: list[str] = []
    for table, parameter in pairs:
        check_data_type(table, device)
        optimizer = _NO_STEP
        if parameter.requires_grad:
            chosen = resolve_table_optimizer(table.name, parameter, default, device, table.is_dynamic)
            without += [table.name] if chosen is None else []
            optimizer = chosen or _NO_STEP
        optimizers.append(optimizer)
    if without and trains:
        raise SetupError(
            f"{'table' if len(without) == 1 else 'tables'} {', '.join(without)} must have an optimizer, got none, and"
            " TorchRec would silently train with SGD. The optimizers of configure_optimizers train the dense part"
            " only. Call torchrec.optim.apply_optimizer_in_backward on the tables' parameters, or set"
            " sparse_optimizer, for example {'class_path': 'torchrec.optim.RowWiseAdagrad', 'init_args': {'lr': 0.01}}."
        )
    if refused and trains:
        raise SetupError(
            f"{'table' if len(refused) == 1 else 'tables'} {', '.join(refused)} cannot be frozen (requires_grad is"
            " False). Only all tables of an EmbeddingBagCollection or EmbeddingCollection can be frozen together. Move"
            " them to such a module of their own, or set requires_grad to True and call .detach() on the module's"
            " output, which leaves its tables unchanged."
        )
    tables = [
        table.with_optimizer_and_sharding(optimizer, "")
        for (table, _), optimizer in zip(pairs, optimizers, strict=True)
    ]
    check_dense_initializable(module, _table_modules(module, tables))
    shards = group if replicas is None else replicas.shards
    planned_topology, batch_size = read_topology(topology, device, shards.size())
    inside = _get_table_module_prefixes(tables)
    dense = [
        f"{kind} {name} {list(tensor.shape)} {tensor.dtype}"
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, tensor in named
        if not name.startswith(inside)
    ]
    read = read_constraints(constraints, tables, () if replicas is None else REFUSED_TYPES)
    for table in tables:
        table_constraints = read.get(table.config.name)
        if replicas is not None:
            types = None if table_constraints is None else table_constraints.sharding_types
            check_replicable(f"constraints of table {table.config.name}, sharding_types,", types, table)
        if table_constraints is not None:
            comms.check_sharding_types(
                f"constraints of table {table.config.name}, sharding_types,", table_constraints.sharding_types, table
            )
    return _UnshardedModuleInfo(
        tables,
        [parameter for _, parameter in pairs],
        optimizers,
        read,
        planned_topology,
        batch_size,
        dense,
        comms,
        replicas,
        [*without, *refused],
    )


def _find_frozen_tables(
    pairs: Sequence[tuple[Table, nn.Parameter]],
) -> tuple[list[tuple[Table, nn.Parameter]], list[str]]:
    """Mark the tables of frozen modules, and return the names of the other tables that are frozen."""
    trained = {table.module_name for table, parameter in pairs if parameter.requires_grad}
    kinds = EmbeddingBagCollection, EmbeddingCollection
    marked = [
        (replace(table, is_frozen=table.module_name not in trained and table.module_type in kinds), parameter)
        for table, parameter in pairs
    ]
    refused = [table.name for table, parameter in marked if not (parameter.requires_grad or table.is_frozen)]
    return marked, refused


def _resolve_kernel_optimizer(table: Table, device: torch.device) -> TableOptimizerSpec:
    """Optimizer of a table's fused kernel."""
    if not table.is_dynamic:
        return table.resolved_optimizer
    from lightning_pipe.recsys.dynamic.tables.create_row_tables import (
        choose_kernel_optimizer,  # lazy: few models have dynamic tables
    )

    return choose_kernel_optimizer(table.resolved_optimizer, device)


def _open_dynamic_rows(model: ShardedModel, seed: int, group: dist.ProcessGroup, device: torch.device) -> None:
    from lightning_pipe.recsys.dynamic.tables.create_row_tables import open_rows

    for name, sharded in model.sharded_modules.items():
        if is_dynamic(sharded):
            table_optimizers = {
                table.config.name: table.resolved_optimizer
                for table in model.tables.values()
                if table.module_name == name
            }
            model.dynamic_rows[plain_name(name)] = open_rows(name, sharded, table_optimizers, seed, group, device)


def _describe_table(table: Table, parameter: nn.Parameter, optimizer: TableOptimizerSpec) -> list[str]:
    """One line per property, so that an error only shows the properties that differ between ranks."""
    rows, columns = parameter.shape
    pooling = getattr(table.config, "pooling", None)
    properties = [
        f"in a {table.module_type.__name__}",
        f"{rows} rows",
        f"{columns} columns",
        str(parameter.dtype),
        f"features {list(table.config.feature_names)}",
        *([] if pooling is None else [f"pooled by {pooling.name.lower()}"]),
        "frozen" if table.is_frozen else f"trained by {optimizer.describe()}",
    ]
    return [f"table {table.name} {line}" for line in properties]


def _refuse_options_with_sharders(**of_our_sharders: Any) -> None:
    for name, value in of_our_sharders.items():
        if value is not None:
            raise SetupError(
                f"both sharders and {name}={value!r} are set, but sharders bring their own codecs, dedup and"
                " fused_params. Pass them to the sharders, or remove sharders."
            )


def _fill_tables(
    model: ShardedModel,
    originals: Sequence[nn.Parameter],
    has_values: Sequence[bool],
    seed: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Fill every table with its values on rank 0, or from its ``init_fn`` if rank 0 has none."""
    states = {name: sharded.state_dict() for name, sharded in model.sharded_modules.items()}
    empty: list[tuple[Table, torch.dtype, list[LocalShard]]] = []
    for table, original, is_filled in zip(model.tables.values(), originals, has_values, strict=True):
        if table.is_dynamic:
            continue  # a cache of rows, each made when it is first seen
        pieces = local_shards(states[table.module_name][table.module_state_dict_key])
        if is_filled:
            shape = (table.config.num_embeddings, table.config.embedding_dim)
            copy_table_to_shards(original.detach(), shape, original.dtype, pieces, device, group)
        else:
            empty.append((table, original.dtype, pieces))

    def fill() -> None:
        for table, dtype, pieces in empty:
            fill_with_init_fn(table, dtype, pieces, seed)

    # The init_fn of a table is only called on ranks that hold a part of it.
    run_on_all_ranks(fill, "tables on the meta device cannot be filled", group)


@contextmanager
def _disabled_init_fns(tables: Sequence[Table]) -> Iterator[None]:
    """Context in which TorchRec does not call the ``init_fn`` of tables, which :func:`_fill_tables` fills.

    TorchRec calls it on the parts of a table that a rank holds, whose shapes a function of the whole table rejects.
    """
    functions = [(table.config, table.config.init_fn) for table in tables]
    try:
        for config, _ in functions:
            config.init_fn = _noop_init_fn
        yield
    finally:
        for config, function in functions:
            config.init_fn = function


def _noop_init_fn(values: torch.Tensor) -> torch.Tensor:
    return values


def _table_modules(module: nn.Module, tables: Sequence[Table]) -> set[nn.Module]:
    """Modules that hold nothing but tables."""
    return {module.get_submodule(table.holder_name) for table in tables}


def _get_table_module_prefixes(tables: Sequence[Table]) -> tuple[str, ...]:
    """Prefixes of all names inside these modules."""
    return tuple({f"{table.holder_name}." if table.holder_name else "" for table in tables})
