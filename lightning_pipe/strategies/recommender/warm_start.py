"""Warm start: a new run that begins with the values of a checkpoint, although its model may differ.

This module matches the entries of a checkpoint with the values of a sharded model by name, refuses what does not fit,
and describes the result. ``sharded_checkpoint`` reads the values.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp

from lightning_pipe.checkpoints.remote_folder import parse_local_or_remote_path
from lightning_pipe.checkpoints.resized_metadata import resized_metadata
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_choice, parse_option_group
from lightning_pipe.engine.common.safe_text import escape_unprintable
from lightning_pipe.recsys.modules.tables import Table

Sizes = Mapping[tuple[Any, ...], torch.Size | None]

_TABLE = re.compile(r"(?:.*\.)?embedding(?:s|_bags)\.([^.]+)\.weight", re.DOTALL)
_RESET = "Set optimizer_states='reset' to start all tables without states"


@dataclass(frozen=True)
class WarmStartOptions:
    """Initial values of a new run, from a checkpoint of a model that may have had other tables.

    Tables and other values are matched by name. Values without a counterpart in the checkpoint keep their initial
    values, and so do new rows of tables that have grown. The run starts at step 0: loops, callbacks, loggers, schedules
    and the states of dense optimizers are not read.

    Args:
        path: path or URL of a checkpoint folder that a ``recsys_*`` strategy wrote, on any number of ranks with any
            sharding.
        optimizer_states: ``"keep"`` (default) to read the states of the tables' optimizers, ``"reset"`` to start
            without states. A new row has the state of a row that was never trained.
        dense: ``"all"`` (default) to refuse a dense parameter or buffer whose shape has changed, ``"matching"`` to
            leave such values at their initial values.
        smaller_tables: ``"refuse"`` (default) to refuse a table with fewer rows than in the checkpoint, ``"cut"`` to
            ignore the checkpoint's last rows.

    Raises:
        SetupError: a value is invalid, or the URL cannot be used.
    """

    path: str | Path = ""
    optimizer_states: Literal["keep", "reset"] = "keep"
    dense: Literal["all", "matching"] = "all"
    smaller_tables: Literal["refuse", "cut"] = "refuse"

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path) or str(self.path).strip() in ("", "."):
            raise SetupError(f"init_from.path is {self.path!r}; expected the path or URL of a checkpoint folder")
        object.__setattr__(self, "path", str(parse_local_or_remote_path(self.path)))
        check_choice("init_from.optimizer_states", self.optimizer_states, ("keep", "reset"))
        check_choice("init_from.dense", self.dense, ("all", "matching"))
        check_choice("init_from.smaller_tables", self.smaller_tables, ("refuse", "cut"))

    @classmethod
    def from_config(cls, config: WarmStartOptions | Mapping[str, Any] | str | Path | None) -> WarmStartOptions | None:
        """Read the argument ``init_from``: a path, this class, a mapping of its fields, or None for no warm start."""
        if config is None:
            return None
        return parse_option_group(cls, "init_from", {"path": config} if isinstance(config, str | Path) else config)


@dataclass(frozen=True)
class CheckpointMatch:
    """Entries of a checkpoint that a model starts with."""

    names: Mapping[str, str]
    saved: dcp.Metadata
    report: str
    dropped: str = ""

    def rename_to_checkpoint_names(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the matched values by their names in the checkpoint."""
        return {self.names[name]: value for name, value in values.items() if name in self.names}


def match_checkpoint(
    options: WarmStartOptions, saved: dcp.Metadata, optimizers: Any, sizes: Sizes, tables: Mapping[str, Table]
) -> CheckpointMatch:
    """Match a checkpoint with a model. Ranks do not communicate; all get the same result."""
    keys = {path: key for key, path in saved.planner_data.items()}
    stored = {path: getattr(saved.state_dict_metadata[key], "size", None) for path, key in keys.items()}
    stored_shapes, model_shapes = _shapes(stored, "model"), _shapes(sizes, "model")
    stored_states, model_states = _shapes(stored, "tables", "state"), _shapes(sizes, "tables", "state")
    if options.optimizer_states == "keep" and model_states and not stored_states and optimizers is None:
        raise SetupError(
            f"init_from: the checkpoint {options.path!r} has no states of the tables' optimizers. {_RESET}."
        )
    names = _match_checkpoint_names(stored_shapes, model_shapes, tables)
    problems: dict[str, list[str]] = defaultdict(list)  # by their fix
    resized: dict[str, tuple[torch.Size, int, int]] = {}
    grown: list[str] = []
    cut: list[str] = []
    reshaped: list[str] = []
    for name, stored_name in list(names.items()):
        stored_shape, shape = stored_shapes[stored_name], model_shapes[name]
        if name not in tables:
            if stored_shape != shape:
                reshaped.append(f"{name} (shape {stored_shape} in it, expected {shape})")
                del names[name]
            continue
        if not isinstance(stored_shape, list) or stored_shape[1:] != shape[1:]:
            fix = "Use the checkpoint's embedding_dim, or another name for a table that starts with initial values"
            problems[fix].append(f"table {name} has the shape {stored_shape} in it, expected {shape[1]} columns")
            continue
        states: dict[str, list[int]] = {}
        if options.optimizer_states == "keep":
            former = optimizers.get(stored_name) if isinstance(optimizers, Mapping) else None
            was, states = stored_states.get(stored_name), model_states.get(name, {})
            for fix, problem in _find_optimizer_state_mismatches(
                former, was, tables[name].resolved_optimizer.name, states, stored_shape[0], shape[0]
            ):
                problems[fix].append(f"table {name} {problem}")
        if stored_shape[0] != shape[0]:
            (grown if stored_shape[0] < shape[0] else cut).append(
                f"{name} ({stored_shape[0]} rows in it, now {shape[0]})"
            )
            paths = {("model", stored_name): shape} | {
                ("tables", "state", stored_name, key): state_shape for key, state_shape in states.items()
            }
            resized |= {
                keys[path]: (torch.Size(path_shape), max(1, stored_shape[0]), shape[0])
                for path, path_shape in paths.items()
                if path in keys and path_shape[0] % shape[0] == 0
            }
    if cut and options.smaller_tables == "refuse":
        fix = "Increase num_embeddings, or set smaller_tables='cut' to ignore the checkpoint's last rows"
        problems[fix] = [f"fewer rows are expected of table {', '.join(cut)}"]
    if reshaped and options.dense == "all":
        problems["Set dense='matching' to leave values of another shape at their initial values"] = reshaped
    if not names:
        difference = (
            f"it has {', '.join([*stored_shapes][:5]) or 'no values'},"
            f" expected some of {', '.join([*model_shapes][:5])}"
        )
        problems["Use a checkpoint of this module"].append(difference)
    if problems:
        text = " ".join(f"{'; '.join(descriptions)}. {fix}." for fix, descriptions in problems.items())
        raise SetupError(
            escape_unprintable(f"init_from: the checkpoint {options.path!r} does not fit the module: {text}")
        )
    present, used = names.keys() | stored_shapes.keys(), model_shapes.keys() | names.values()
    changes = {
        "grown, with initial values in new rows": grown,
        "cut": cut,
        "of another shape, with initial values": reshaped,
        "renamed": [f"{stored_name} -> {name}" for name, stored_name in names.items() if name != stored_name],
        "new, with initial values": [name for name in model_shapes if name not in present],
        "dropped": [name for name in stored_shapes if name not in used],
    }
    count = len(names.keys() & tables.keys())
    report = (
        f"A new run starts with {count} table(s) ({'with' if options.optimizer_states == 'keep' else 'without'} the"
        f" states of their optimizers) and {len(names) - count} other values of the checkpoint {options.path!r}: "
        + (
            "; ".join(f"{change}: {', '.join(entries)}" for change, entries in changes.items() if entries)
            or "no differences"
        )
    )
    dense = [name for name in changes["dropped"] if not _TABLE.fullmatch(name)]
    warning = (
        f"init_from: {len(dense)} dense values of the checkpoint {options.path!r} are not read, since the module has no"
        f" values of their names: {', '.join(dense[:10])}. If these have changed, use the names of the checkpoint"
    )
    return CheckpointMatch(
        names,
        resized_metadata(saved, resized),
        escape_unprintable(report),
        escape_unprintable(warning) if dense else "",
    )


def _find_optimizer_state_mismatches(
    former: Any, was: Any, optimizer: str, states: Mapping[str, list[int]], stored_rows: int, rows: int
) -> Iterator[tuple[str, str]]:
    """Differences between the optimizer states of a table in the checkpoint and in the model, each after its fix."""
    was = was if isinstance(was, dict) else {}
    # torch.optim.Adagrad and torchrec.optim.Adagrad have one kernel.
    changed = former is not None and str(former).rpartition(".")[2] != optimizer.rpartition(".")[2]
    if changed or was.keys() != states.keys():
        stored_keys, expected_keys = (", ".join(map(str, keys)) or "no states" for keys in (was, states))
        yield (
            _RESET,
            f"was trained by {former or 'an optimizer'} with {stored_keys}, expected {optimizer} with {expected_keys}",
        )
        return
    for key, shape in states.items():
        # A state with one number per row repeats the rows for each column shard of the table.
        shards, remainder = divmod(shape[0], rows)
        expected = shape if remainder else [shards * stored_rows, *shape[1:]]
        if was[key] != expected:
            fix = f"Split tables into the same number of column shards as in the checkpoint. {_RESET}"
            yield fix, f"has the state {key} of shape {was[key]} in it, expected {expected}"


def _shapes(sizes: Sizes, *part: str) -> dict[str, Any]:
    """Shapes of the values of a part by name: None without a tensor, a dict if a value is nested."""
    shapes: dict[str, Any] = {}
    for path, size in sizes.items():
        if path[: len(part)] == part and len(path) > len(part):
            name, *inner = path[len(part) :]
            key = inner[0] if len(inner) == 1 else tuple(inner)
            shapes.setdefault(name, {})[key] = None if size is None else list(size)
    return {name: nested.get((), nested) for name, nested in shapes.items()}


def _match_checkpoint_names(
    stored_names: Iterable[str], model_names: Iterable[str], tables: Mapping[str, Table]
) -> dict[str, str]:
    """Names in the checkpoint by names in the model: the same, or that of the only table with the same config name."""
    stored_names, model_names = set(stored_names), list(model_names)
    by_config: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for name in model_names:
        if name in tables and name not in stored_names:
            by_config[tables[name].config.name][0].append(name)
    for name in stored_names.difference(model_names):
        if matched := _TABLE.fullmatch(name):
            by_config[matched[1]][1].append(name)
    moved = {
        unmatched[0]: candidates[0]
        for unmatched, candidates in by_config.values()
        if len(unmatched) == len(candidates) == 1
    }
    return {name: moved.get(name, name) for name in model_names if name in stored_names or name in moved}
