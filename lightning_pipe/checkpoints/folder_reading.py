"""Reads a checkpoint folder: its metadata, the differences from a module's state, and a rank's part of the values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_pipe._compat.torch import ShardedTensor, flatten_state_dict, set_element
from lightning_pipe.checkpoints.atomic_folder import restore_half_replaced_folder
from lightning_pipe.checkpoints.folder_writing import META, describe_failures
from lightning_pipe.checkpoints.optimizer_state import describe_names
from lightning_pipe.checkpoints.remote_folder import Folder
from lightning_pipe.checkpoints.safe_reading import (
    SafeFileSystemReader,
    SafePlanner,
    load_torch_save_file,
    name_file_in_errors,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects


def read_metadata(folder: Folder, parts: Collection[str], kind: str) -> dcp.Metadata:
    """Read the ``torch.distributed.checkpoint`` metadata of a folder.

    Ranks do not communicate. To raise an error on every rank, call this in ``run_on_all_ranks``.
    """
    if isinstance(folder, Path):
        restore_half_replaced_folder(folder)
    fix = ""
    actual = f"a folder without {META}" if folder.exists() else "not there"
    if (folder / META).is_file():
        saved = SafeFileSystemReader(folder).read_metadata()
        if any(path[0] in parts for path in saved.planner_data.values()):
            return saved
        actual = "a folder of another kind"
    elif folder.is_file():
        actual = "a file"
        fix = (
            ". If it was exported from a folder, give that folder to resume the run. To start from the file's weights,"
            f" give no ckpt_path and call module.load_state_dict(torch.load({str(folder)!r},"
            " weights_only=True)['state_dict']). For a PipelineModule, call it after configure_model()"
        )
    raise SetupError(f"the checkpoint {str(folder)!r} is {actual}, expected a folder written {kind}{fix}")


def read_extra_state(folder: Folder, weights_only: bool | None) -> dict[str, Any]:
    """Values that rank 0 stored in addition to the tensors, as ``load_torch_save_file`` reads them."""
    values = load_torch_save_file(folder / META, weights_only)
    with name_file_in_errors(folder / META):
        if not isinstance(values, dict):
            raise TypeError(f"expected a dict, got a {type(values).__name__}")
    return values


def load_in_place(
    folder: Folder,
    saved: dcp.Metadata,
    state: dict[str, Any],
    *,
    strict: bool,
    weights_only: bool | None,
    fix: str,
) -> None:
    """Fill the tensors of *state*, this rank's part, from the folder. Every rank must call this."""
    planner = SafePlanner(weights_only=weights_only, allow_partial_load=not strict)
    try:
        dcp.load(state, storage_reader=SafeFileSystemReader(folder, saved), planner=planner)
    except dcp.CheckpointException as error:  # on every rank, whichever failed
        unread = sorted({str(reason) for reason, _ in error.failures.values() if isinstance(reason, SetupError)})
        if unread:
            raise SetupError(" ".join(unread)) from error
        raise SetupError(
            f"the checkpoint {str(folder)!r} does not fit the module: {describe_failures(error)} {fix}"
        ) from error


def read_full_state(
    folder: Folder,
    saved: dcp.Metadata,
    weights_only: bool | None,
    part: str | None,
    scratch_folder: Path,
    dtype_of: Callable[[Any, torch.dtype], torch.dtype] = lambda name, stored: stored,
) -> dict[str, Any]:
    """Read all values of a folder, or one part of them. Call this in one process."""
    state: dict[str, Any] = {}
    for number, (key, path) in enumerate(saved.planner_data.items()):
        stored = saved.state_dict_metadata[key]
        if part in (None, path[0]):
            # Backed by files: the operating system can evict values that do not fit into memory.
            set_element(
                state,
                path,
                allocate_target(
                    stored,
                    partial(_allocate_file_backed_tensor, scratch_folder / str(number), partial(dtype_of, path[-1])),
                ),
            )
    load_state_no_dist(folder, saved, state, weights_only)
    return state


def load_state_no_dist(folder: Folder, saved: dcp.Metadata, state: dict[str, Any], weights_only: bool | None) -> None:
    """Fill the tensors of *state* from the folder, in one process, or in each without communication."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = SafePlanner(weights_only=weights_only)
        try:
            dcp.load(state, storage_reader=SafeFileSystemReader(folder, saved), planner=planner, no_dist=True)
        except dcp.CheckpointException as error:
            raise SetupError(describe_failures(error)) from error


def allocate_target(stored: Any, make: Callable[[torch.Size, torch.dtype], Tensor]) -> Any:
    """Target to load an entry into: for a tensor, *make* called with its size and dtype; None for any other value."""
    if not isinstance(stored, TensorStorageMetadata):
        return None  # it is replaced
    return make(stored.size, stored.properties.dtype)


def _allocate_file_backed_tensor(
    file: Path, dtype_of: Callable[[torch.dtype], torch.dtype], size: torch.Size, stored: torch.dtype
) -> Tensor:
    dtype = dtype_of(stored)
    if size.numel() == 0:
        return torch.empty(size, dtype=dtype)
    return torch.from_file(str(file), shared=True, size=size.numel(), dtype=dtype).view(size)


# ---------------------------------------------------------------------- what does not fit


def find_checkpoint_mismatches(saved: dcp.Metadata, state: Mapping[str, Any], strict: bool) -> list[str]:
    """Differences between the folder and the combined states of all ranks.

    Every rank must call this; all get the same result.
    """
    stored = {
        _state_path_to_dotted_name(path): getattr(saved.state_dict_metadata[key], "size", None)
        for key, path in saved.planner_data.items()
        if path[0] in state
    }
    return describe_state_mismatches(
        stored, {_state_path_to_dotted_name(path): size for path, size in gather_state_sizes(state).items()}, strict
    )


def gather_state_sizes(state: Mapping[str, Any]) -> dict[tuple[Any, ...], torch.Size | None]:
    """Sizes of the values of *state* on all ranks, by path; None for values other than tensors.

    Every rank must call this; all get the same result.
    """
    flat, paths = flatten_state_dict(dict(state))
    sizes_by_path: dict[tuple[Any, ...], torch.Size | None] = {}
    for sizes in all_gather_objects(
        {paths[key]: _get_global_shape(value) for key, value in flat.items()}, dist.group.WORLD
    ):
        sizes_by_path.update(sizes)
    return sizes_by_path


def describe_state_mismatches(stored: Mapping[str, Any], needed: Mapping[str, Any], strict: bool) -> list[str]:
    """Entries that are missing, unexpected or of another size; if *strict* is False, only those of another size."""
    problems = describe_names("missing in it", needed.keys() - stored.keys()) if strict else []
    problems += describe_names("unexpected in it", stored.keys() - needed.keys()) if strict else []
    sizes = [
        f"{name} ({list(stored[name])}, expected {list(needed[name])})"
        for name in stored.keys() & needed.keys()
        if None not in (stored[name], needed[name]) and stored[name] != needed[name]
    ]
    return problems + describe_names("of another size", sizes)


def _get_global_shape(value: Any) -> torch.Size | None:
    if isinstance(value, ShardedTensor):
        return value.metadata().size
    return value.size() if isinstance(value, Tensor) else None


def _state_path_to_dotted_name(path: tuple[Any, ...]) -> str:
    """Dotted name of a path without its first element, the part."""
    return ".".join(map(str, path[1:]))
