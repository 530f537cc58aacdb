"""Reads a checkpoint's folder: what is in it, whether that fits, and a rank's part of it.

Tested in ``tests/scenarios/checkpoints/test_hostile_checkpoints.py``.
"""

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
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_pipe._compat.torch import ShardedTensor
from lightning_pipe.checkpoints.folder_writing import META, reasons
from lightning_pipe.checkpoints.inert_values import _Refused, described
from lightning_pipe.checkpoints.named_optimizer import listed
from lightning_pipe.checkpoints.safe_reading import SafePlanner, SafeReader, file_named, load_object
from lightning_pipe.checkpoints.stage_layout import OPTIMIZERS, TIED
from lightning_pipe.checkpoints.whole_folder import put_back
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.together import gather

__all__ = [
    "EXPORTED_FROM",
    "check_stages",
    "differences",
    "fill_from_folder",
    "misfits",
    "read_metadata",
    "read_rest",
    "read_whole",
    "room",
]

# In a file made of a checkpoint: the name of its folder, for the error where the file is taken for that.
EXPORTED_FROM = "lightning_pipe_exported_from"


def read_metadata(folder: Path, parts: Collection[str], kind: str) -> dcp.Metadata:
    """What ``torch.distributed.checkpoint`` knows of a folder. Each rank by itself; see ``on_all_ranks``.

    Args:
        folder: of a checkpoint.
        parts: what its ``state`` has one of, and a folder of another kind has not.
        kind: what wrote it, and what else can be done, as the error says it.

    Raises:
        SetupError: there is no such folder, it is of another kind, or it is damaged.
    """
    put_back(folder)
    found = "a file" if folder.is_file() else f"a folder without {META}" if folder.exists() else "not there"
    if (folder / META).is_file():
        saved = SafeReader(folder).read_metadata()
        if any(path[0] in parts for path in (saved.planner_data or {}).values()):
            return saved
        found = "a folder of another kind"
    source = _exported_from(folder) if folder.is_file() else None
    if source is None:
        raise SetupError(f"the checkpoint {str(folder)!r} is {found}; needed is a folder written {kind}")
    raise SetupError(
        f"the checkpoint {str(folder)!r} is a file that was exported from the folder {source!r}; needed is a folder"
        f" written {kind}. The folder goes on as it was; to begin with the file's weights give no ckpt_path, and call"
        f" module.load_state_dict(torch.load({str(folder)!r}, weights_only=True)['state_dict']), of a PipelineModule"
        " after its configure_model()"
    )


def _exported_from(file: Path) -> str | None:
    """The folder that a file was exported from; None where that cannot be read, or is not said."""
    try:
        found = load_object(file, None, values=False)
    except SetupError:  # whatever it is, it is no export
        return None
    source = found.get(EXPORTED_FROM) if isinstance(found, dict) else None
    return source if isinstance(source, str) else None


def read_rest(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """What rank 0 kept beside the tensors.

    Args:
        folder: of a checkpoint.
        weights_only: False to allow any class; see :func:`~lightning_pipe.checkpoints.safe_reading.load_object`.

    Raises:
        SetupError: it is damaged, or holds a class that is not allowed.
    """
    rest = load_object(folder / META, weights_only)
    with file_named(folder / META):
        if not isinstance(rest, dict):
            raise _Refused(f"it holds {described(rest)}, expected a dict")
    return rest


def check_stages(folder: Path, rest: Mapping[str, Any]) -> None:
    """Check what :func:`read_rest` returned of a folder of stages: names of tied parameters and of those in groups.

    Raises:
        SetupError: they are not as they are written.
    """
    with file_named(folder / META):
        tied = rest.get(TIED, {})
        if not isinstance(tied, dict) or not all(isinstance(one, str) for pair in tied.items() for one in pair):
            raise _Refused(f"its field {TIED!r} is no dict of names by names")
        if not isinstance(rest.get(OPTIMIZERS, []), list):
            raise _Refused(f"its field {OPTIMIZERS!r} is {described(rest[OPTIMIZERS])}, expected a list")
        for number, stored in enumerate(rest.get(OPTIMIZERS, ())):
            groups = stored.get("param_groups") if isinstance(stored, dict) else None
            for group in groups if isinstance(groups, list) else [None]:
                names = group.get("params") if isinstance(group, dict) else None
                if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                    raise _Refused(
                        f"its field {OPTIMIZERS!r} has no names of parameters for the groups of optimiser {number}"
                    )


def fill_from_folder(
    folder: Path,
    saved: dcp.Metadata,
    state: dict[str, Any],
    *,
    strict: bool,
    weights_only: bool | None,
    fix: str,
) -> None:
    """Fill the tensors of *state*, this rank's part, from the folder; every rank calls this.

    Args:
        folder: of a checkpoint.
        saved: what :func:`read_metadata` returned.
        state: its tensors are filled in place, everything else is replaced.
        strict: whether the folder must hold all of it.
        weights_only: as in :func:`read_rest`.
        fix: what to do where it does not fit, as the error says it.

    Raises:
        SetupError: on every rank, if it does not fit on any, or a file is damaged.
    """
    planner = SafePlanner(weights_only=weights_only, allow_partial_load=not strict)
    try:
        dcp.load(state, storage_reader=SafeReader(folder, saved), planner=planner)
    except dcp.CheckpointException as error:  # on every rank, whichever failed
        unread = sorted({str(reason) for reason, _ in error.failures.values() if isinstance(reason, SetupError)})
        if unread:
            raise SetupError(" ".join(unread)) from error
        raise SetupError(f"the checkpoint {str(folder)!r} does not fit the module: {reasons(error)} {fix}") from error


def read_whole(
    folder: Path, saved: dcp.Metadata, weights_only: bool | None, only: str | None, beside: Path
) -> dict[str, Any]:
    """All that the folder holds, or one part of it. One process calls this.

    Args:
        folder: of a checkpoint.
        saved: what :func:`read_metadata` returned.
        weights_only: as in :func:`read_rest`.
        only: the part, or None for all.
        beside: an empty folder, where the tensors' values are as long as the tensors.

    Raises:
        SetupError: a file is damaged, or holds a class that is not allowed.
    """
    whole: dict[str, Any] = {}
    for number, (key, path) in enumerate(saved.planner_data.items()):
        stored = saved.state_dict_metadata[key]
        if only in (None, path[0]):
            # Values that do not fit into memory are written to the file, and read again when they are used.
            set_element(whole, path, room(stored, partial(_on_disk, beside / str(number))))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = SafePlanner(weights_only=weights_only)
        try:
            dcp.load(whole, storage_reader=SafeReader(folder, saved), planner=planner, no_dist=True)
        except dcp.CheckpointException as error:
            raise SetupError(reasons(error)) from error
    return whole


def room(stored: Any, make: Callable[[torch.Size, torch.dtype], Tensor]) -> Any:
    """Something to load an entry into, which *make* makes for a tensor of a size and kind."""
    if not isinstance(stored, TensorStorageMetadata):
        return None  # it is replaced
    return make(stored.size, stored.properties.dtype)


def _on_disk(file: Path, size: torch.Size, dtype: torch.dtype) -> Tensor:
    if size.numel() == 0:
        return torch.empty(size, dtype=dtype)
    return torch.from_file(str(file), shared=True, size=size.numel(), dtype=dtype).view(size)


# ---------------------------------------------------------------------- what does not fit


def misfits(saved: dcp.Metadata, state: Mapping[str, Any], strict: bool) -> list[str]:
    """What all ranks' parts together have and the folder has not, and so on; the same on every rank, which calls this.

    Args:
        saved: what :func:`read_metadata` returned.
        state: this rank's part of what is to be filled; parts of the folder that it does not name are left alone.
        strict: whether the folder must hold just what the ranks do; sizes must fit in any case.
    """
    stored = {
        _name(path): getattr(saved.state_dict_metadata[key], "size", None)
        for key, path in (saved.planner_data or {}).items()
        if path[0] in state
    }
    flat, paths = flatten_state_dict(dict(state))
    own = {_name(paths[key]): _size(value) for key, value in flat.items()}
    needed: dict[str, Any] = {}
    for sizes in gather(own, dist.group.WORLD):
        needed.update(sizes)
    return differences(stored, needed, strict)


def differences(stored: Mapping[str, Any], needed: Mapping[str, Any], strict: bool) -> list[str]:
    """What is missing, unexpected, or of another size; the latter also where it is not strict."""
    problems = listed("missing in it", needed.keys() - stored.keys()) if strict else []
    problems += listed("unexpected in it", stored.keys() - needed.keys()) if strict else []
    sizes = [
        f"{name} ({list(stored[name])}, needed is {list(needed[name])})"
        for name in stored.keys() & needed.keys()
        if None not in (stored[name], needed[name]) and stored[name] != needed[name]
    ]
    return problems + listed("of another size", sizes)


def _size(value: Any) -> torch.Size | None:
    if isinstance(value, ShardedTensor):
        return value.metadata().size
    return value.size() if isinstance(value, Tensor) else None


def _name(path: tuple[Any, ...]) -> str:
    """Without the part that it is in."""
    return ".".join(map(str, path[1:]))
