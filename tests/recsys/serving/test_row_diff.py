"""Differences of the rows of two checkpoints: applied to the older rows, they give the newer ones."""

from __future__ import annotations

import json
import random
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_pipe.checkpoints.folder_writing import META
from lightning_pipe.checkpoints.remote_folder import RemotePath
from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.dynamic.store.row_files import write_rows
from lightning_pipe.recsys.serving.row_diff import apply_row_diff, write_row_diff
from lightning_pipe.recsys.serving.table_files import write_tables_to_parquet
from tests.distributed import run_ranks
from tests.recsys.serving.saved_rows import History, described, exported, removed, save, stored
from tests.scenarios.recommenders.test_managed_collision import rows_of_ids
from tests.strategies.cases import Clicks, Managed, Mixed, fit, loader, recsys, state_of

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
    applied = out / f"{older.name} with changes to {newer.name}"
    totals = apply_row_diff(out / older.name, diff, applied)
    assert exported(applied) == expected
    assert totals == {f"{table}.parquet": len(found) for table, found in expected.items()}
    assert (applied / "export.json").read_bytes() == (out / newer.name / "export.json").read_bytes()
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
        save(tmp_path / f"{number}.ckpt", tables, ranks=chance.choice([1, 2, 3]), step=number)
        for number, tables in enumerate(histories(chance))
    ]
    for older, newer in combinations(places, 2):
        diff_gives_the_newer_export(older, newer, tmp_path / "out")
    counts = diff_gives_the_newer_export(places[0], places[0], tmp_path / "out")
    assert not any(counts.values())
    diff_gives_the_newer_export(places[-1], places[0], tmp_path / "out")  # a store may go back
    chain = [tmp_path / "out" / name for name in ("0.ckpt", "0 to 1", "0 to 1 to 2")]
    for number in (0, 1):
        apply_row_diff(chain[number], tmp_path / "out" / f"{number}.ckpt to {number + 1}.ckpt", chain[number + 1])
    assert exported(chain[2]) == exported(tmp_path / "out" / "2.ckpt")


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


# ---------------------------------------------------------------------- tables of fixed size, and with maps of ids

ON_TWO = {
    "column-wise": {"people": "column_wise", "things": "column_wise", "tags": "row_wise"},
    "data-parallel": {"people": "data_parallel", "things": "row_wise", "tags": "table_wise"},
}


def saved(
    rank: int, world: int, network: Any, kinds: dict[str, str] | None, path: Path, older: Path | None = None
) -> tuple[dict[str, dict[int, bytes]], dict[str, Tensor], set[str]]:
    """Train three steps and save; return vectors by id of each table, dense values, and names of the unsharded module.

    Most ids of the data are in no batch of three steps.
    """
    module, steps = Clicks(network), 6 if older else 3
    names = set(module.state_dict())
    used = fit(module, recsys(kinds=kinds), loader(12 * world, 2), ckpt_path=older, max_steps=steps, max_epochs=-1)
    used.save_checkpoint(path)
    sharded: Any = used.strategy.sharded_model  # type: ignore[attr-defined]
    managed = {name: {key: row[0] for key, row in rows.items()} for name, rows in rows_of_ids(sharded).items()}
    tables = {
        name: managed.get(table.config.name, dict(enumerate(sharded.full_table(name))))
        for name, table in sharded.tables.items()
    }
    vectors = {
        name: {number: row.detach().numpy().tobytes() for number, row in rows.items()} for name, rows in tables.items()
    }
    return vectors, state_of(used), names


@pytest.mark.parametrize(
    ("network", "kinds", "ranks"),
    [(Mixed, ON_TWO["column-wise"], (2, 2)), (Mixed, ON_TWO["data-parallel"], (2, 1)), (Managed, None, (2, 2))],
    ids=["column-wise", "data-parallel, then on one rank", "managed collision"],
)
def test_changed_rows_are_those_that_differ_between_the_trained_tables(
    network: Any, kinds: dict[str, str] | None, ranks: tuple[int, int], tmp_path: Path
) -> None:
    places = [tmp_path / "older.ckpt", tmp_path / "newer.ckpt"]
    older, _, _ = run_ranks(saved, ranks[0], network, kinds, places[0])[0]
    newer, dense, names = run_ranks(saved, ranks[1], network, kinds if ranks[1] > 1 else None, places[1], places[0])[0]
    diff_gives_the_newer_export(places[0], places[1], tmp_path / "out")
    diff = tmp_path / "out" / "older.ckpt to newer.ckpt"
    changed, gone = exported(diff), removed(diff)
    assert changed.keys() == gone.keys() == newer.keys() == older.keys()
    for name, vectors in newer.items():
        expected = {number: vector for number, vector in vectors.items() if older[name].get(number) != vector}
        assert changed[name] == expected
        assert gone[name] == sorted(older[name].keys() - vectors.keys())
        assert expected
        assert network is Managed or len(expected) < len(vectors)
    assert network is not Managed or any(gone.values())
    rest = torch.load(diff / "dense.pt", weights_only=True)
    assert rest.keys() == {name for name in names if name not in newer and "_managed_collision_modules" not in name}
    assert all(torch.equal(value, dense[name]) for name, value in rest.items() if name in dense)
    assert rest.keys() - dense.keys() <= {"network.normalize.num_batches_tracked"}
    described = json.loads((diff / "diff.json").read_text())
    rows = {name: len(vectors) for name, vectors in newer.items()}
    assert described == {"since_step": 3, "step": 6, "tables": rows}


def test_a_table_of_another_size_has_new_or_removed_rows(tmp_path: Path) -> None:
    values, name = torch.arange(12.0).view(6, 2), "bags.embedding_bags.t.weight"
    for rows in (4, 6):
        with warnings.catch_warnings(action="ignore"):  # that there is one rank
            dcp.save({"model": {name: values[:rows]}}, checkpoint_id=tmp_path / f"{rows}.ckpt")
        torch.save({"global_step": rows}, tmp_path / f"{rows}.ckpt" / META)
    diff_gives_the_newer_export(tmp_path / "4.ckpt", tmp_path / "6.ckpt", tmp_path / "out")
    diff_gives_the_newer_export(tmp_path / "6.ckpt", tmp_path / "4.ckpt", tmp_path / "out")
    assert exported(tmp_path / "out" / "4.ckpt to 6.ckpt")[name].keys() == {4, 5}
    assert removed(tmp_path / "out" / "6.ckpt to 4.ckpt")[name] == [4, 5]
    refused(tmp_path / "6.ckpt", 3, f"such as '{name}'.*Give the older checkpoint instead", tmp_path / "diff")


# ---------------------------------------------------------------------- changes that do not fit an export


@pytest.fixture
def changes(tmp_path: Path) -> Path:
    """Folder with three checkpoints, the export of the first one, and the changes between them."""
    rows = {number: row(number, 0.0, 0.0) for number in range(4)}
    histories = [rows, rows | {3: row(5.0, 0.0, 0.0)}, rows | {4: row()}]
    places = [save(tmp_path / str(step), {"users": rows}, step=step) for step, rows in enumerate(histories)]
    write_tables_to_parquet(places[0], tmp_path / "export")
    write_row_diff(places[1], places[0], tmp_path / "first")
    write_row_diff(places[2], places[1], tmp_path / "second")
    write_row_diff(places[2], 0, tmp_path / "since a batch")
    return tmp_path


def not_applied(export: Path, diff: Path, message: str) -> None:
    before = sorted(export.parent.rglob("*"))
    with pytest.raises(SetupError, match=message):
        apply_row_diff(export, diff, export.parent / "applied")
    assert sorted(export.parent.rglob("*")) == before


def test_changes_in_a_wrong_order_are_refused(changes: Path) -> None:
    export = changes / "export"
    not_applied(export, changes / "second", "expected changes since step 0 of the export .*, got those since 1")
    not_applied(export, changes / "since a batch", "expected changes since step 0 .*, got those since None")
    apply_row_diff(export, changes / "first", changes / "next")
    not_applied(changes / "next", changes / "first", "expected changes since step 1 .*, got those since 0")


def test_changes_of_another_run_or_model_are_refused(changes: Path) -> None:
    other = {step: save(changes / f"other{step}", {"users": {9: row()}}, step=step) for step in (0, 1)}
    write_row_diff(other[1], other[0], changes / "of another run")
    not_applied(changes / "export", changes / "of another run", "'bags.users' would have 4 rows, expected 1")
    wide = {step: save(changes / f"wide{step}", {"users": {9: row(1.0, 2.0)}}, step=step, width=2) for step in (0, 1)}
    write_row_diff(wide[1], wide[0], changes / "wide")
    not_applied(changes / "export", changes / "wide", "cannot be applied to the export .*schema")
    pages = {step: save(changes / f"pages{step}", {"pages": {9: row()}}, step=step) for step in (0, 1)}
    write_row_diff(pages[1], pages[0], changes / "of pages")
    not_applied(changes / "export", changes / "of pages", "tables that .* lacks: bags.users")


@pytest.mark.parametrize("name", ["diff.json", "bags.users.parquet", "bags.users.removed.parquet"])
def test_incomplete_changes_are_refused(changes: Path, name: str) -> None:
    file = changes / "first" / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    not_applied(changes / "export", changes / "first", "cannot be applied to the export .*Use complete folders")
    file.unlink()
    not_applied(changes / "export", changes / "first", f"cannot be applied .*{name}.*Use complete folders")


def test_changes_are_never_written_to_another_folder(changes: Path) -> None:
    file = changes / "first" / "diff.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps(described | {"tables": {"../elsewhere": 4, **described["tables"]}}))
    not_applied(changes / "export", changes / "first", r"expected the name of a table, got '\.\./elsewhere'")


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


def test_checkpoints_without_tables_are_refused(good: Path, tmp_path: Path) -> None:
    none = save(tmp_path / "none.ckpt", {})
    refused(none, good, "none.ckpt' has no tables", tmp_path / "out")
    refused(good, none, "none.ckpt' has no tables", tmp_path / "out")
    refused(none, 3, "none.ckpt' has no tables", tmp_path / "out")
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
