"""Files of rows and of stores that were made to harm: one error of ours, soon and in little memory, and never a signal.

Whoever makes such a file can make its checksums right, so each is written with them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.row_files import Columns, StoredRows, check_rows, read_rows, write_rows
from lightning_pipe.recsys.dynamic.store.row_store import RunPart
from lightning_pipe.recsys.dynamic.store.versions import VersionedFolder
from tests.scenarios.fuzzing.bounded import Outcome, open_bounded
from tests.tiers import examples, sampled_rows

COLUMNS: Columns = [((3,), torch.float32), ((), torch.float32)]
FILE, LIST = "users.rank-0-of-1.00000.pt", "users.rank-0-of-1.json"


def write_table(folder: Path) -> None:
    ids = torch.arange(5)
    rows = StoredRows(ids, ids + 1, ids + 2, [torch.rand(5, 3), torch.rand(5)])
    write_rows(folder, "users", 0, 1, iter([rows]))


def read_table(folder: Path) -> None:
    """As a resume does, and as a user without a model does."""
    for _ in read_rows(folder, "users"):
        pass
    check_rows(folder, {"users": COLUMNS})


def put(folder: Path, content: bytes) -> None:
    """Another content of the file, listed as it is."""
    (folder / FILE).write_bytes(content)
    listed = {"name": FILE, "rows": 5, "bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / LIST).write_text(json.dumps([listed]))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def tensors(**changes: Any) -> bytes:
    ids = torch.arange(5)
    good = {"ids": ids, "counts": ids, "last_seen": ids, "columns": [torch.zeros(5, 3), torch.zeros(5)]}
    return saved({**good, **changes})


def zipped(content: bytes, *, compressed: bool = False, **parts: bytes) -> bytes:
    """A file of ``torch.save`` with another pickle, and further parts."""
    buffer = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", kind) as file:
        file.writestr("archive/data.pkl", content)
        for name, part in parts.items():
            file.writestr(f"archive/data/{name}", part)
    return buffer.getvalue()


class _Called:
    """Whose unpickling calls anything."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def doubled(opcodes: bytes, times: int) -> bytes:
    """A value that holds itself twice, so many times over: small in memory, endless for who looks at all of it."""
    parts = [b"\x80\x02", opcodes]
    for number in range(times):
        parts += [b"r", number.to_bytes(4, "little"), b"j", number.to_bytes(4, "little"), b"\x86"]
    return b"".join(parts)


def spread() -> bytes:
    """A zip file whose parts are all the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02N.")
        file.writestr("archive/data/0", bytes(1 << 24))
        one = file.infolist()[1]
        for number in range(1, 500):
            other = zipfile.ZipInfo(f"archive/data/{number}")
            other.header_offset, other.file_size, other.compress_size, other.CRC = (
                one.header_offset,
                one.file_size,
                one.compress_size,
                one.CRC,
            )
            file.filelist.append(other)
    return buffer.getvalue()


ROW_FILES: dict[str, Callable[[], bytes]] = {
    "nothing": bytes,
    "text": lambda: b"rows" * 1000,
    "ids of another type": lambda: tensors(ids=torch.arange(5).int()),
    "ids of another length": lambda: tensors(ids=torch.arange(6)),
    "counts that are a list": lambda: tensors(counts=[1, 2, 3, 4, 5]),
    "last_seen without rows": lambda: tensors(last_seen=torch.tensor(5)),
    "a column too few": lambda: tensors(columns=[torch.zeros(5, 3)]),
    "no columns": lambda: tensors(columns=[]),
    "a column of another type": lambda: tensors(columns=[torch.zeros(5, 3).double(), torch.zeros(5)]),
    "a wider column": lambda: tensors(columns=[torch.zeros(5, 4), torch.zeros(5)]),
    "a shorter column": lambda: tensors(columns=[torch.zeros(4, 3), torch.zeros(5)]),
    "a tensor of one number for all": lambda: tensors(ids=torch.zeros(1, dtype=torch.int64).expand(10**12)),
    "a tensor without values": lambda: tensors(ids=torch.empty(10**12, dtype=torch.int64, device="meta")),
    "a sparse tensor": lambda: tensors(ids=torch.zeros(5, 5).to_sparse()),
    "a quantised tensor": lambda: tensors(ids=torch.quantize_per_tensor(torch.zeros(5), 0.1, 0, torch.qint8)),
    "something more": lambda: tensors(more=torch.zeros(5)),
    "another kind": lambda: saved([torch.zeros(5)]),
    "a number": lambda: saved(5),
    "an old format": lambda: pickle.dumps({"ids": [1]}),
    "a call": lambda: zipped(pickle.dumps(_Called(os.system, "exit 3"), 2)),
    "bytes without end": lambda: zipped(pickle.dumps(_Called(bytearray, 10**11), 2)),
    "a compressed bomb": lambda: zipped(bytes(1 << 28), compressed=True),
    "a memo without end": lambda: zipped(b"\x80\x02Nr\xff\xff\xff\xff."),
    "bytes of any length": lambda: zipped(b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little")),
    "a list in itself": lambda: zipped(b"\x80\x02]q\x00(h\x00h\x00e."),
    "nested deep": lambda: zipped(b"\x80\x02" + b"(" * 30000 + b"t" * 30000 + b"."),
    "doubled as a part": lambda: zipped(doubled(b")", 60) + b"Q."),
    "doubled as a key": lambda: zipped(b"\x80\x02}(" + doubled(b")", 60)[2:] + b"Nu."),
    "doubled as a size": lambda: zipped(
        doubled(b")", 60) + b"0ctorch._utils\n_rebuild_tensor_v2\n(NK\x00)))Nt" + b"R."
    ),
    "doubled as all": lambda: zipped(doubled(b")", 60) + b"."),
    "parts of the same bytes": spread,
}


@pytest.mark.parametrize("kind", ROW_FILES)
def test_a_file_of_rows_made_to_harm_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    write_table(tmp_path)
    content = ROW_FILES[kind]()
    put(tmp_path, content)
    _refused(open_bounded(read_table, tmp_path), len(content), FILE)


def _refused(outcome: Outcome, size: int, *told: str) -> None:
    outcome.check(SetupError, size=size)
    assert outcome.error is not None, "it was accepted"
    for text in told:
        assert text in outcome.message
    assert len(outcome.message) < 2000


def test_the_file_that_all_others_are_made_of_is_read(tmp_path: Path) -> None:
    write_table(tmp_path)
    put(tmp_path, tensors())
    outcome = open_bounded(read_table, tmp_path)
    outcome.check()
    assert outcome.error is None


ENTRY = {"name": FILE, "rows": 5, "bytes": 1, "crc32": 1}
ROW_LISTS: dict[str, bytes] = {
    "nothing": b"",
    "text": b"[rows]",
    "a number": b"5",
    "another folder": json.dumps([{**ENTRY, "name": "../secret.pt"}]).encode(),
    "an absolute path": json.dumps([{**ENTRY, "name": "/dev/zero"}]).encode(),
    "a name that is none": json.dumps([{**ENTRY, "name": 5}]).encode(),
    "a missing field": json.dumps([{"name": FILE}]).encode(),
    "a further field": json.dumps([{**ENTRY, "more": 1}]).encode(),
    "a text for a number": json.dumps([{**ENTRY, "rows": "5"}]).encode(),
    "a fraction": json.dumps([{**ENTRY, "bytes": 1.5}]).encode(),
    "less than nothing": json.dumps([{**ENTRY, "rows": -5}]).encode(),
    "not a number": json.dumps([{**ENTRY, "rows": float("nan")}]).encode(),
    "a huge number": json.dumps([{**ENTRY, "bytes": 10**4000}]).encode(),
    "a number of too many digits": b'[{"name": "' + FILE.encode() + b'", "rows": ' + b"9" * 10**6 + b"}]",
    "the same file twice": json.dumps([ENTRY, ENTRY]).encode(),
    "nested deep": b"[" * 10**6,
    "many lists": b"[" + b"[]," * 10**7 + b"[]]",
    "more after it": json.dumps([ENTRY]).encode() + b"[]",
    "bytes that are no text": b"\xff\xfe" * 100,
}


@pytest.mark.parametrize("kind", ROW_LISTS)
def test_a_list_of_files_made_to_harm_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    write_table(tmp_path)
    (tmp_path / LIST).write_bytes(ROW_LISTS[kind])
    _refused(open_bounded(read_table, tmp_path), len(ROW_LISTS[kind]), "users.rank-0-of-1")


def linked(path: Path) -> None:
    outside = path.parent.parent / "outside"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


PLACES = {"a link": linked, "a device": device, "a pipe": pipe, "a folder": folder, "a terabyte": sparse}


@pytest.mark.parametrize("name", [FILE, LIST])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_not_read_for_rows(place: str, name: str, tmp_path: Path) -> None:
    write_table(tmp_path / "rows")
    PLACES[place](tmp_path / "rows" / name)
    _refused(open_bounded(read_table, tmp_path / "rows"), 0, name)


# ---------------------------------------------------------------------- stores


def write_store(path: Path) -> None:
    store = VersionedFolder(path, "files", {"width": 8}, shared=".sst")
    store.join(RunPart("abc", 0, 1))
    store.settle(0)

    def fill(new: Path) -> None:
        new.mkdir()
        (new / "rows.sst").write_bytes(bytes(1000))
        (new / "names").write_bytes(b"names")

    store.prepare(1, {"step": "7"}, fill)
    store.commit(1)
    store.close()


def open_store(path: Path) -> None:
    store = VersionedFolder(path, "files", {"width": 8}, shared=".sst")
    store.settle(store.state.committed)
    store.close()


def put_json(path: Path, text: bytes) -> None:
    path.write_bytes(text + b"\n%08x\n" % zlib.crc32(text))


STORE_FILES = ("store.json", "committed.json", "version.1/contents.json")
JSON: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "a text": b'"text"',
    "not a number": b"NaN",
    "infinity": b'{"version": Infinity}',
    "a huge version": b'{"version": ' + b"9" * 4000 + b"}",
    "a version of too many digits": b'{"version": ' + b"9" * 5000 + b"}",
    "a version that is a truth": b'{"version": true}',
    "a fraction of a version": b'{"version": 1.0}',
    "a version below 0": b'{"version": -1}',
    "nested deep": b"[" * 10**6 + b"]" * 10**6,
    "objects nested deep": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
    "many objects": b"[" + b'{"":{}},' * (250_000 - 1) + b"{}]",
    "bytes that are no text": b"\xff\xfe\xfd",
    "files elsewhere": b'{"version": 1, "notes": {}, "files": {"../../../secret": [1, 2]}}',
    "files that are no list": b'{"version": 1, "notes": {}, "files": {"names": 5}}',
    "files that are none": b'{"version": 1, "notes": {}, "files": ["names"]}',
    "a file without a size": b'{"version": 1, "notes": {}, "files": {"names": []}}',
    "a file with a text for a size": b'{"version": 1, "notes": {}, "files": {"names": ["5", 1]}}',
    "notes that are none": b'{"version": 1, "notes": 5, "files": {}}',
    "a note that is no text": b'{"version": 1, "notes": {"step": 5}, "files": {}}',
    "a part that is none": b'{"format": 1, "engine": "files", "description": {"width": 8}, "part": [1]}',
    "a part with a text for a rank": b'{"format": 1, "engine": "files", "description": {"width": 8}, "part":'
    b' {"run": "a", "rank": "0", "ranks": 1}}',
    "a description that is endless": b'{"format": 1, "engine": "files", "description": '
    + b"[" * 900
    + b"]" * 900
    + b"}",
}


def _usual(kind: str) -> str:
    """The file that a default run puts a content into: the one that it is made for, else one after another."""
    if b'"files"' in JSON[kind] or b'"notes"' in JSON[kind]:
        return "version.1/contents.json"
    if b'"format"' in JSON[kind]:
        return "store.json"
    if b'"version"' in JSON[kind]:
        return "committed.json"
    return STORE_FILES[list(JSON).index(kind) % len(STORE_FILES)]


@pytest.mark.parametrize(
    ("kind", "name"),
    sampled_rows(
        [(kind, name) for name in STORE_FILES for kind in JSON],
        lambda case: case[1] == _usual(case[0]),
        "{0[0]}-{0[1]}".format,
    ),
)
def test_a_file_of_a_store_made_to_harm_is_refused_by_name(kind: str, name: str, tmp_path: Path) -> None:
    write_store(tmp_path)
    put_json(tmp_path / name, JSON[kind])
    _refused(open_bounded(open_store, tmp_path), len(JSON[kind]), str(tmp_path))


OF_STORE = ("lock", *STORE_FILES, "version.1/names", "version.1/rows.sst")


def _often(case: tuple[str, str]) -> bool:
    """All for one file that is not read, one that is read and one that is copied, and each other file once."""
    place, name = case
    all_places = name in ("lock", "store.json", "version.1/names")
    return all_places or list(PLACES).index(place) == OF_STORE.index(name) % len(PLACES)


@pytest.mark.parametrize(
    ("place", "name"),
    sampled_rows([(place, name) for name in OF_STORE for place in PLACES], _often, "{0[0]}-{0[1]}".format),
)
def test_what_is_no_file_is_not_read_for_a_store(place: str, name: str, tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    PLACES[place](tmp_path / "store" / name)
    outcome = open_bounded(open_store, tmp_path / "store")
    if (place, name) in (("a terabyte", "lock"), ("a pipe", "lock")):
        outcome.check()  # it is not read
    else:
        _refused(outcome, 0, str(tmp_path))


def test_what_a_version_does_not_list_is_not_copied(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    (tmp_path / "store" / "version.1" / "more").symlink_to("/dev/zero")
    open_bounded(open_store, tmp_path / "store").check()
    assert {one.name for one in (tmp_path / "store" / "working").iterdir()} == {"rows.sst", "names"}


# ---------------------------------------------------------------------- anything


def mutated(content: bytes, seed: int) -> bytes:
    """Some bytes changed, left out, repeated or put in, of one of the file's parts or anywhere."""
    drawn = random.Random(seed)
    changed = bytearray(content)
    for _ in range(drawn.choice([1, 1, 2, 8])):
        place = drawn.randrange(len(changed) + 1)
        end = min(len(changed), place + drawn.choice([1, 1, 4, 8, 64]))
        new = [b"", drawn.randbytes(end - place), bytes(changed[place:end]) * 3, bytes(8), b"\xff" * (end - place)]
        changed[place:end] = drawn.choice(new)
    return bytes(changed)


def repacked(content: bytes, seed: int) -> bytes:
    """The same with the pickle changed, its checksum right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for entry in old.infolist():
            part = old.read(entry)
            new.writestr(entry.filename, mutated(part, seed) if entry.filename.endswith("data.pkl") else part)
    return buffer.getvalue()


def attempt(place: Path, seed: int, value: Any) -> None:
    """One file of each kind, changed."""
    shutil.rmtree(place, ignore_errors=True)
    good = tensors()
    for number, content in enumerate([mutated(good, seed), repacked(good, seed)]):
        write_table(place / str(number))
        put(place / str(number), content)
        open_bounded(read_table, place / str(number)).check(SetupError, size=len(content))
    listed = (place / "0" / LIST).read_bytes()
    (place / "0" / LIST).write_bytes(mutated(listed, seed))
    open_bounded(read_table, place / "0").check(SetupError, size=len(good))
    name = STORE_FILES[seed % len(STORE_FILES)]
    write_store(place / "store")
    text = (place / "store" / name).read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[0]
    text = mutated(text, seed) if value is None else json.dumps(with_value(json.loads(text), value, seed)).encode()
    put_json(place / "store" / name, text)
    open_bounded(open_store, place / "store").check(SetupError, size=len(text))


def with_value(found: Any, value: Any, seed: int) -> Any:
    """Another value somewhere in it."""
    drawn = random.Random(seed)
    if not isinstance(found, dict) or not found or drawn.random() < 0.2:
        return value
    key = drawn.choice(sorted(found))
    return {**found, key: with_value(found[key], value, seed + 1)}


VALUES = st.none() | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(10, 25), derandomize=True)
@given(seed=st.integers(0, 2**32), value=VALUES)
def test_a_changed_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, seed: int, value: Any) -> None:
    attempt(tmp_path_factory.getbasetemp() / "changed", seed, value)


@pytest.mark.long
def test_changed_files_are_read_or_refused_for_a_minute(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            attempt(tmp_path / "changed", seed, [None, [], {}, "", 10**40, -1, 0.5, True][seed % 8])
        except AssertionError as error:
            error.add_note(f"of seed {seed}")
            raise
        seed += 1
