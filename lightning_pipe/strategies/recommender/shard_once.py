"""Shards a LightningModule when a strategy sets it up for the first time.

Tables stay sharded after training, and the module may be passed to another trainer with another strategy. The sharding
is therefore stored in the module.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.process_groups import inherit_default_group_timeout, new_group
from lightning_pipe.recsys.sharding.replicas import make_replica_groups
from lightning_pipe.recsys.sharding.shard_model import shard_model
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.options import ShardingOptions
from lightning_pipe.strategies.recommender.warm_start import WarmStartOptions
from lightning_pipe.strategies.recommender.warning_filters import filter_torchrec_warnings

_ATTRIBUTE = "_lightning_pipe_sharding"


@dataclass
class _ModuleShardingRecord:
    model: ShardedModel
    requested: dict[str, Any]  # arguments of the strategy that sharded the module
    pending: WarmStartOptions | None  # until the module has initial values from a checkpoint


def shard_module_once(
    module: pl.LightningModule,
    sharding: ShardingOptions,
    *,
    sparse_optimizer: Mapping[str, Any] | None,
    quantized_comms: Any,
    dedup: bool | Sequence[str],
    device: torch.device,
    ranks_per_node: int,
    init_from: WarmStartOptions | None = None,
    trains: bool = True,
) -> ShardedModel:
    """Shard a module in place unless it is already sharded. Every rank calls this function."""
    filter_torchrec_warnings()
    check_agreement([("init_from", str(init_from))], "warm start", dist.group.WORLD, error_class=SetupError)
    wire = {"quantized_comms": quantized_comms, "dedup": dedup or None}
    options = {"sparse_optimizer": sparse_optimizer, **wire, "init_from": init_from}
    requested = {**options, **vars(sharding)}
    state: _ModuleShardingRecord | None = module.__dict__.get(_ATTRIBUTE)
    if state is None:
        arguments = {**requested, "sharding_plan": sharding.plan, "trains": trains}
        del arguments["plan"], arguments["init_from"]
        replicas = make_replica_groups(arguments.pop("replicas", None), arguments.pop("sync_every", None))
        groups = [new_group()]
        if replicas is not None:
            groups += [replicas.shards, replicas.peers]
        try:
            # Lightning's launcher does not set it, and TorchRec would then assume that all ranks are on one node.
            with _temporary_env_var_default("LOCAL_WORLD_SIZE", str(ranks_per_node)), inherit_default_group_timeout():
                model = shard_model(module, device=device, group=groups[0], replicas=replicas, **arguments)
        except BaseException:
            for group in groups:
                dist.destroy_process_group(group)
            raise
        state = _ModuleShardingRecord(model, requested, init_from)
        module.__dict__[_ATTRIBUTE] = state
        return state.model
    for name, value in requested.items():
        if value is not None and value != state.requested[name]:
            raise SetupError(
                f"the module's tables were sharded by an earlier strategy with {name}={state.requested[name]!r}, but"
                f" this one has {name}={value!r}. Use the same value, remove the argument, or create a new module"
            )
    return state.model


def get_pending_warm_start(module: pl.LightningModule) -> WarmStartOptions | None:
    """Checkpoint that a sharded module still needs its initial values from; None without one."""
    state: _ModuleShardingRecord = module.__dict__[_ATTRIBUTE]
    return state.pending


def mark_warm_started(module: pl.LightningModule) -> None:
    """Note that a sharded module has values from a checkpoint, which later runs keep."""
    state: _ModuleShardingRecord = module.__dict__[_ATTRIBUTE]
    state.pending = None


@contextmanager
def _temporary_env_var_default(name: str, value: str) -> Generator[None, None, None]:
    """Context in which an environment variable is set. An existing value stays."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
