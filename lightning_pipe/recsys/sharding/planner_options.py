"""Constraints and topology for TorchRec's planner, in plain words as YAML has them."""

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
    ONLY_WHEN_ASKED,
    SHARDING_TYPES,
    check_names,
    check_types,
)

__all__ = ["read_constraints", "read_topology"]

_SET_BY_THE_PROJECT = {"self", "world_size", "compute_device", "custom_topology_data", "generalized_comms_bandwidths"}
_PLANNER_KEYS = {"batch_size"}


def _value(where: str, hint: Any, value: Any) -> Any:
    """A value from YAML as the annotated type wants it: enums by name or value, dataclasses from mappings."""
    for wanted in typing.get_args(hint) or (hint,):
        if isinstance(wanted, type) and issubclass(wanted, enum.Enum) and isinstance(value, str):
            for member in wanted:
                if value.lower() in (member.name.lower(), str(member.value).lower()):
                    return member
            names = ", ".join(member.name for member in wanted)
            raise SetupError(f"{where} is {value!r}; needed is one of {names}")
        if wanted in (CacheParams, KeyValueParams) and isinstance(value, Mapping):
            return _dataclass(where, wanted, value)
    return value


def _dataclass(where: str, cls: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    allowed = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise SetupError(f"{where} has the unknown key {', '.join(unknown)}; allowed are {', '.join(allowed)}")
    return cls(**{key: _value(f"{where}, {key},", hints[key], value) for key, value in values.items()})


def read_constraints(
    constraints: Mapping[str, Mapping[str, Any] | ParameterConstraints] | None,
    tables: Sequence[Table],
    without: Collection[str] = (),
) -> dict[str, ParameterConstraints]:
    """Reads constraints, by table name, from plain mappings or TorchRec's own objects, and adds what must hold.

    Args:
        constraints: for a table's name (``config.name``), the fields of TorchRec's ``ParameterConstraints``:
            ``sharding_types``, ``compute_kernels``, ``min_partition``, ...; enums and ``cache_params`` in plain text.
        tables: the tables of the model, with their optimisers.
        without: sharding types that the planner is not to choose by itself.

    Raises:
        SetupError: no mapping; or a table, key, sharding type or compute kernel that is not there or cannot be had.
    """
    if constraints is not None and not isinstance(constraints, Mapping):
        raise SetupError(
            f"constraints are {constraints!r}; needed is a mapping of tables' names to what holds for each, for example"
            " {'users': {'sharding_types': ['row_wise']}}"
        )
    names = {table.config.name for table in tables}
    unknown = [name for name in constraints or {} if name not in names]
    if unknown:
        raise SetupError(
            f"constraints name the table {', '.join(sorted(map(str, unknown)))}, which the model does not have; its"
            f" tables are {', '.join(sorted(names))}"
        )
    read: dict[str, ParameterConstraints] = {}
    for name, given in (constraints or {}).items():
        if not isinstance(given, ParameterConstraints):
            if not isinstance(given, Mapping):
                raise SetupError(f"constraints of table {name} are {given!r}; needed is a mapping, or null for none")
            given = _dataclass(f"constraints of table {name}", ParameterConstraints, given)
        read[name] = dataclasses.replace(given)
    for table in tables:
        _add_what_must_hold(table, read, without)
    return read


def _add_what_must_hold(table: Table, constraints: dict[str, ParameterConstraints], without: Collection[str]) -> None:
    name = table.config.name
    given = constraints.get(name)
    if given is not None:
        check_types(f"constraints of table {name}, sharding_types,", given.sharding_types, table)
        kernels = [kernel.value for kernel in EmbeddingComputeKernel]
        check_names(f"constraints of table {name}, compute_kernels,", given.compute_kernels, kernels)
        if given.sharding_types:
            return
    assert table.optimizer is not None
    unwanted = set(without)
    if table.optimizer.step_class is None:
        unwanted.add(ShardingType.DATA_PARALLEL.value)
    if table.optimizer.row_wise_state:
        unwanted |= COLUMN_TYPES
    allowed = SHARDING_TYPES[table.module_type]
    if unwanted & set(allowed):
        left_out = unwanted | ONLY_WHEN_ASKED[table.module_type]
        types = [sharding_type for sharding_type in allowed if sharding_type not in left_out]
        constraints[name] = dataclasses.replace(given or ParameterConstraints(), sharding_types=types)


def read_topology(
    topology: Mapping[str, Any] | Topology | None, device: torch.device, world_size: int
) -> tuple[Topology, int | None]:
    """Reads the topology that the planner plans for, from a plain mapping or TorchRec's own object.

    Args:
        topology: arguments of TorchRec's ``Topology`` (``hbm_cap``, ``ddr_cap``: bytes a rank; ``local_world_size``:
            ranks a node; bandwidths), and ``batch_size``, the batch of one rank that the planner reckons with.
        device: the device that tables live on.
        world_size: ranks that the tables are sharded over.

    Returns:
        The topology, and the batch size where one is given.

    Raises:
        SetupError: no mapping, an unknown key, or ranks a node other than the environment says.
    """
    if isinstance(topology, Topology):
        if topology.world_size != world_size:
            raise SetupError(
                f"topology is for {topology.world_size} ranks, and there are {world_size}; make it for {world_size}"
            )
        return topology, None
    if topology is not None and not isinstance(topology, Mapping):
        raise SetupError(
            f"topology is {topology!r}; needed is a mapping, for example {{'hbm_cap': 80000000000}} (bytes a rank), or"
            " TorchRec's Topology"
        )
    given = dict(topology or {})
    arguments = inspect.signature(Topology.__init__).parameters
    allowed = [key for key in arguments if key not in _SET_BY_THE_PROJECT and key != "created_by_factory"]
    unknown = sorted(set(given) - set(allowed) - _PLANNER_KEYS)
    if unknown:
        raise SetupError(
            f"topology has the unknown key {', '.join(unknown)}; allowed are {', '.join([*allowed, *_PLANNER_KEYS])}"
        )
    batch_size = given.pop("batch_size", None)
    local = get_local_size(world_size)
    if given.setdefault("local_world_size", local) != local:
        raise SetupError(
            f"topology says local_world_size {given['local_world_size']}, and the environment says {local} ranks a"
            " node; TorchRec's sharded modules go by the environment: set LOCAL_WORLD_SIZE to the ranks on this node"
        )
    given.setdefault("pod_size", get_topology_domain_multiple())
    if "created_by_factory" in arguments:  # only silences a warning about topologies from the data centre
        given["created_by_factory"] = True
    try:
        return Topology(world_size=world_size, compute_device=device.type, **given), batch_size
    except (TypeError, ValueError, AssertionError) as error:
        raise SetupError(f"topology {dict(topology or {})} cannot be had: {error}") from error
