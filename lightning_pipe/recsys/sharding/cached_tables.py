"""Arguments of FBGEMM's kernels for tables in unified memory with a cache of rows (``fused_uvm_caching``).

Every such table is made with ``prefetch_pipeline``: its rows may then be loaded while the previous batch trains, since
the cache keeps the rows of batches in flight and a backward follows rows that have moved. That suits every plan that
looks up a batch after the backward of the previous one, so a module can be trained under one plan after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import (
    CacheAlgorithm,
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.modules.tables import Table

CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
# FBGEMM's names of the arguments, and TorchRec's.
_FIELDS = {
    "cache_algorithm": "algorithm",
    "cache_load_factor": "load_factor",
    "cache_reserved_memory": "reserved_memory",
    "cache_precision": "precision",
    "prefetch_pipeline": "prefetch_pipeline",
}


def read_fused_params(
    fused_params: Mapping[str, Any] | None,
    tables: Sequence[Table],
    constraints: Mapping[str, ParameterConstraints],
) -> dict[str, CacheParams]:
    """Read arguments of kernels with a cache, by table name."""
    if fused_params is None:
        return {}
    if not isinstance(fused_params, Mapping):
        raise SetupError(
            f"fused_params must be a mapping of arguments of FBGEMM's kernels, got {fused_params!r}. Use for example"
            " {'cache_load_factor': 0.1}."
        )
    names = sorted({table.config.name for table in tables})
    common = {key: value for key, value in fused_params.items() if not isinstance(value, Mapping)}
    unknown = sorted(str(key) for key, value in fused_params.items() if isinstance(value, Mapping) and key not in names)
    if unknown:
        raise SetupError(
            f"fused_params name the table {', '.join(unknown)}, which the model does not have. Use one of its tables:"
            f" {', '.join(names)}."
        )
    read = {}
    for name in names:
        arguments = {**common, **fused_params.get(name, {})}
        if not arguments:
            continue
        asked = constraints.get(name)
        if asked is not None and asked.cache_params is not None:
            raise SetupError(
                f"table {name} has cache_params in its constraints, and fused_params. Use fused_params alone, with the"
                f" names {', '.join(_FIELDS)}."
            )
        read[name] = CacheParams(**{_field(name, key): _value(name, key, value) for key, value in arguments.items()})
    return read


def _field(table: str, key: str) -> str:
    if key not in _FIELDS:
        raise SetupError(
            f"fused_params of table {table} have the unknown key {key}. Remove it; expected one of"
            f" {', '.join(_FIELDS)}, or the name of a table with such keys."
        )
    return _FIELDS[key]


def _value(table: str, key: str, value: Any) -> Any:
    """Convert a value from YAML."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "prefetch_pipeline":
        valid, expected = isinstance(value, bool), "True or False"
    elif key == "cache_load_factor":
        valid, expected = is_number and 0 < value <= 1, "a number above 0, at most 1"
    elif key == "cache_reserved_memory":
        valid, expected = is_number and value >= 0, "a number of bytes"
    else:
        kinds = [CacheAlgorithm.LRU, CacheAlgorithm.LFU] if key == "cache_algorithm" else [DataType.FP32, DataType.FP16]
        by_name = {kind.name: kind for kind in kinds}
        value = by_name.get(str(value).upper(), value)
        valid, expected = value in kinds, " or ".join(by_name)
    if not valid:
        raise SetupError(f"{key} in fused_params of table {table} must be {expected}, got {value!r}. Set one of these.")
    return value


def with_cache_params(plan: ShardingPlan, tables: Sequence[Table], cache: Mapping[str, CacheParams]) -> ShardingPlan:
    """Copy of a plan in which tables with a cache have the arguments of :func:`read_fused_params`.

    ``prefetch_pipeline`` is True by default, except with LFU, for which FBGEMM has no such cache: rows are then loaded
    by the lookup.
    """
    modules: dict[str, Any] = dict(plan.plan)
    for table in tables:
        module = modules[table.module_name]
        sharding: ParameterSharding = module[table.config.name]
        if sharding.compute_kernel != CACHED:
            continue
        params = sharding.cache_params or CacheParams()
        own = vars(cache.get(table.config.name, CacheParams()))
        params = dataclasses.replace(params, **{key: value for key, value in own.items() if value is not None})
        is_lfu = params.algorithm is CacheAlgorithm.LFU
        if params.prefetch_pipeline is None:
            params = dataclasses.replace(params, prefetch_pipeline=not is_lfu)
        if is_lfu and params.prefetch_pipeline:
            raise SetupError(
                f"table {table.name} has the cache_algorithm LFU and prefetch_pipeline, which FBGEMM only has for LRU."
                " Remove one of the two. Without prefetch_pipeline, rows are loaded by the lookup."
            )
        changed = dataclasses.replace(sharding, cache_params=params)
        modules[table.module_name] = EmbeddingModuleShardingPlan({**module, table.config.name: changed})
    return ShardingPlan(modules)
