"""Differences of the rows of two checkpoints: applied to the older rows, they give the newer ones."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.checkpoints.remote_folder import RemotePath
from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.dynamic.store.row_files import write_rows
from lightning_pipe.recsys.serving.row_diff import write_row_diff
from lightning_pipe.recsys.serving.table_files import write_tables_to_parquet
from tests.recsys.serving.saved_rows import History, described, exported, removed, save, stored

# Of a vector's numbers: some differ in bits alone.
NUMBERS = (0x00000000, 0x80000000, 0x3F800000, 0x3F800001, 0x7FC00000, 0x7FC00001)


def row(*numbers: float, batch: int = 1) -> tuple[int, torch.Tensor]:
    return batch, torch.tensor(numbers or (1.0, 2.0, 3.0))


def diff_gives_the_newer_export(older: Path, newer: Path, out: Path) -> dict[str, int]:
    """Apply the diff to the export of the older checkpoint, and return the numbers of rows in its files."""
    for place in (older, newer):
        if not (export := out / place.name).exists():
            write_tables_to_parquet(place, export)
    diff = out / f"{older.name} to {newer.name}"
    counts = write_row_diff(newer, older, diff)
    rows, changes, gone = exported(out / older.name), exported(diff), removed(diff)
    assert changes.keys() == gone.keys()
    for table, changed in changes.items():
        before = rows.setdefault(table, {})
        assert all(before.get(number) != vector for number, vector in changed.items())
        for number in gone[table]:
            del before[number]
        before.update(changed)
        assert (counts[f"{table}.parquet"], counts[f"{table}.removed.parquet"]) == (len(changed), len(gone[table]))
    expected = exported(out / newer.name)
    assert {table: rows[table] for table in expected} == expected
    assert not any(found for table, found in rows.items() if table not in expected)
    return counts


def histories(chance: random.Random) -> list[dict[str, History]]:
    """Tables of successive checkpoints: rows are new, seen without a change, changed, forgotten, or never saved again.

    Tables come and go.
    """

    def vector() -> torch.Tensor:
        return torch.tensor([chance.choice(NUMBERS) for _ in range(3)], dtype=torch.uint32).view(torch.float32)

    ids = [0, -1, 2**63 - 1, -(2**63), *(chance.getrandbits(63) for _ in range(12))]
    tables: dict[str, dict[int, tuple[int, torch.Tensor]]] = {"users": {}, "pages": {}}
    found: list[dict[str, History]] = []
    for batch in range(4):
        for rows in tables.values():
            for number in chance.sample(ids, chance.randrange(len(ids))):
                kind = chance.choice(["change", "change", "see", "restart", "forget"])
                old = rows.pop(number, None)
                if kind != "forget":
                    last = old[0] if old and kind == "restart" else batch
                    rows[number] = (last, old[1] if old and kind == "see" else vector())
        found.append({name: dict(rows) for name, rows in tables.items() if chance.random() < 0.8} or {"users": {}})
    return found


@pytest.mark.parametrize("seed", range(2))
def test_the_older_export_with_the_changes_is_the_newer_export(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    places = [
        save(tmp_path / f"{number}.ckpt", tables, ranks=chance.choice([1, 2, 3]))
        for number, tables in enumerate(histories(chance))
    ]
    for older, newer in combinations(places, 2):
        diff_gives_the_newer_export(older, newer, tmp_path / "out")
    counts = diff_gives_the_newer_export(places[0], places[0], tmp_path / "out")
    assert not any(counts.values())
    diff_gives_the_newer_export(places[-1], places[0], tmp_path / "out")  # a store may go back


def test_rows_seen_from_a_batch_on_and_no_removed_ids(tmp_path: Path) -> None:
    rows = {number: row(batch=number) for number in (3, 4, 5)}
    newer = save(tmp_path / "newer.ckpt", {"users": rows, "pages": {1: row()}}, ranks=2)
    counts = write_row_diff(newer, 4, tmp_path / "diff")
    assert counts == {"bags.users.parquet": 2, "bags.pages.parquet": 0}
    assert exported(tmp_path / "diff").keys() == {"bags.users", "bags.pages"}
    assert exported(tmp_path / "diff")["bags.users"].keys() == {4, 5}
    assert not removed(tmp_path / "diff")


def test_checkpoints_may_be_at_urls(tmp_path: Path) -> None:
    places = [save(tmp_path / name, {"users": {1: row(), number: row()}}) for number, name in ((2, "old"), (3, "new"))]
    urls = [f"memory://rows/{place.name}.ckpt" for place in places]
    for place, url in zip(places, urls, strict=True):
        RemotePath(url).upload(place)
    assert list(write_row_diff(urls[1], urls[0], tmp_path / "diff").values()) == [1, 1]
    assert exported(tmp_path / "diff")["bags.users"].keys() == {3}
    assert removed(tmp_path / "diff") == {"bags.users": [2]}


# ---------------------------------------------------------------------- refusals


def refused(newer: Path, older: Path | int, message: str, out: Path) -> None:
    """No folder appears, nor any file beside it."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(SetupError, match=message):
        write_row_diff(newer, older, out)
    assert sorted(out.parent.rglob("*")) == before


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return save(tmp_path / "good.ckpt", {"users": {1: row(), 2: row()}})


def test_a_folder_that_exists_is_refused(good: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refused(good, good, "exists. Give another, or remove it", tmp_path / "out")


def test_another_width_is_refused(good: Path, tmp_path: Path) -> None:
    wide = save(tmp_path / "wide.ckpt", {"users": {1: row(1, 2, 3, 4)}}, width=4)
    refused(
        wide, good, r"'bags.users' has rows of 4 numbers in .*wide.ckpt' and of 3 in .*good.ckpt'", tmp_path / "out"
    )


def test_checkpoints_without_dynamic_tables_are_refused(good: Path, tmp_path: Path) -> None:
    none = save(tmp_path / "none.ckpt", {})
    refused(none, good, "none.ckpt' has no dynamic tables", tmp_path / "out")
    refused(good, none, "none.ckpt' has no dynamic tables", tmp_path / "out")
    refused(none, 3, "none.ckpt' has no dynamic tables", tmp_path / "out")
    refused(good, tmp_path / "nothing", "is not there, expected a folder written", tmp_path / "out")


def of_table(name: Any, columns: Any) -> dict[str, Any]:
    return {"bags": {"tables": {name: {"columns": columns}}}}


@pytest.mark.parametrize(
    "rest",
    [
        *([3], {"bags": None}, {"bags": {}}, {"bags": {"tables": ["users"]}}, {1: described(users=3)}),
        *({"bags": {"tables": {"users": {}}}}, of_table("users", []), of_table("users", [[[], "torch.float32"]])),
        *(of_table("users", [[[width], "torch.float32"]]) for width in (0, -1, 2**31, 10**40, True, 3.0, "3", None)),
        *(of_table(name, [[[3], "torch.float32"]]) for name in (7, "/users", "../../users", "a/b")),
        *({name: described(users=3)} for name in ("/bags", "..", "../bags")),
    ],
    ids=str,
)
def test_a_damaged_description_is_refused_by_diff_and_export(rest: Any, good: Path, tmp_path: Path) -> None:
    bad = save(tmp_path / "bad.ckpt", {"users": {1: row()}}, rest=rest)
    for newer, older in ((bad, good), (good, bad)):
        refused(newer, older, "bad.ckpt' has a damaged description|'users' in the modules", tmp_path / "out")
    with pytest.raises(SetupError, match=r"damaged description|'users' in the modules"):
        write_tables_to_parquet(bad, tmp_path / "export")


@pytest.mark.parametrize("weights", [torch.ones(1), torch.ones(1, 2), torch.ones(1, 3, 1), torch.ones(1, 3).long()])
def test_rows_that_do_not_fit_their_description_are_refused(weights: torch.Tensor, good: Path, tmp_path: Path) -> None:
    bad = save(tmp_path / "bad.ckpt", {"users": {1: (1, weights[0])}})
    for newer, older in ((bad, good), (good, bad), (bad, 0)):
        refused(newer, older, r"expected floating-point numbers \[n, 3\]", tmp_path / "out")


def test_damaged_files_are_refused(good: Path, tmp_path: Path) -> None:
    bad = save(tmp_path / "bad.ckpt", {"users": {1: row()}})
    file = next((bad / "rows" / "bags").glob("*.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    for newer, older in ((bad, good), (good, bad)):
        refused(newer, older, r"has \d+ bytes, expected \d+", tmp_path / "out")


def test_an_older_table_with_two_rows_of_an_id_is_refused(good: Path, tmp_path: Path) -> None:
    bad = save(tmp_path / "bad.ckpt", {"users": {}}, ranks=0)
    for rank in range(2):
        write_rows(bad / "rows" / "bags", "users", rank, 2, iter([stored({1: row()})]))
    refused(good, bad, "rows of the same id in table 'bags.users'", tmp_path / "out")
