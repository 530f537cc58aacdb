"""Rows as files: what was written comes back, and nothing else passes for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.dynamic.store.row_files import StoredRows, check_row_files, read_rows, write_rows


def rows(first: int, count: int) -> StoredRows:
    ids = torch.arange(first, first + count)
    return StoredRows(ids, ids + 1, ids + 2, [ids.float()[:, None].expand(-1, 3).contiguous(), ids.float()])


def written(folder: Path, ranks: int = 2) -> None:
    for rank in range(ranks):
        write_rows(folder, "users", rank, ranks, iter([rows(rank * 100, 5), rows(rank * 100 + 50, 3)]))
    write_rows(folder, "users_of_late", 0, 1, iter([rows(7, 1)]))


def test_rows_of_all_ranks_come_back(tmp_path: Path) -> None:
    written(tmp_path)
    check_row_files(tmp_path, dict.fromkeys(["users", "users_of_late"]))
    found = list(read_rows(tmp_path, "users"))
    assert torch.cat([one.ids for one in found]).tolist() == [
        *range(5),
        *range(50, 53),
        *range(100, 105),
        150,
        151,
        152,
    ]
    for one in found:
        assert torch.equal(one.counts, one.ids + 1)
        assert torch.equal(one.last_seen, one.ids + 2)
        assert torch.equal(one.columns[0], one.ids.float()[:, None].expand(-1, 3))
        assert torch.equal(one.columns[1], one.ids.float())
    assert [one.ids.tolist() for one in read_rows(tmp_path, "users_of_late")] == [[7]]


def test_no_rows_are_rows_too(tmp_path: Path) -> None:
    assert write_rows(tmp_path, "users", 0, 1, iter(())) == 0
    assert list(read_rows(tmp_path, "users")) == []


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_missing_file_is_refused(suffix: str, tmp_path: Path) -> None:
    written(tmp_path)
    next(file for file in sorted(tmp_path.iterdir()) if file.suffix == suffix).unlink()
    with pytest.raises(SetupError, match=r"expected one list from each rank|no such file"):
        check_row_files(tmp_path, {"users": None})


def other_byte(contents: bytes, place: int) -> bytes:
    return contents[:place] + bytes([contents[place] ^ 1]) + contents[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        # The checksum of some is greater than it was, and of others less.
        *(lambda contents, part=part: other_byte(contents, len(contents) * part // 8) for part in range(8)),
        lambda contents: contents[:-1],
        lambda contents: contents + b"\0",
        lambda contents: b"",
    ],
)
def test_a_file_with_another_byte_or_length_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    written(tmp_path)
    file = sorted(tmp_path.glob("users.*.pt"))[1]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SetupError, match=r"has (the checksum|\d+ bytes).*expected \d+"):
        check_row_files(tmp_path, {"users": None})
    with pytest.raises(SetupError, match=r"has (the checksum|\d+ bytes).*expected \d+"):
        list(read_rows(tmp_path, "users"))


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="lists of files found are none"):
        check_row_files(tmp_path, {"users": None})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_are_not_written_beside_others(ranks: int, tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(SetupError, match="already has rows of it"):
        write_rows(tmp_path, "users", ranks - 1, ranks, iter([rows(0, 1)]))
    assert sum(len(one.ids) for one in read_rows(tmp_path, "users")) == 16


def of_checkpoint(folder: Path, *modules: str) -> Path:
    """A folder as a checkpoint's: each module has a table of one row, called by the module's place."""
    for number, module in enumerate(modules):
        write_rows(folder / "rows" / module, "users", 0, 1, iter([rows(number, 1)]))
    return folder


@pytest.mark.parametrize("kind", [str, Path])
def test_rows_are_found_in_the_folder_that_was_written_or_in_a_modules(kind: type, tmp_path: Path) -> None:
    folder = of_checkpoint(tmp_path, "bags")
    for place in (folder, folder / "rows" / "bags"):
        assert [one.ids.tolist() for one in read_rows(kind(place), "users")] == [[0]]


def test_of_several_modules_with_the_table_one_is_named(tmp_path: Path) -> None:
    folder = of_checkpoint(tmp_path, "bags", "history")
    with pytest.raises(SetupError, match=r"rows of table 'users' in the modules \['bags', 'history'\].*module="):
        list(read_rows(folder, "users"))
    assert [one.ids.tolist() for one in read_rows(folder, "users", "history")] == [[1]]


@pytest.mark.parametrize(("table", "module"), [("things", None), ("users", "tables")])
def test_what_is_not_there_is_named_beside_what_is(table: str, module: str | None, tmp_path: Path) -> None:
    folder = of_checkpoint(tmp_path, "bags")
    with pytest.raises(SetupError, match=r"of the tables \['users'\]"):
        list(read_rows(folder, table, module))
