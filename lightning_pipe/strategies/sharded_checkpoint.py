"""Checkpoints of a sharded model: a folder, into which every rank writes its own shards.

The tables and the state of their fused optimisers go through ``torch.distributed.checkpoint``, which can load them on
another number of ranks; what Lightning keeps beside them (loops, callbacks, dense optimisers) is one file of rank 0.

A checkpoint is written beside its place and put there when it is whole: after a crash the place holds what it held
before, or nothing while the folder beside it is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
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
        checkpoint: Lightning's dictionary, its ``state_dict`` holding this rank's shards. Without states of optimisers
            (``save_weights_only``), those of the tables are left out too.
        path: the same on every rank, which all ranks can write to. What is there is replaced.
        sharded: the model, for the state of the tables' optimisers.

    Raises:
        SetupError: on every rank, if any cannot write; what was there before is as it was.
    """
    if "://" in str(path):
        raise SetupError(
            f"the checkpoint's path is {str(path)!r}, but sharded checkpoints are written by all ranks to a folder;"
            " give the path of one that they share"
        )
    folder = Path(path)
    beside, replaced = (folder.with_name(f".{folder.name}.{kind}") for kind in ("writing", "replaced"))
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
    state = {"model": checkpoint["state_dict"]}
    if "optimizer_states" in checkpoint:
        state["tables"] = sharded.fused_optimizer.state_dict()

    def begin() -> None:
        _remove(beside)
        beside.mkdir(parents=True)

    def end() -> None:
        torch.save(rest, beside / _META)
        _remove(replaced)
        if os.path.lexists(folder):
            folder.rename(replaced)
        beside.rename(folder)
        _remove(replaced)

    _on_first_rank(begin, folder)
    try:
        dcp.save(state, checkpoint_id=beside)
    except dcp.CheckpointException as error:  # on every rank, whichever failed
        raise SetupError(f"the checkpoint {str(folder)!r} cannot be written: {_reasons(error)}") from error
    _on_first_rank(end, folder)


def load_sharded_checkpoint(
    path: str | Path,
    sharded: ShardedModel,
    *,
    with_optimizers: bool,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Fill the model, and its tables' optimisers, from the folder *path*; every rank calls this.

    Args:
        path: what :func:`save_sharded_checkpoint` wrote.
        sharded: the model, sharded in whatever way.
        with_optimizers: whether to load the state of the tables' optimisers too, where the checkpoint has them.
        strict: whether the checkpoint must hold everything that the model does.
        weights_only: read the rest of Lightning's dictionary with ``torch.load``'s restricted unpickler.

    Returns:
        The rest of Lightning's dictionary, its ``state_dict`` empty.

    Raises:
        SetupError: on every rank, if any finds no such folder, or the checkpoint is of another model.
    """
    folder = Path(path)
    _raise_together(_not_a_checkpoint(folder))
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {"model": sharded.dmp.state_dict()}
    if with_optimizers and any(key.startswith("tables.") for key in saved):
        state["tables"] = sharded.fused_optimizer.state_dict()
    try:
        dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=not strict))
    except dcp.CheckpointException as error:  # on every rank, whichever failed
        raise SetupError(
            f"the checkpoint {str(folder)!r} does not fit the module: {_reasons(error)} Build the module, and shard its"
            " tables, as when it was written"
        ) from error
    sharded.dmp.load_state_dict(state["model"])
    if "tables" in state:
        sharded.fused_optimizer.load_state_dict(state["tables"])
    rest: dict[str, Any] = torch.load(folder / _META, map_location="cpu", weights_only=bool(weights_only))
    return {**rest, "state_dict": {}}


def _not_a_checkpoint(folder: Path) -> str | None:
    if (folder / _META).is_file():
        return None
    found = "a file" if folder.is_file() else f"a folder without {_META}" if folder.exists() else "not there"
    return (
        f"the checkpoint {str(folder)!r} is {found}; needed is a folder written under a recsys plan. Give the path of"
        " one, or load the module's state before it is sharded"
    )


def _on_first_rank(work: Callable[[], None], folder: Path) -> None:
    """Do *work* on rank 0 while the others wait; raises on all what went wrong there."""
    problem, cause = None, None
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as error:  # of the file system, or of what cannot be pickled
            problem, cause = f"the checkpoint {str(folder)!r} cannot be written: {error}", error
    _raise_together(problem, cause)


def _raise_together(problem: str | None, cause: Exception | None = None) -> None:
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [text for text in problems if text is not None]
    if found:
        raise SetupError(problem or found[0]) from cause


def _reasons(error: dcp.CheckpointException) -> str:
    """What went wrong, without the stacks of the ranks."""
    return " ".join(sorted({f"{reason}.".replace("..", ".") for reason, _ in error.failures.values()}))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
