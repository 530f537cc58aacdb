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

from lightning_pipe.checkpoints.remote_folder import place_of
from lightning_pipe.checkpoints.resized_metadata import resized_metadata
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_choice, option_group
from lightning_pipe.engine.common.safe_text import printable
from lightning_pipe.recsys.modules.tables import Table

Sizes = Mapping[tuple[Any, ...], torch.Size | None]

_TABLE = re.compile(r"(?:.*\.)?embedding(?:s|_bags)\.([^.]+)\.weight", re.DOTALL)
_RESET = "Set optimizer_states='reset' to start all tables without states"


@dataclass(frozen=True)
class WarmStart:
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
        object.__setattr__(self, "path", str(place_of(self.path)))
        check_choice("init_from.optimizer_states", self.optimizer_states, ("keep", "reset"))
        check_choice("init_from.dense", self.dense, ("all", "matching"))
        check_choice("init_from.smaller_tables", self.smaller_tables, ("refuse", "cut"))

    @classmethod
    def from_config(cls, given: WarmStart | Mapping[str, Any] | str | Path | None) -> WarmStart | None:
        """Read the argument ``init_from``: a path, this class, a mapping of its fields, or None for no warm start."""
        if given is None:
            return None
        return option_group(cls, "init_from", {"path": given} if isinstance(given, str | Path) else given)


@dataclass(frozen=True)
class Match:
    """Entries of a checkpoint that a model starts with."""

    names: Mapping[str, str]
    saved: dcp.Metadata
    report: str
    dropped: str = ""

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the matched values by their names in the checkpoint."""
        return {self.names[name]: value for name, value in values.items() if name in self.names}


def match(options: WarmStart, saved: dcp.Metadata, optimizers: Any, sizes: Sizes, tables: Mapping[str, Table]) -> Match:
    """Match a checkpoint with a model. Ranks do not communicate; all get the same result."""
    keys = {path: key for key, path in saved.planner_data.items()}
    stored = {path: getattr(saved.state_dict_metadata[key], "size", None) for path, key in keys.items()}
    theirs, ours = _shapes(stored, "model"), _shapes(sizes, "model")
    their_states, our_states = _shapes(stored, "tables", "state"), _shapes(sizes, "tables", "state")
    if options.optimizer_states == "keep" and our_states and not their_states and optimizers is None:
        raise SetupError(
            f"init_from: the checkpoint {options.path!r} has no states of the tables' optimizers. {_RESET}."
        )
    names = _names(theirs, ours, tables)
    problems: dict[str, list[str]] = defaultdict(list)  # by their fix
    resized: dict[str, tuple[torch.Size, int, int]] = {}
    grown: list[str] = []
    cut: list[str] = []
    reshaped: list[str] = []
    for name, other in list(names.items()):
        before, now = theirs[other], ours[name]
        if name not in tables:
            if before != now:
                reshaped.append(f"{name} (shape {before} in it, expected {now})")
                del names[name]
            continue
        if not isinstance(before, list) or before[1:] != now[1:]:
            fix = "Use the checkpoint's embedding_dim, or another name for a table that starts with initial values"
            problems[fix].append(f"table {name} has the shape {before} in it, expected {now[1]} columns")
            continue
        states: dict[str, list[int]] = {}
        if options.optimizer_states == "keep":
            former = optimizers.get(other) if isinstance(optimizers, Mapping) else None
            was, states = their_states.get(other), our_states.get(name, {})
            for fix, problem in _misfits(former, was, tables[name].known_optimizer.name, states, before[0], now[0]):
                problems[fix].append(f"table {name} {problem}")
        if before[0] != now[0]:
            (grown if before[0] < now[0] else cut).append(f"{name} ({before[0]} rows in it, now {now[0]})")
            paths = {("model", other): now} | {("tables", "state", other, key): one for key, one in states.items()}
            resized |= {
                keys[path]: (torch.Size(one), max(1, before[0]), now[0])
                for path, one in paths.items()
                if path in keys and one[0] % now[0] == 0
            }
    if cut and options.smaller_tables == "refuse":
        fix = "Increase num_embeddings, or set smaller_tables='cut' to ignore the checkpoint's last rows"
        problems[fix] = [f"fewer rows are expected of table {', '.join(cut)}"]
    if reshaped and options.dense == "all":
        problems["Set dense='matching' to leave values of another shape at their initial values"] = reshaped
    if not names:
        found = f"it has {', '.join([*theirs][:5]) or 'no values'}, expected some of {', '.join([*ours][:5])}"
        problems["Use a checkpoint of this module"].append(found)
    if problems:
        text = " ".join(f"{'; '.join(found)}. {fix}." for fix, found in problems.items())
        raise SetupError(printable(f"init_from: the checkpoint {options.path!r} does not fit the module: {text}"))
    present, used = names.keys() | theirs.keys(), ours.keys() | names.values()
    changes = {
        "grown, with initial values in new rows": grown,
        "cut": cut,
        "of another shape, with initial values": reshaped,
        "renamed": [f"{other} -> {name}" for name, other in names.items() if name != other],
        "new, with initial values": [name for name in ours if name not in present],
        "dropped": [name for name in theirs if name not in used],
    }
    count = len(names.keys() & tables.keys())
    report = (
        f"A new run starts with {count} table(s) ({'with' if options.optimizer_states == 'keep' else 'without'} the"
        f" states of their optimizers) and {len(names) - count} other values of the checkpoint {options.path!r}: "
        + ("; ".join(f"{what}: {', '.join(found)}" for what, found in changes.items() if found) or "no differences")
    )
    dense = [name for name in changes["dropped"] if not _TABLE.fullmatch(name)]
    warning = (
        f"init_from: {len(dense)} dense values of the checkpoint {options.path!r} are not read, since the module has no"
        f" values of their names: {', '.join(dense[:10])}. If these have changed, use the names of the checkpoint"
    )
    return Match(names, resized_metadata(saved, resized), printable(report), printable(warning) if dense else "")


def _misfits(
    former: Any, was: Any, optimizer: str, states: Mapping[str, list[int]], stored_rows: int, rows: int
) -> Iterator[tuple[str, str]]:
    """Differences between the optimizer states of a table in the checkpoint and in the model, each after its fix."""
    was = was if isinstance(was, dict) else {}
    # torch.optim.Adagrad and torchrec.optim.Adagrad have one kernel.
    changed = former is not None and str(former).rpartition(".")[2] != optimizer.rpartition(".")[2]
    if changed or was.keys() != states.keys():
        before, now = (", ".join(map(str, one)) or "no states" for one in (was, states))
        yield _RESET, f"was trained by {former or 'an optimizer'} with {before}, expected {optimizer} with {now}"
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
    found: dict[str, Any] = {}
    for path, size in sizes.items():
        if path[: len(part)] == part and len(path) > len(part):
            name, *rest = path[len(part) :]
            key = rest[0] if len(rest) == 1 else tuple(rest)
            found.setdefault(name, {})[key] = None if size is None else list(size)
    return {name: nested.get((), nested) for name, nested in found.items()}


def _names(theirs: Iterable[str], ours: Iterable[str], tables: Mapping[str, Table]) -> dict[str, str]:
    """Names in the checkpoint by names in the model: the same, or that of the only table with the same config name."""
    theirs, ours = set(theirs), list(ours)
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for name in ours:
        if name in tables and name not in theirs:
            found[tables[name].config.name][0].append(name)
    for name in theirs.difference(ours):
        if matched := _TABLE.fullmatch(name):
            found[matched[1]][1].append(name)
    moved = {own[0]: other[0] for own, other in found.values() if len(own) == len(other) == 1}
    return {name: moved.get(name, name) for name in ours if name in theirs or name in moved}
