"""Checkpoints of a sharded model: a folder, into which every rank writes its own shards.

The tables and the state of their fused optimisers go through ``torch.distributed.checkpoint``, which can load them on
another number of ranks; what Lightning keeps beside them (loops, callbacks, dense optimisers) is one file of rank 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.sharding import ShardedModel

_META = "meta.pt"


def save_sharded_checkpoint(checkpoint: dict[str, Any], path: str | Path, sharded: ShardedModel) -> None:
    """Write *checkpoint*, as Lightning made it, to the folder *path*; every rank calls this.

    Args:
        checkpoint: Lightning's dictionary, its ``state_dict`` holding this rank's shards.
        path: the same on every rank.
        sharded: the model, for the state of the tables' optimisers.
    """
    folder = Path(path)
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
    if dist.get_rank() == 0:
        if folder.is_file():
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dcp.save({"model": checkpoint["state_dict"], "tables": sharded.fused_optimizer.state_dict()}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(rest, folder / _META)
    dist.barrier()


def load_sharded_checkpoint(path: str | Path, sharded: ShardedModel, *, with_optimizers: bool) -> dict[str, Any]:
    """Fill the model, and its tables' optimisers, from the folder *path*; every rank calls this.

    Args:
        path: what :func:`save_sharded_checkpoint` wrote.
        sharded: the model, sharded in whatever way.
        with_optimizers: whether to load the state of the tables' optimisers too.

    Returns:
        The rest of Lightning's dictionary, its ``state_dict`` empty.

    Raises:
        SetupError: no such folder.
    """
    folder = Path(path)
    if not (folder / _META).is_file():
        found = (
            "a file" if folder.is_file() else "no such folder" if not folder.exists() else f"a folder without {_META}"
        )
        raise SetupError(
            f"the checkpoint {str(path)!r} is {found}; needed is a folder written under a recsys plan. Give the path of"
            " one, or load the module's state before it is sharded"
        )
    state: dict[str, Any] = {"model": sharded.dmp.state_dict()}
    if with_optimizers:
        state["tables"] = sharded.fused_optimizer.state_dict()
    dcp.load(state, checkpoint_id=folder)
    sharded.dmp.load_state_dict(state["model"])
    if with_optimizers:
        sharded.fused_optimizer.load_state_dict(state["tables"])
    rest: dict[str, Any] = torch.load(folder / _META, map_location="cpu", weights_only=False)
    return {**rest, "state_dict": {}}
