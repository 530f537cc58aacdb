"""Writes a checkpoint's folder: every rank its own part.

Tensors go through ``torch.distributed.checkpoint``, which can load them on another number of ranks; what Lightning
keeps beside them is one file of rank 0. ``whole_folder`` puts a folder in its place, ``folder_reading`` reads it.

Tested in ``tests/scenarios/checkpoints/test_checkpoint_faults.py``.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_pipe.checkpoints.background_save import BackgroundSave, HostCopies
from lightning_pipe.checkpoints.safe_reading import unsafe_names
from lightning_pipe.checkpoints.whole_folder import begin_folder, discard_folder, finish_folder, folder_to_write
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.together import from_rank, on_all_ranks

__all__ = ["DYNAMIC_ROWS", "META", "WriteFolder", "WritePart", "reasons", "write_folder", "write_in_background"]

T = TypeVar("T")
# As write_folder, whose last argument may be left out.
WriteFolder = Callable[..., None]
# Writes what a rank has beside tensors into the folder; ranks do not wait for each other in it.
WritePart = Callable[[Path], None]

META = "meta.pt"
# What of Lightning's dictionary says which rows of dynamic tables belong to it.
DYNAMIC_ROWS = "dynamic_rows"


def write_folder(path: str | Path, state: dict[str, Any], rest: dict[str, Any], part: WritePart | None = None) -> None:
    """Write a checkpoint to the folder *path*; every rank calls this.

    Args:
        path: the same on every rank, which all ranks can write to. What is there is replaced once all is written.
        state: this rank's part of what goes through ``torch.distributed.checkpoint``.
        rest: everything else; rank 0's is kept.
        part: writes what this rank has beside these.

    Raises:
        SetupError: on every rank, if any cannot write; what was there before is as it was.
    """
    folder = Path(path)
    with _lost_ranks_named(folder):
        packed = on_all_ranks(lambda: _pack(rest), _failed(folder), dist.group.WORLD)
    _write(folder, state, packed, dcp.DefaultSavePlanner(), dist.group.WORLD, part)


def write_in_background(saves: BackgroundSave, path: str | Path, state: dict[str, Any], rest: dict[str, Any]) -> None:
    """As :func:`write_folder`, of what the arguments hold now, while the caller goes on."""
    folder = Path(path)
    with _lost_ranks_named(folder):
        copies, packed = on_all_ranks(lambda: (HostCopies(state), _pack(rest)), _failed(folder), dist.group.WORLD)
    saves.start(lambda: _write(folder, {}, packed, copies, saves.group))


def _write(
    folder: Path,
    state: dict[str, Any],
    packed: bytes,
    planner: dcp.SavePlanner,
    group: dist.ProcessGroup | None,
    part: WritePart | None = None,
) -> None:
    failed, first, beside = _failed(folder), dist.get_rank(group) == 0, folder_to_write(folder)

    def finish(permissions: int) -> None:
        (beside / META).write_bytes(packed)
        finish_folder(folder, permissions)

    with _lost_ranks_named(folder):
        permissions = from_rank(lambda: _begin(folder), failed, group)
        try:
            dcp.save(state, checkpoint_id=beside, planner=planner, process_group=group)
            if part is not None:
                on_all_ranks(partial(part, beside), failed, group)
            from_rank(lambda: finish(permissions), failed, group)
        except (dcp.CheckpointException, SetupError) as error:  # on every rank, whichever failed
            if first:
                discard_folder(folder)
            if isinstance(error, SetupError):
                raise
            raise SetupError(f"{failed}: {reasons(error)}") from error


def _begin(folder: Path) -> int:
    """Make room for the checkpoint; what is in its place must be one, or nothing."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / META).exists():
        found = sorted(one.name for one in folder.iterdir())
        raise SetupError(
            f"{str(folder)!r} is a folder with other things in it ({', '.join(found[:3])}), which a checkpoint would"
            " replace; give the path of a checkpoint, or of nothing"
        )
    return begin_folder(folder)


@contextmanager
def _lost_ranks_named(folder: Path) -> Iterator[None]:
    """Say what an error of the process group means."""
    try:
        yield
    except SetupError:
        raise
    except RuntimeError as error:
        lost = str(error).partition("\n")[0]
        raise SetupError(f"{_failed(folder)}, since another rank has ended or does not answer: {lost}") from error


def _failed(folder: Path) -> str:
    return f"the checkpoint {str(folder)!r} cannot be written"


def _pack(rest: dict[str, Any]) -> bytes:
    """As bytes, which what happens next cannot change."""
    if dist.get_rank() != 0:
        return b""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    packed = buffer.getvalue()
    names = unsafe_names(packed)
    if names:
        # Now, not when training must go on from it.
        warnings.warn(
            f"the checkpoint holds {', '.join(names)} beside tensors and plain types, so it can only be read with"
            " Trainer.fit(..., weights_only=False), or once torch.serialization.add_safe_globals([...]) allows that",
            stacklevel=2,
        )
    return packed


def reasons(error: dcp.CheckpointException) -> str:
    """What went wrong where, without the stacks of the ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, (reason, _) in sorted(error.failures.items()):
        ranks.setdefault(f"{reason}".rstrip("."), []).append(rank)
    return " ".join(f"{reason} (on rank {', '.join(map(str, found))})." for reason, found in ranks.items())
