"""The command ``lightning-pipe diagnose``: shows from the flight dumps of ranks which rank waits for which."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box

from lightning_pipe._compat.flight_recorder import find_mismatches
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.fitted_table import FittedTable, print_report
from lightning_pipe.engine.common.safe_text import printable, shown
from lightning_pipe.engine.ranks.flight_dump import FORMAT, PATTERN

_LARGEST = 64 * 2**20  # bytes of a dump
_MOST = 5  # sentences
_LIBRARIES = re.compile(r"site-packages|dist-packages|lib/python3|<frozen|/lightning_pipe/")
_CELLS = ("host", "epoch, batch", "task", "last collective", "code")
Dump = dict[str, Any]


def diagnose(paths: Sequence[str]) -> None:
    """Print a table of all ranks, and a sentence for each process group in which ranks wait for others.

    Args:
        paths: dumps, or folders with dumps named ``flight_rank_*.json``.

    Raises:
        SetupError: no dump in *paths* can be read.
    """
    files = [one for path in map(Path, paths) for one in (sorted(path.glob(PATTERN)) if path.is_dir() else [path])]
    dumps: dict[int, Dump] = {}
    notes = []
    for file in files:
        try:
            dump = _read(file)
        except OSError as error:
            notes.append(f"{file} is not used: {error.strerror}.")
        except Exception:  # of many kinds: the file may hold anything
            notes.append(
                f"{file} is not used: expected a flight dump, got a damaged or truncated file, or another one."
            )
        else:
            dumps[dump["rank"]] = max(dump, dumps.get(dump["rank"], dump), key=lambda one: float(one["written"]))
    latest = max((dump["began"] for dump in dumps.values()), default=0)
    for rank in [rank for rank, dump in dumps.items() if dump["written"] < latest]:
        notes.append(f"The dump of rank {rank} is not used: it is from an earlier run.")
        del dumps[rank]
    if not dumps:
        found = " ".join(notes) or f"There is no {PATTERN} in {', '.join(paths)}."
        raise SetupError(
            f"expected flight dumps of a run, got none. {found} Give the default_root_dir of a run in which a"
            " collective timed out, or touch flight_request in it while the run hangs"
        )
    table = FittedTable(box=box.SIMPLE, padding=(0, 1))
    for header in ("rank", *_CELLS):
        table.add_column(header, no_wrap=True)
    for rank, dump in sorted(dumps.items()):
        table.add_row(str(rank), *(dump[cell] for cell in _CELLS))
    print_report(table)
    absent = set(range(max(dump["world_size"] for dump in dumps.values()))) - dumps.keys()
    if absent:
        notes.append(f"No dump of rank {_list(absent)}, which had ended or could not write it. See its output.")
    for line in [*_waits(dumps, not absent), *notes]:
        print_report(printable(line))


def _read(file: Path) -> Dump:
    """Read a dump, and check the types of all fields that are used outside of PyTorch's analysis.

    Raises:
        Exception: of any class, if the file is not a dump.
    """
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise OSError(errno.EINVAL, "it is no file")
    with file.open("rb") as opened:
        dump: Dump = json.loads(opened.read(_LARGEST))
    dump |= {name: int(dump[name]) for name in ("rank", "world_size")}
    dump |= {name: float(dump[name]) for name in ("began", "written")}
    if dump["format"] != FORMAT or not 0 <= dump["rank"] < dump["world_size"] < 10**6:
        raise ValueError(file)
    for one in dump["groups"].values():
        one["ranks"] = sorted(map(int, one["ranks"]))
    dump["collectives"] = [one for one in dump["collectives"] if one["process_group"][0] in dump["groups"]]
    for one in dump["collectives"]:
        one["collective_seq_id"] = int(one["collective_seq_id"])
    own = next((one for one in dump["stack"] if not _LIBRARIES.search(one)), dump["stack"][0])
    cells = dump["host"], dump["batch"], "\n".join(dump["tasks"]), _last(dump), own.rpartition("/")[2]
    if not all(isinstance(text, str) for text in cells):
        raise TypeError(file)
    return {**dump, **dict(zip(_CELLS, map(printable, cells), strict=True))}


def _last(dump: Dump) -> str:
    if not dump["collectives"]:
        return "not recorded"
    one = dump["collectives"][-1]
    number = one["p2p_seq_id"] if one["is_p2p"] else one["collective_seq_id"]
    # Gloo records no state, and counts a collective that failed as completed.
    counted = dump["error"] is None and number <= dump["completed"].get(one["process_group"][0], 0)
    state = "completed" if one["state"] == "completed" or (counted and not one["is_p2p"]) else "started"
    return f"{_kind(one['profiling_name'])} {number} of {_label(*one['process_group'])}, {state}"


def _kind(name: str) -> str:
    return name.partition(":")[2]  # behind the backend


def _label(name: str, description: str) -> str:
    return repr(name if description in ("", "undefined") else description)


def _list(ranks: Iterable[int]) -> str:
    known = sorted(ranks)
    return ", ".join(map(str, known[:8])) + (f" and {len(known) - 8} more" if len(known) > 8 else "")


def _waits(dumps: Mapping[int, Dump], complete: bool) -> list[str]:
    """A sentence for each process group with a mismatch, by PyTorch's analysis."""
    # PyTorch's analysis requires a record of each rank.
    present = {
        rank: {
            name: {**group, "ranks": [one for one in group["ranks"] if one in dumps]}
            for name, group in dump["groups"].items()
        }
        for rank, dump in dumps.items()
    }
    numbers: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = {}
    entries: dict[int, list[tuple[Any, Dump]]] = {rank: [] for rank in dumps}
    for rank, dump in dumps.items():
        groups = {name: (name, tuple(one["ranks"])) for name, one in present[rank].items()}
        entries[rank] = [(groups[one["process_group"][0]], one) for one in dump["collectives"] if not one["is_p2p"]]
        for group, one in entries[rank]:
            numbers.setdefault(group, {}).setdefault(rank, []).append(one["collective_seq_id"])
    if not numbers:
        return ["Collectives are missing: this PyTorch or its backend does not record them. Compare the tasks above."]
    # Rings begin at different collectives.
    first = {group: max(map(min, of_rank.values())) for group, of_rank in numbers.items()}
    kept = {
        rank: [one for group, one in known if one["collective_seq_id"] >= first[group]]
        for rank, known in entries.items()
    }
    try:
        mismatches = find_mismatches(kept, present)
    except Exception as error:  # the table is still of use
        return [f"PyTorch could not compare the collectives ({type(error).__name__}: {error}). Compare the table."]
    sentences: dict[str, str] = {}
    for one in mismatches:
        of_rank = numbers[one.group_id, tuple(sorted(one.expected_ranks))]
        passed = min(max(of_rank.get(rank, [0])) for rank in one.expected_ranks)
        kinds = {other.type_of_mismatch.state.name for other in (one.mismatch_collectives or {}).values()}
        # Sizes may differ in a collective that all ranks have left; another kind of collective is always an error.
        if one.collective_seq_id >= passed or "COLLECTIVE_TYPE_MISMATCH" in kinds:
            sentences.setdefault(one.group_id, _sentence(one, dumps))
    if sentences:
        return list(sentences.values())[:_MOST]
    return ["The ranks above have started the same collectives." + ("" if complete else " Another rank may not have.")]


def _sentence(found: Any, dumps: Mapping[int, Dump]) -> str:
    ranks, missing, others = found.expected_ranks, found.missing_ranks or set(), found.mismatch_collectives or {}
    name, _, description = found.pg_desc.partition(":")
    group = f"In group {_label(name, description)} (ranks {_list(ranks)}),"
    number = found.collective_seq_id
    what = f"{_kind(found.collective_name)} {number}"
    if missing:
        where = (f" Rank {rank} is {dumps[rank]['task']} at {dumps[rank]['code']}." for rank in sorted(missing)[:_MOST])
        waits = f"{group} rank {_list(ranks - missing)} waits in {what} for rank {_list(missing)}.{''.join(where)}"
        return waits.replace("\n", ", ")
    differ = "".join(
        f"; rank {rank} is in {_kind(other.collective_name)} {number} of sizes {shown(other.input_sizes)}"
        for rank, other in sorted(others.items())
    )
    return f"{group} rank {_list(ranks - others.keys())} is in {what} of sizes {shown(found.input_sizes)}{differ}."
