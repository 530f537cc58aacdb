"""Checkpoints that are folders, into which every rank writes its own part.

Tensors go through ``torch.distributed.checkpoint``, which can load them on another number of ranks; what Lightning
keeps beside them is one file of rank 0. ``whole_folder`` puts a folder in its place, ``folder_reading`` reads it.
"""

from __future__ import annotations

import inspect
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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.strategies.background_save import BackgroundSave, HostCopies
from lightning_pipe.strategies.base import DistributedStrategy
from lightning_pipe.strategies.safe_reading import unsafe_names
from lightning_pipe.strategies.whole_folder import (
    begin_folder,
    discard_folder,
    finish_folder,
    folder_to_write,
    remove_folder,
)

__all__ = [
    "DYNAMIC_ROWS",
    "META",
    "FolderCheckpointStrategy",
    "WriteFolder",
    "WritePart",
    "reasons",
    "write_folder",
]

T = TypeVar("T")
# As write_folder, whose last argument may be left out.
WriteFolder = Callable[..., None]
# Writes what a rank has beside tensors into the folder; ranks do not wait for each other in it.
WritePart = Callable[[Path], None]

META = "meta.pt"
# What of Lightning's dictionary says which rows of dynamic tables belong to it.
DYNAMIC_ROWS = "dynamic_rows"


class FolderCheckpointStrategy(DistributedStrategy):
    """What strategies have in common whose ranks write and read a checkpoint together.

    Args:
        async_checkpoints: while training, copy what is saved to the host, and write it as training goes on. A second
            save, and the end of training, wait for the one under way and raise what went wrong with it. Costs memory
            for a copy of what each rank holds.
        arguments: of Lightning's ``DDPStrategy``.
    """

    def __init__(self, *, async_checkpoints: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._async_checkpoints = async_checkpoints
        self._saves: BackgroundSave | None = None  # from the start of training to its end
        self._weights_only: bool | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What Lightning asks for; checkpoints are written and read by all ranks together, and by no plugin."""
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

    # ------------------------------------------------------------------ what the user allows

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self._launcher
        launcher.launch = partial(self._launch, launcher.launch)

    def _launch(self, launch: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note ``weights_only`` of ``Trainer.fit`` and the like.

        Lightning 2.6 leaves it out when it has a strategy read a checkpoint after set-up.
        """
        self._weights_only = inspect.signature(function).bind_partial(*args).arguments.get("weights_only")
        return launch(function, *args, **kwargs)

    def _allowed(self, weights_only: bool | None) -> bool | None:
        """What ``load_checkpoint`` was given, or else what the user gave the trainer."""
        return self._weights_only if weights_only is None else weights_only

    # ------------------------------------------------------------------ in the background

    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        callbacks = module.trainer.checkpoint_callbacks if self._async_checkpoints and module is not None else []
        if any(isinstance(one, ModelCheckpoint) and one.save_last == "link" for one in callbacks):
            raise SetupError(
                "ModelCheckpoint has save_last='link', but with async_checkpoints=True the link would be there before"
                " what it points to. Use save_last=True, or leave async_checkpoints out"
            )

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._async_checkpoints and self._saves is None:
            self._saves = BackgroundSave(self._timeout)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._end_saves()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        try:
            self._end_saves()
        except Exception as error:
            exception.add_note(f"Also: {error}")  # what ended training is what is raised

    def _end_saves(self) -> None:
        """Wait for the save under way, and save in the foreground from now on."""
        saves = self._saves
        if saves is not None:
            try:
                saves.wait()
            finally:
                # An interrupt here leaves the group to the thread that uses it, and to the next call.
                saves.close()
                self._saves = None

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; while one is being written, not before that is whole."""

        def remove() -> None:
            if self.is_global_zero:
                remove_folder(Path(filepath))

        if self._saves is not None and self._saves.under_way:
            self._saves.then(remove)
        else:
            remove()

    def _write_folder(
        self, path: str | Path, state: dict[str, Any], rest: dict[str, Any], part: WritePart | None = None
    ) -> None:
        """As :func:`write_folder`; in the background where that was asked for, to the same contents.

        With a *part* it is never in the background: what that reads goes on changing.
        """
        saves, folder = self._saves, Path(path)
        if saves is not None:
            saves.wait()
        if saves is None or part is not None:
            write_folder(folder, state, rest, part)
            return
        with _lost_ranks_named(folder):
            copies, packed = on_all_ranks(lambda: (HostCopies(state), _pack(rest)), _failed(folder))
        saves.start(lambda: _write(folder, {}, packed, copies, saves.group))

    # ------------------------------------------------------------------ where

    def _agreed_path(self, filepath: str | Path, storage_options: Any) -> str | Path:
        """Where rank 0 wants a checkpoint to be."""
        if storage_options is not None:
            raise SetupError(
                f"storage_options={storage_options!r} were given, but this strategy's checkpoints are folders that all"
                " ranks write to; leave them out"
            )
        path: str | Path = self.broadcast(filepath)
        if "://" in str(path):
            raise SetupError(
                f"the checkpoint's path is {str(path)!r}, but sharded checkpoints are written by all ranks to a folder;"
                " give the path of one that they share"
            )
        return path


# ---------------------------------------------------------------------- writing


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
        packed = on_all_ranks(lambda: _pack(rest), _failed(folder))
    _write(folder, state, packed, dcp.DefaultSavePlanner(), None, part)


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

    def on_first_rank(work: Callable[[], T]) -> T | None:
        return on_all_ranks(lambda: work() if first else None, failed, group)

    with _lost_ranks_named(folder):
        permissions = on_first_rank(lambda: _begin(folder))
        try:
            dcp.save(state, checkpoint_id=beside, planner=planner, process_group=group)
            if part is not None:
                on_all_ranks(partial(part, beside), failed, group)
            on_first_rank(lambda: finish(permissions or 0))
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
