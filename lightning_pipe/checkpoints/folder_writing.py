"""Writes a checkpoint folder; every rank writes its own part.

Tensors are written by ``torch.distributed.checkpoint``, which can load them on another number of ranks. Lightning's
other values are written by rank 0 to one file. ``atomic_folder`` replaces the folder, ``folder_reading`` reads it.
"""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_pipe._compat.torch import fsspec_writer
from lightning_pipe.checkpoints.atomic_folder import begin_folder, discard_folder, finish_folder, folder_to_write
from lightning_pipe.checkpoints.background_save import BackgroundSave, HostCopySavePlanner
from lightning_pipe.checkpoints.remote_folder import (
    Folder,
    begin_remote_checkpoint,
    finish_remote_checkpoint,
    parse_local_or_remote_path,
)
from lightning_pipe.checkpoints.safe_reading import SafeFileSystemReader, with_checksum
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.object_collectives import run_on_all_ranks, run_on_rank

T = TypeVar("T")
# Signature of write_checkpoint, whose last argument is optional.
WriteFolder = Callable[..., None]


class ExtraCheckpointFiles(Protocol):
    """Additional files of each rank, with data outside the state."""

    def copy_changes(self) -> None:
        """Copy the data as they are now, before they are written in the background."""

    def mark_commit_queued(self) -> None:
        """Called when the background has accepted the save."""

    def commit(self, group: dist.ProcessGroup | None, *, to_write: bool) -> None:
        """Make the data durable where they belong, on all ranks together."""

    def write_files(self, folder: Path) -> None:
        """Write this rank's files into the checkpoint's folder, without communication between ranks."""


META = "meta.pt"
# Key of Lightning's dictionary for the references to the rows of dynamic tables.
DYNAMIC_ROWS = "dynamic_rows"


def write_checkpoint(
    path: str | Path, state: dict[str, Any], extra_state: dict[str, Any], part: ExtraCheckpointFiles | None = None
) -> None:
    """Write a checkpoint to the folder *path*. Every rank must call this."""
    folder = parse_local_or_remote_path(path)
    with _name_lost_ranks_in_errors(folder):
        packed = run_on_all_ranks(
            lambda: _serialize_extra_state(extra_state), _format_write_error(folder), dist.group.WORLD
        )
    _write_checkpoint_folder(folder, state, packed, dcp.DefaultSavePlanner(), dist.group.WORLD, part)


def write_checkpoint_in_background(
    saves: BackgroundSave,
    path: str | Path,
    state: dict[str, Any],
    values: dict[str, Any],
    part: ExtraCheckpointFiles | None,
) -> None:
    """Copy the current values of the arguments and write them as :func:`write_checkpoint` does, in the background."""
    folder = parse_local_or_remote_path(path)

    def copy_state_to_host() -> tuple[HostCopySavePlanner, bytes]:
        snapshot = HostCopySavePlanner(state), _serialize_extra_state(values)
        if part is not None:
            part.copy_changes()
        return snapshot

    with _name_lost_ranks_in_errors(folder):
        copies, packed = run_on_all_ranks(copy_state_to_host, _format_write_error(folder), dist.group.WORLD)
    saves.start(lambda: _write_checkpoint_folder(folder, {}, packed, copies, saves.group, part))
    if part is not None:
        part.mark_commit_queued()


def _write_checkpoint_folder(
    folder: Folder,
    state: dict[str, Any],
    packed: bytes,
    planner: dcp.SavePlanner,
    group: dist.ProcessGroup | None,
    part: ExtraCheckpointFiles | None = None,
) -> None:
    failed, first = _format_write_error(folder), dist.get_rank(group) == 0
    with _name_lost_ranks_in_errors(folder):
        if part is not None:
            part.commit(group, to_write=True)
        begun = run_on_rank(lambda: _begin_checkpoint_folder(folder), failed, group)
        unfinished: Folder = folder_to_write(folder) if isinstance(folder, Path) else folder.parent / begun
        try:
            dcp.save(state, planner=planner, process_group=group, **_get_dcp_save_kwargs(unfinished))
            if part is not None:
                run_on_all_ranks(partial(_write_extra_files, part, unfinished), failed, group)
            run_on_rank(lambda: _finish_checkpoint_folder(folder, unfinished, begun, packed), failed, group)
        except (dcp.CheckpointException, SetupError) as error:  # on every rank, whichever failed
            if first:
                _discard_unfinished_checkpoint(folder, unfinished)
            if isinstance(error, SetupError):
                raise
            raise SetupError(f"{failed}: {describe_failures(error)}") from error


def _get_dcp_save_kwargs(unfinished: Folder) -> dict[str, Any]:
    if isinstance(unfinished, Path):
        return {"checkpoint_id": unfinished}
    # Object stores are durable; a sync would write the caches of all local disks.
    return {"storage_writer": fsspec_writer(str(unfinished), sync_files=False, use_listings_cache=False)}


def _write_extra_files(part: ExtraCheckpointFiles, unfinished: Folder) -> None:
    if isinstance(unfinished, Path):
        part.write_files(unfinished)
        return
    with tempfile.TemporaryDirectory(prefix="lightning_pipe_") as local:
        part.write_files(Path(local))
        unfinished.upload(Path(local))


def _finish_checkpoint_folder(folder: Folder, unfinished: Folder, begun: Any, packed: bytes) -> None:
    metadata = unfinished / ".metadata"
    metadata.write_bytes(with_checksum(metadata.read_bytes()))
    (unfinished / META).write_bytes(packed)
    if isinstance(folder, Path):
        finish_folder(folder, begun)
    else:
        assert not isinstance(unfinished, Path)
        files = {info.relative_path for info in SafeFileSystemReader(unfinished).read_metadata().storage_data.values()}
        if missing := sorted(files - unfinished.files()):
            raise SetupError(f"another job has removed {missing[0]!r} from {str(unfinished)!r}")
        finish_remote_checkpoint(folder, begun)


def _discard_unfinished_checkpoint(folder: Folder, unfinished: Folder) -> None:
    if isinstance(folder, Path):
        discard_folder(folder)
    else:
        assert not isinstance(unfinished, Path)
        with suppress(OSError):  # the next save removes it
            unfinished.remove()


def _begin_checkpoint_folder(folder: Folder) -> Any:
    """Create the folder to write to. The target must be a checkpoint, an empty folder, or not exist."""
    if not isinstance(folder, Path):
        return begin_remote_checkpoint(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / META).exists():
        names = sorted(entry.name for entry in folder.iterdir())
        raise SetupError(
            f"{str(folder)!r} is a folder with other files in it ({', '.join(names[:3])}), which a checkpoint would"
            " replace. Give a new path, or the path of a checkpoint"
        )
    return begin_folder(folder)


@contextmanager
def _name_lost_ranks_in_errors(folder: Folder) -> Iterator[None]:
    """Convert an error of the process group to a SetupError that names a lost rank as the cause."""
    try:
        yield
    except SetupError:
        raise
    except RuntimeError as error:
        lost = str(error).partition("\n")[0]
        raise SetupError(
            f"{_format_write_error(folder)}, since another rank has ended or does not answer: {lost}"
        ) from error


def _format_write_error(folder: Folder) -> str:
    return f"the checkpoint {str(folder)!r} cannot be written"


def _serialize_extra_state(values: dict[str, Any]) -> bytes:
    """Serialize *values* on rank 0, so that later changes do not affect it. Returns no bytes on other ranks."""
    if dist.get_rank() != 0:
        return b""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    packed = buffer.getvalue()
    names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(packed)))
    if names:
        # Warn when the checkpoint is written, not when a run has to resume from it.
        warnings.warn(
            f"the checkpoint holds {', '.join(names)} in addition to tensors and plain types. To read it, pass"
            " weights_only=False, as in Trainer.fit(..., weights_only=False), or allow them with"
            " torch.serialization.add_safe_globals([...])",
            stacklevel=2,
        )
    return packed


def describe_failures(error: dcp.CheckpointException) -> str:
    """Reasons of a failed save or load with their ranks, without stack traces."""
    ranks: dict[str, list[int]] = {}
    for rank, (reason, _) in sorted(error.failures.items()):
        ranks.setdefault(f"{reason}".rstrip("."), []).append(rank)
    return " ".join(f"{reason} (on rank {', '.join(map(str, numbers))})." for reason, numbers in ranks.items())
