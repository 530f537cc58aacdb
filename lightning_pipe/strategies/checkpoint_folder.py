"""Base class of strategies whose checkpoints are folders to which every rank writes its own part."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision

from lightning_pipe._compat.lightning import install_ckpt_path_check, patch_last_checkpoint_for_urls
from lightning_pipe.checkpoints.atomic_folder import remove_folder
from lightning_pipe.checkpoints.background_save import BackgroundSave
from lightning_pipe.checkpoints.folder_writing import (
    ExtraCheckpointFiles,
    write_checkpoint,
    write_checkpoint_in_background,
)
from lightning_pipe.checkpoints.remote_folder import parse_local_or_remote_path, remove_remote_checkpoint
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_booleans
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.strategies.base import DistributedStrategy


class FolderCheckpointStrategy(DistributedStrategy):
    """Base class of strategies whose ranks write and read a checkpoint together.

    Args:
        async_checkpoints: True to copy checkpoints to the host and write them in the background during training
            (default False). The next save and the end of training wait for the write and raise its errors. Costs host
            memory for a copy of each rank's part.
        timeout: timeout of process groups and of the start of all ranks (default 30 minutes). If the script has made
            the default process group, that group's timeout holds.
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
        **unknown: Any,
    ) -> None:
        self._refuse_unknown_arguments(unknown)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        check_booleans(async_checkpoints=async_checkpoints)
        self._async_checkpoints = async_checkpoints
        self._saves: BackgroundSave | None = None  # None outside of training
        self._weights_only: bool | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's checkpoint plugin, which is not used: all ranks write and read checkpoints together."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise SetupError(
            f"the trainer has the plugin {type(io).__name__}, but all ranks write checkpoints together, each its own"
            " part. Remove the plugin"
        )

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, since the part of each rank is only known after set-up."""
        return True

    # ------------------------------------------------------------------ argument weights_only

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher: Any = self._launcher
        launcher.launch = partial(self._record_weights_only_and_launch, launcher.launch)

    def _record_weights_only_and_launch(
        self, launch: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Complete two arguments of ``Trainer.fit``, ``validate``, ``test`` or ``predict``.

        ``ckpt_path="last"`` also finds checkpoints at URLs. ``weights_only`` is recorded, because Lightning 2.6 does
        not pass it on when a strategy reads a checkpoint after set-up.
        """
        if kwargs.get("trainer") is not None:
            patch_last_checkpoint_for_urls(kwargs["trainer"])
            install_ckpt_path_check(kwargs["trainer"], self._check_path_and_warm_start)
        self._weights_only = inspect.signature(function).bind_partial(*args).arguments.get("weights_only")
        return launch(function, *args, **kwargs)

    def _check_path_and_warm_start(self, path: Any) -> None:
        """Compare the checkpoint to resume from, None without one, between ranks. Called after set-up."""
        _check_same_checkpoint_path(path)
        self._warm_start_from_checkpoint(path)

    def _warm_start_from_checkpoint(self, path: Any) -> None:
        """Set the values that a module without a checkpoint to resume from starts with. Every rank calls this."""

    def _resolve_weights_only(self, weights_only: bool | None) -> bool | None:
        """Return the argument of ``load_checkpoint``, or if it is None, the argument of the trainer's method."""
        return self._weights_only if weights_only is None else weights_only

    # ------------------------------------------------------------------ background saves

    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        callbacks = module.trainer.checkpoint_callbacks if self._async_checkpoints and module is not None else []
        if any(isinstance(callback, ModelCheckpoint) and callback.save_last == "link" for callback in callbacks):
            raise SetupError(
                "ModelCheckpoint has save_last='link', but with async_checkpoints=True the link would exist before its"
                " target. Use save_last=True, or remove async_checkpoints"
            )

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._async_checkpoints and self._saves is None:
            self._saves = BackgroundSave()

    def on_train_end(self) -> None:
        super().on_train_end()
        self.finish_saves()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        try:
            self.finish_saves()
        except Exception as error:
            exception.add_note(f"Also: {error}")  # the error that ended training stays the main error

    def finish_saves(self) -> None:
        """Wait for the pending save, and save in the foreground from now on."""
        saves = self._saves
        if saves is not None:
            try:
                saves.wait()
            finally:
                # If this is interrupted, the saves stay set, and the next call closes them.
                saves.close()
                self._saves = None

    def teardown(self) -> None:
        """As Lightning's, but without moving the module to the CPU: it stays sharded or in stages."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._record_run_completion()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint. If a save is pending, remove it only after that save is complete."""

        def remove() -> None:
            if self.is_global_zero:
                place = parse_local_or_remote_path(filepath)
                remove_folder(place) if isinstance(place, Path) else remove_remote_checkpoint(place)

        if self._saves is not None and self._saves.under_way:
            self._saves.add_success_callback(remove)
        else:
            remove()

    def _write_folder(
        self, path: str | Path, state: dict[str, Any], rest: dict[str, Any], part: ExtraCheckpointFiles | None = None
    ) -> None:
        """Write a checkpoint, in the background with ``async_checkpoints``. The contents are the same in both cases."""
        saves = self._saves
        if saves is not None:
            saves.wait()
        if saves is None:
            write_checkpoint(path, state, rest, part)
        else:
            write_checkpoint_in_background(saves, path, state, rest, part)

    # ------------------------------------------------------------------ paths

    def _agreed_path(self, filepath: str | Path, storage_options: Any) -> str | Path:
        """Return rank 0's path of a checkpoint, after checking it."""
        if storage_options is not None:
            raise SetupError(
                "storage_options were given, but this strategy's checkpoints are folders that all ranks write to."
                " Remove them; for a URL, the file system reads its environment variables and fsspec's configuration"
                " files"
            )
        path: str | Path = self.broadcast(filepath)
        parse_local_or_remote_path(path)
        return path


def _check_same_checkpoint_path(path: Any) -> None:
    """Refuse to resume on some ranks only, or from different checkpoints."""
    description = [("ckpt_path", "None" if path is None else str(path))]
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    advice = ". With 'last', all ranks need to see the same folder"
    check_agreement(description, "checkpoint to resume from", world, error_class=SetupError, advice=advice)
