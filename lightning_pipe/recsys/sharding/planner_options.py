"""Constraints and topology of TorchRec's planner, in the plain types of YAML."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.comm import get_local_size, get_topology_domain_multiple
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams, KeyValueParams, ShardingType

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.modules.tables import Table
from lightning_pipe.recsys.sharding.sharders import (
    COLUMN_TYPES,
    ON_REQUEST_TYPES,
    SHARDING_TYPES,
    check_names,
    check_sharding_types,
)


def _convert_yaml_value(where: str, hint: Any, value: Any) -> Any:
    """Convert a value from YAML to the annotated type: enums by name or value, dataclasses from mappings."""
    for annotated_type in typing.get_args(hint) or (hint,):
        if isinstance(annotated_type, type) and issubclass(annotated_type, enum.Enum) and isinstance(value, str):
            for member in annotated_type:
                if value.lower() in (member.name.lower(), str(member.value).lower()):
                    return member
            names = ", ".join(member.name for member in annotated_type)
            raise SetupError(f"{where} must be one of {names}, got {value!r}. Use one of these names.")
        if annotated_type in (CacheParams, KeyValueParams) and isinstance(value, Mapping):
            return dataclass_from_mapping(where, annotated_type, value)
    return value


def dataclass_from_mapping(where: str, cls: type, values: Mapping[str, Any]) -> Any:
    """Build a dataclass of TorchRec from plain values."""
    hints = typing.get_type_hints(cls)
    allowed = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise SetupError(
            f"{where} has the unknown key {', '.join(unknown)}. Remove it; expected one of {', '.join(allowed)}."
        )
    return cls(**{key: _convert_yaml_value(f"{where}, {key},", hints[key], value) for key, value in values.items()})


def read_constraints(
    constraints: Mapping[str, Mapping[str, Any] | ParameterConstraints] | None,
    tables: Sequence[Table],
    without: Collection[str] = (),
) -> dict[str, ParameterConstraints]:
    """Read constraints, by table name, from plain mappings or TorchRec objects, and add those that must hold."""
    names = {table.config.name for table in tables}
    unknown = [name for name in constraints or {} if name not in names]
    if unknown:
        raise SetupError(
            f"constraints name the table {', '.join(sorted(map(str, unknown)))}, which the model does not have. Use one"
            f" of its tables: {', '.join(sorted(names))}."
        )
    read: dict[str, ParameterConstraints] = {}
    for name, table_constraints in (constraints or {}).items():
        if not isinstance(table_constraints, ParameterConstraints):
            table_constraints = dataclass_from_mapping(
                f"constraints of table {name}", ParameterConstraints, table_constraints
            )
        read[name] = dataclasses.replace(table_constraints)
    for table in tables:
        _add_required_constraints(table, read, without)
    return read


def _add_required_constraints(
    table: Table, constraints: dict[str, ParameterConstraints], without: Collection[str]
) -> None:
    name = table.config.name
    table_constraints = constraints.get(name)
    if table_constraints is not None:
        check_sharding_types(f"constraints of table {name}, sharding_types,", table_constraints.sharding_types, table)
        kernels = [kernel.value for kernel in EmbeddingComputeKernel]
        check_names(f"constraints of table {name}, compute_kernels,", table_constraints.compute_kernels, kernels)
        if table_constraints.sharding_types:
            return
    assert table.optimizer is not None
    unwanted = set(without)
    if table.optimizer.unfused_class is None:
        unwanted.add(ShardingType.DATA_PARALLEL.value)
    if table.optimizer.row_wise_state:
        unwanted |= COLUMN_TYPES
    allowed = SHARDING_TYPES[table.module_type]
    if unwanted & set(allowed):
        left_out = unwanted | ON_REQUEST_TYPES.get(table.module_type, set())
        types = [sharding_type for sharding_type in allowed if sharding_type not in left_out]
        constraints[name] = dataclasses.replace(table_constraints or ParameterConstraints(), sharding_types=types)


def read_topology(
    topology: Mapping[str, Any] | Topology | None, device: torch.device, world_size: int
) -> tuple[Topology, int | None]:
    """Read the planner's topology from a plain mapping or a TorchRec object."""
    if isinstance(topology, Topology):
        if topology.world_size != world_size:
            raise SetupError(
                f"topology must have {world_size} ranks, got {topology.world_size}. Build it with"
                f" world_size={world_size}."
            )
        return topology, None
    arguments = dict(topology or {})
    batch_size = arguments.pop("batch_size", None)
    local = get_local_size(world_size)
    if arguments.setdefault("local_world_size", local) != local:
        raise SetupError(
            f"topology has local_world_size {arguments['local_world_size']}, but the environment has {local} ranks per"
            " node, and TorchRec's sharded modules use the environment. Set LOCAL_WORLD_SIZE to the ranks on this node."
        )
    arguments.setdefault("pod_size", get_topology_domain_multiple())
    # Only silences a warning about topologies of data centers.
    if "created_by_factory" in inspect.signature(Topology.__init__).parameters:
        arguments["created_by_factory"] = True
    try:
        return Topology(world_size=world_size, compute_device=device.type, **arguments), batch_size
    except (TypeError, ValueError, AssertionError) as error:
        raise SetupError(f"topology {dict(topology or {})} is invalid: {error}. Correct its values.") from error
