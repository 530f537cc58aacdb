"""Strategies whose checkpoints are folders, into which every rank writes its own part.

Tested in ``tests/scenarios/checkpoints/test_async_checkpoints.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision

from lightning_pipe.checkpoints.background_save import BackgroundSave
from lightning_pipe.checkpoints.folder_writing import WritePart, write_folder, write_in_background
from lightning_pipe.checkpoints.whole_folder import remove_folder
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_flags
from lightning_pipe.strategies.base import DistributedStrategy

__all__ = ["FolderCheckpointStrategy"]


class FolderCheckpointStrategy(DistributedStrategy):
    """What strategies have in common whose ranks write and read a checkpoint together.

    Args:
        async_checkpoints: while training, copy what is saved to the host, and write it as training goes on. A second
            save, and the end of training, wait for the one under way and raise what went wrong with it. Costs memory
            for a copy of what each rank holds.
        accelerator: as for Lightning's ``DDPStrategy``, and so are the others.
        parallel_devices: see there.
        cluster_environment: see there.
        precision_plugin: see there.
        process_group_backend: see there.
        timeout: see there.
        start_method: see there.

    Raises:
        SetupError: *async_checkpoints* is neither True nor False.
    """

    def __init__(
        self,
        *,
        async_checkpoints: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        check_flags(async_checkpoints=async_checkpoints)
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
        """Write a checkpoint, in the background where that was asked for, to the same contents.

        With a *part* it is never in the background: what that reads goes on changing.
        """
        saves = self._saves
        if saves is not None:
            saves.wait()
        if saves is None or part is not None:
            write_folder(path, state, rest, part)
        else:
            write_in_background(saves, path, state, rest)

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
