"""Creation of the rows of sharded dynamic modules: caches over the tensors of TorchRec's kernels, and a store."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe._compat.torchrec import iter_lookup_kernels_with_tables, lookups_of
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.cache.host_rows import HostRows
from lightning_pipe.recsys.dynamic.cache.id_map import DeviceIdMap
from lightning_pipe.recsys.dynamic.cache.initial_values import Constant, InitialValues, Normal, Uniform
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.row_headers import HEADER_BYTES
from lightning_pipe.recsys.dynamic.store.buffered_store import SharedStore, TableStore
from lightning_pipe.recsys.dynamic.store.commit import open_store_at_newest_version
from lightning_pipe.recsys.dynamic.store.row_store import Keys, RowStore
from lightning_pipe.recsys.dynamic.tables.id_mixing import unmix_ids
from lightning_pipe.recsys.dynamic.tables.row_tables import RowTables
from lightning_pipe.recsys.dynamic.tables.sharded_tables import ShardedDynamicModule
from lightning_pipe.recsys.dynamic.tables.slot_lookup import bypass_grouped_lookup, install_fast_cpu_lookup
from lightning_pipe.recsys.kernels.row_adam import RowAdam
from lightning_pipe.recsys.kernels.table_optimizer import TableOptimizerSpec
from lightning_pipe.recsys.modules.dynamic_modules import DynamicTable, RowStorageOptions


def choose_kernel_optimizer(optimizer: TableOptimizerSpec, device: torch.device) -> TableOptimizerSpec:
    """Optimizer of a dynamic table's fused kernel: plain SGD if a row optimizer replaces it."""
    if not _needs_row_adam(optimizer, device):
        return optimizer
    return TableOptimizerSpec(torch.optim.SGD, {"lr": optimizer.learning_rate}, torch.optim.SGD, False)


def _needs_row_adam(optimizer: TableOptimizerSpec, device: torch.device) -> bool:
    return device.type == "cpu" and "betas" in optimizer.hyper_parameters


def open_rows(
    name: str,
    module: ShardedDynamicModule,
    optimizers: Mapping[str, TableOptimizerSpec],
    seed: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> RowTables:
    """Open the store of a module and create its caches. Collective."""
    ranks, storage = group.size(), module.storage
    row_optimizers = _create_row_optimizers(module, optimizers, device)
    columns: dict[str, list[Tensor]] = {}
    tables_of_keys: list[str] = []
    for table, features, tensors in module.table_columns():
        columns[table] = tensors
        tables_of_keys += [table] * len(features)
    for table, tensors in columns.items():
        if not len(tensors[0]):
            raise SetupError(
                f"dynamic table {table!r} of module {name!r} has cache_rows="
                f"{module.dynamic_tables[table].cache_rows} for {ranks} ranks; expected at least one row for each rank."
                " Set cache_rows to hold the rows of all batches in flight"
            )
    description = {
        table: {
            "optimizer": optimizers[table].name,
            "columns": [[list(tensor.shape[1:]), str(tensor.dtype)] for tensor in tensors],
        }
        for table, tensors in columns.items()
    }
    path = storage.path / f"ranks-{ranks}" / f"rank-{group.rank()}"
    widths = {
        table: HEADER_BYTES + sum(column[:1].numel() * column.element_size() for column in tensors)
        for table, tensors in columns.items()
    }
    store = open_store_at_newest_version(lambda: open_store(path, widths, description, storage.direct_reads), group)
    shared = SharedStore(store)
    try:
        module_seed = seed if storage.seed is None else storage.seed
        values: list[InitialValues] = []
        caches: dict[str, RowCache] = {}
        for table, tensors in columns.items():
            config = module.dynamic_tables[table]
            below = TableStore(shared, table)
            values.append(
                InitialValues(table, config.embedding_dim, _parse_initial_values_option(config), seed=module_seed)
            )
            if config.host_rows:
                below = HostRows(-(-config.host_rows // ranks), widths[table], shared, table)
            caches[table] = _create_row_cache(config, tensors, below, storage, values[-1])
        rows = RowTables(
            caches,
            tables_of_keys,
            store=shared,
            group=group,
            description=description,
            row_optimizers=row_optimizers,
            commit_every=storage.commit_every,
            seed=module_seed,
            reseed=partial(_reseed_initial_values, values) if storage.seed is None else None,
            existing_rows=storage.existing_rows,
        )
    except BaseException:
        store.close()
        raise
    module.set_row_tables(rows)
    for kernel, _ in iter_lookup_kernels_with_tables(module):
        install_fast_cpu_lookup(kernel)
    for lookup in lookups_of(module):
        bypass_grouped_lookup(lookup)
    return rows


def open_store(path: Path, widths: Mapping[str, int], description: Any, direct_reads: bool = False) -> RowStore:
    """Create a rank's store, which must be recovered before it is used."""
    try:
        from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
    except ImportError as error:
        raise SetupError(
            f"dynamic tables keep their rows in RocksDB, whose package cannot be imported: {error}. Install"
            " lightning-pipe[dynamic]"
        ) from error
    return RocksDbStore(path, widths, description, direct_reads=direct_reads)


def _create_row_optimizers(
    module: ShardedDynamicModule, optimizers: Mapping[str, TableOptimizerSpec], device: torch.device
) -> list[RowAdam]:
    row_optimizers = []
    for kernel, tables in iter_lookup_kernels_with_tables(module):
        table_optimizers = [optimizers[table.name] for table in tables]
        hyper_parameters = [
            optimizer.hyper_parameters if _needs_row_adam(optimizer, device) else None for optimizer in table_optimizers
        ]
        if any(values is not None for values in hyper_parameters):
            row_optimizers.append(RowAdam(kernel, hyper_parameters))
    return row_optimizers


def _create_row_cache(
    table: DynamicTable, columns: list[Tensor], below: TableStore, storage: RowStorageOptions, values: InitialValues
) -> RowCache:
    return RowCache(
        table.name,
        columns,
        below,
        initial=values,
        state_fill=[0.0] * (len(columns) - 1),
        policy=table.eviction if isinstance(table.eviction, str) else partial(_compute_eviction_scores, table.eviction),
        ids_of=_unmix_keys,
        admission_threshold=table.admission_threshold,
        ttl=table.ttl,
        check_nan=storage.check_nan,
        ids=DeviceIdMap(len(columns[0]), columns[0].device) if storage.id_map_device == "device" else None,
    )


def _reseed_initial_values(values: Sequence[InitialValues], seed: int) -> None:
    for initial_values in values:
        initial_values.reseed(seed)


def _parse_initial_values_option(table: DynamicTable) -> Any:
    initial = table.initial
    if initial is None:
        bound = 1 / math.sqrt(table.embedding_dim)
        return Uniform(-bound, bound)
    if callable(initial):
        return partial(_call_with_original_ids, initial)
    kinds = {"uniform": Uniform, "normal": Normal, "constant": Constant}
    where = f"initial of dynamic table {table.name!r}"
    if len(initial) != 1 or next(iter(initial)) not in kinds:
        raise SetupError(
            f"{where} is {dict(initial)}; expected {{'uniform': [low, high]}}, {{'normal': [mean, std]}} or"
            " {'constant': value}, or a function of ids"
        )
    kind, arguments = next(iter(initial.items()))
    try:
        return kinds[kind](*(arguments if isinstance(arguments, (list, tuple)) else [arguments]))
    except TypeError as error:
        raise SetupError(
            f"{where} is {dict(initial)}, whose values are invalid: {error}. Correct the values"
        ) from error


def _unmix_keys(mixed: Keys) -> Keys:
    ids: Keys = unmix_ids(torch.from_numpy(mixed)).numpy()
    return ids


def _compute_eviction_scores(function: Callable[..., Any], mixed: Keys, counts: Any, last_seen: Any) -> Any:
    return function(_unmix_keys(mixed), counts, last_seen)


def _call_with_original_ids(function: Callable[[Tensor], Tensor], mixed: Tensor) -> Tensor:
    """Call a user's function with the original ids instead of the mixed ones."""
    return function(unmix_ids(mixed))
