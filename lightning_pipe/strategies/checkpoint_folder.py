"""Checkpoints that are folders, into which every rank writes its own part.

Tensors go through ``torch.distributed.checkpoint``, which can load them on another number of ranks; what Lightning
keeps beside them is one file of rank 0.

A checkpoint is written beside its place and put there when it is whole: after a crash the place holds what it held
before, or nothing while the folder beside it is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins import CheckpointIO

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.base import DistributedStrategy

__all__ = [
    "FolderCheckpointStrategy",
    "fill_from_folder",
    "gather",
    "on_all_ranks",
    "read_metadata",
    "read_rest",
    "write_folder",
]

T = TypeVar("T")

_META = "meta.pt"


class FolderCheckpointStrategy(DistributedStrategy):
    """What strategies have in common whose ranks write and read a checkpoint together."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Removes checkpoints; they are written and read by all ranks together, and by none of Lightning's plugins."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise SetupError(
            f"the trainer was given the plugin {type(io).__name__}, but checkpoints are written by all ranks, each its"
            " own part; leave the plugin out"
        )

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A rank's part can only be loaded once it is known what that is."""
        return True

    def _agreed_path(self, filepath: str | Path, storage_options: Any) -> str | Path:
        """Where rank 0 wants a checkpoint to be."""
        if storage_options is not None:
            raise SetupError(
                f"storage_options={storage_options!r} were given, but this strategy's checkpoints are folders that all"
                " ranks write to; leave them out"
            )
        return self.broadcast(filepath)


def write_folder(path: str | Path, state: dict[str, Any], rest: dict[str, Any]) -> None:
    """Write a checkpoint to the folder *path*; every rank calls this.

    Args:
        path: the same on every rank, which all ranks can write to. What is there is replaced.
        state: this rank's part of what goes through ``torch.distributed.checkpoint``.
        rest: everything else; rank 0's is kept.

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
    failed = f"the checkpoint {str(folder)!r} cannot be written"

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

    _on_first_rank(begin, failed)
    try:
        dcp.save(state, checkpoint_id=beside)
    except dcp.CheckpointException as error:  # on every rank, whichever failed
        raise SetupError(f"{failed}: {_reasons(error)}") from error
    _on_first_rank(end, failed)


def read_metadata(folder: Path, part: str, kind: str) -> dcp.Metadata:
    """What ``torch.distributed.checkpoint`` knows of a folder. Each rank by itself; see :func:`on_all_ranks`.

    Args:
        folder: that :func:`write_folder` wrote.
        part: what its ``state`` has, and a folder of another kind has not.
        kind: what wrote it, and what else can be done, as the error says it.

    Raises:
        SetupError: there is no such folder, or it is of another kind.
    """
    found = "a file" if folder.is_file() else f"a folder without {_META}" if folder.exists() else "not there"
    if (folder / _META).is_file():
        saved = dcp.FileSystemReader(folder).read_metadata()
        if any(path[0] == part for path in (saved.planner_data or {}).values()):
            return saved
        found = "a folder of another kind"
    raise SetupError(f"the checkpoint {str(folder)!r} is {found}; needed is a folder written {kind}")


def read_rest(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """What rank 0 kept beside the tensors.

    Args:
        folder: that :func:`write_folder` wrote.
        weights_only: read it with ``torch.load``'s restricted unpickler.
    """
    rest: dict[str, Any] = torch.load(folder / _META, map_location="cpu", weights_only=bool(weights_only))
    return rest


def fill_from_folder(folder: Path, state: dict[str, Any], *, strict: bool, fix: str) -> None:
    """Fill the tensors of *state*, this rank's part, from the folder; every rank calls this.

    Args:
        folder: that :func:`write_folder` wrote.
        state: its tensors are filled in place, everything else is replaced.
        strict: whether the folder must hold all of it.
        fix: what to do where it does not fit, as the error says it.

    Raises:
        SetupError: on every rank, if it does not fit on any.
    """
    try:
        dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=not strict))
    except dcp.CheckpointException as error:  # on every rank, whichever failed
        raise SetupError(f"the checkpoint {str(folder)!r} does not fit the module: {_reasons(error)} {fix}") from error


def on_all_ranks(work: Callable[[], T], failed: str) -> T:
    """Do *work*, in which ranks do not wait for each other; raises on all ranks what went wrong on any.

    Args:
        work: its SetupErrors say all themselves.
        failed: what is not done, for the message of any other error.
    """
    problem, cause = None, None
    try:
        result = work()
    except Exception as error:  # of the file system, or of what cannot be pickled
        problem, cause = str(error) if isinstance(error, SetupError) else f"{failed}: {error}", error
    found = [text for text in gather(problem) if text is not None]
    if found:
        raise SetupError(problem or found[0]) from cause
    return result


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank; whatever can be pickled."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _on_first_rank(work: Callable[[], None], failed: str) -> None:
    on_all_ranks(work if dist.get_rank() == 0 else lambda: None, failed)


def _reasons(error: dcp.CheckpointException) -> str:
    """What went wrong, without the stacks of the ranks."""
    return " ".join(sorted({f"{reason}.".replace("..", ".") for reason, _ in error.failures.values()}))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
