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
from torchrec.distributed.types import (
    CacheAlgorithm,
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.modules.tables import Table
from lightning_pipe.recsys.sharding.planner_options import dataclass_from_mapping

CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
# FBGEMM's names of the arguments, and TorchRec's.
_FIELDS = {
    "cache_algorithm": "algorithm",
    "cache_load_factor": "load_factor",
    "cache_reserved_memory": "reserved_memory",
    "cache_precision": "precision",
    "prefetch_pipeline": "prefetch_pipeline",
}


def read_cache_params(fused_params: Mapping[str, Any] | None, tables: Sequence[Table]) -> dict[str, CacheParams]:
    """Read arguments of kernels with a cache, by table name."""
    if fused_params is None:
        return {}
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
        if wrong := [key for key in arguments if key not in _FIELDS]:
            raise SetupError(
                f"fused_params of table {name} have the unknown key {', '.join(wrong)}. Remove it; expected one of"
                f" {', '.join(_FIELDS)}, or the name of a table with such keys."
            )
        named = {_FIELDS[key]: value for key, value in arguments.items()}
        read[name] = dataclass_from_mapping(f"fused_params of table {name}", CacheParams, named)
    return read


def add_cache_params_to_plan(
    plan: ShardingPlan, tables: Sequence[Table], cache: Mapping[str, CacheParams]
) -> ShardingPlan:
    """Copy of a plan in which tables with a cache have the arguments of :func:`read_cache_params`.

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
        table_params = vars(cache.get(table.config.name, CacheParams()))
        params = dataclasses.replace(params, **{key: value for key, value in table_params.items() if value is not None})
        if params.prefetch_pipeline is None:
            params = dataclasses.replace(params, prefetch_pipeline=params.algorithm is not CacheAlgorithm.LFU)
        changed = dataclasses.replace(sharding, cache_params=params)
        modules[table.module_name] = EmbeddingModuleShardingPlan({**module, table.config.name: changed})
    return ShardingPlan(modules)
