"""Checks of the parts of a checkpoint that Lightning reads unchecked: states of callbacks and positions of loops.

``ModelCheckpoint`` deletes the files that its state names, and an invalid position causes an unrelated error later in
training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import lightning.pytorch as pl
from fsspec.utils import get_protocol
from packaging.version import InvalidVersion, Version

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import printable, shown

# Fields of ModelCheckpoint's state that contain the path of a checkpoint, which it may delete later.
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
_MOST = 2**53  # larger than any number of batches
_DEPTH = 4  # maximum depth of nested dicts; Lightning uses three


def checked_contents(checkpoint: dict[str, Any], path: str | Path, module: pl.LightningModule | None) -> dict[str, Any]:
    """Check a checkpoint before Lightning reads it, and return it.

    Args:
        checkpoint: contents of the file or folder.
        path: path of the checkpoint, for messages.
        module: module of the trainer that reads the checkpoint; None without a module.

    Raises:
        SetupError: an entry has the wrong type, the state of a callback names a checkpoint outside its folder, or a
            loop's position is not a count.
    """
    folders: list[Any] = [str(path).rstrip("/").rpartition("/")[0]]  # where the checkpoint itself is
    if module is not None:
        trainer = module.trainer
        folders += [trainer.default_root_dir, *(getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks)]
    problem = (
        _of_states(checkpoint)
        or _of_callbacks(checkpoint.get("callbacks"), folders)
        or _of_loops(checkpoint.get("loops"))
    )
    if problem is not None:
        raise SetupError(f"The checkpoint {str(path)!r} is damaged: {problem}. Resume from another checkpoint.")
    return checkpoint


def _of_states(checkpoint: dict[str, Any]) -> str | None:
    version = checkpoint.get("pytorch-lightning_version")
    try:
        Version(version)  # type: ignore[arg-type]
    except (InvalidVersion, TypeError):
        return f"expected a version in 'pytorch-lightning_version', got {shown(version)}"
    values = checkpoint.get("state_dict", {})
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        return f"expected tensors by name in 'state_dict', got {shown(values)}"
    for field, names in (("optimizer_states", {"state", "param_groups"}), ("lr_schedulers", set[str]())):
        states = checkpoint.get(field, [])
        if not isinstance(states, list) or not all(isinstance(one, dict) and names <= one.keys() for one in states):
            return f"expected a list of states in {field!r}, got {shown(states)}"
    return None


def _of_callbacks(states: Any, folders: list[Any]) -> str | None:
    if states is None:
        return None
    if not isinstance(states, dict):
        return f"expected callbacks by name in 'callbacks', got {shown(states)}"
    for name, state in states.items():
        for field, found in _paths(state):
            if not isinstance(found, str):
                return f"expected a path in {field!r} of the callback {shown(name)}, got {shown(found)}"
            if ".." in PurePath(found).parts or not _may_be_deleted(found, folders):
                return (
                    f"{field!r} of the callback {shown(name)} is {shown(found)}, outside the folder of its checkpoints"
                    " (if you trust it, pass that folder to ModelCheckpoint as dirpath)"
                )
    return None


def _paths(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the checkpoint paths in a callback's state, each with the name of its field."""
    if not isinstance(state, dict):
        return
    for field in _PATHS:
        if state.get(field) is not None:
            yield field, state[field]
    best = state.get("best_k_models")
    if isinstance(best, dict):
        yield from (("best_k_models", path) for path in best)
    elif best is not None:
        yield "best_k_models", best


def _may_be_deleted(path: str, folders: list[Any]) -> bool:
    """Return True if Lightning may be allowed to delete the path.

    Lightning itself checks the folder of a plain local path. Any other path must be inside one of *folders*.
    """
    if get_protocol(path) == "file" and "://" not in path and "::" not in path:
        return True
    return any(path.startswith(f"{str(folder).rstrip('/')}/") for folder in folders if folder)


def _of_loops(loops: Any) -> str | None:
    if loops is None:
        return None
    if not isinstance(loops, dict) or not isinstance(loops.get("fit_loop", {}), dict):
        return f"expected states of loops by name in 'loops', got {shown(loops)}"
    if "fit_loop" not in loops:
        return f"expected 'fit_loop' in 'loops', got {shown(loops)}"
    for name, state in loops.items():
        if not isinstance(state, dict):
            return f"expected a dict at loops/{printable(str(name))}, got {shown(state)}"
        for key, value in state.items():
            problem = _of_state(value, str(key), f"loops/{printable(f'{name}/{key}')}")
            if problem is not None:
                return problem
    return None


def _of_state(value: Any, key: str, where: str) -> str | None:
    """Check a field of a loop's state. The state of the fit loop's data is checked elsewhere."""
    if key.endswith("progress"):
        return _of_progress(value, where, 0)
    if not key.endswith("state_dict"):
        return None
    if not isinstance(value, dict):
        return f"expected a dict at {where}, got {shown(value)}"
    stepped = value.get("_batches_that_stepped", 0)
    return None if _is_count(stepped) else f"expected a count at {where}/_batches_that_stepped, got {shown(stepped)}"


def _of_progress(value: Any, where: str, depth: int) -> str | None:
    if not isinstance(value, dict) or depth > _DEPTH:
        return f"expected counts by name at {where}, got {shown(value)}"
    for name, found in value.items():
        here = f"{where}/{printable(str(name))}"
        if isinstance(found, dict):
            problem = _of_progress(found, here, depth + 1)
            if problem is not None:
                return problem
        elif not (isinstance(found, bool) or _is_count(found)):
            return f"expected a count at {here}, got {shown(found)}"
        elif isinstance(found, bool) != (name == "is_last_batch"):
            return f"expected {'true or false' if name == 'is_last_batch' else 'a count'} at {here}, got {shown(found)}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST
