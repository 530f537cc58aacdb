"""Shards a LightningModule the first time that a strategy is given it.

The tables stay sharded when training ends, and the module may then go to another trainer, which has a strategy of its
own: so how it was sharded is kept in the module.

Tested in ``tests/strategies/recommender/test_strategy.py``.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.recsys.sharding.replicas import make_replica_groups
from lightning_pipe.recsys.sharding.shard import ShardedModel, shard_model
from lightning_pipe.recsys.tasks.options import ShardingOptions
from lightning_pipe.strategies.recommender.quiet import quiet_torchrec

__all__ = ["shard_once"]

_ATTRIBUTE = "_lightning_pipe_sharding"


@dataclass(frozen=True)
class _Sharding:
    model: ShardedModel
    asked: dict[str, Any]  # by the strategy that sharded it


def shard_once(
    module: pl.LightningModule,
    sharding: ShardingOptions,
    *,
    sparse_optimizer: Mapping[str, Any] | None,
    quantized_comms: Any,
    device: torch.device,
    timeout: timedelta | None,
    ranks_per_node: int,
) -> ShardedModel:
    """Shard *module* in place, unless that is done; every rank calls this.

    Args:
        module: holds unsharded TorchRec modules, or is what this function has sharded before.
        sharding: how to shard the tables; a field that is None asks for nothing.
        sparse_optimizer: see :func:`~lightning_pipe.recsys.sharding.shard.shard_model`.
        quantized_comms: see there.
        device: where tables and dense parameters live.
        timeout: of the process group to shard over, which is made here: all ranks, for as long as the module lives.
        ranks_per_node: as the trainer has it.

    Raises:
        SetupError: on every rank, what cannot be sharded or trained as asked; or *module* is sharded already, and
            in another way than is asked for.
    """
    quiet_torchrec()
    asked = {"sparse_optimizer": sparse_optimizer, "quantized_comms": quantized_comms, **vars(sharding)}
    held: _Sharding | None = module.__dict__.get(_ATTRIBUTE)
    if held is None:
        arguments = {**asked, "sharding_plan": sharding.plan}
        del arguments["plan"]
        replicas = make_replica_groups(arguments.pop("replicas", None), arguments.pop("sync_every", None), timeout)
        groups = [new_group(timeout=timeout)]
        if replicas is not None:
            groups += [replicas.shards, replicas.peers]
        try:
            # Lightning's launcher does not say it, and TorchRec would take all ranks for one node's.
            with _in_environment("LOCAL_WORLD_SIZE", str(ranks_per_node)):
                model = shard_model(module, device=device, group=groups[0], replicas=replicas, **arguments)
        except BaseException:
            for group in groups:
                dist.destroy_process_group(group)
            raise
        held = _Sharding(model, asked)
        module.__dict__[_ATTRIBUTE] = held
        return held.model
    for name, value in asked.items():
        if value is not None and value != held.asked[name]:
            raise SetupError(
                f"the module's tables were sharded by an earlier strategy with {name}={held.asked[name]!r}; this one"
                f" has {name}={value!r}. Give the same, or leave it out, or make a new module"
            )
    return held.model


@contextmanager
def _in_environment(name: str, value: str) -> Generator[None, None, None]:
    """In the body, the environment has the variable: as it was set, or else with this value."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
