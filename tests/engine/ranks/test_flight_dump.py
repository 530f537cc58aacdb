"""Dumps of a rank: on request, at an error, and where they cannot be written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.engine.ranks import flight_dump
from lightning_pipe.engine.ranks.flight_dump import FlightDump, places
from tests.patience import HANG


class Watched(FlightDump):
    """Says when it has written, and whether that failed."""

    def __init__(self, *arguments: Any) -> None:
        self.wrote = threading.Event()
        super().__init__(*arguments)

    def write(self, error: BaseException | None = None) -> None:
        super().write(error)
        self.wrote.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("TORCH_FR_", "TORCH_NCCL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what a dump sets ends with the test
    monkeypatch.setattr(flight_dump, "_LOOK", 0.01)


@pytest.fixture
def dump(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path, 1, 2, lambda: "3, 4")
    yield found
    found.stop()


def content(folder: Path) -> Any:
    return json.loads((folder / "flight_rank_1.json").read_text())


def failed() -> RuntimeError:
    try:
        raise RuntimeError("connection closed")
    except RuntimeError as error:
        return error


def waits_in_user_code(dump: Watched) -> bool:
    return dump.wrote.wait(HANG)


def test_a_touched_file_is_answered_with_a_dump_of_where_the_main_thread_is(dump: Watched, tmp_path: Path) -> None:
    places.update(main=("Forward", 7, False), io=("Copy", 8, True), stages=("forward of micro-batch 1", None, False))
    (tmp_path / "flight_request").touch()
    assert waits_in_user_code(dump)
    found = content(tmp_path)
    assert found["tasks"] == [
        "in Forward of iteration 7",
        "after Copy of iteration 8 (io)",
        "in forward of micro-batch 1",
    ]
    assert (found["rank"], found["world_size"], found["batch"], found["error"]) == (1, 2, "3, 4", None)
    assert any(one.endswith("waits_in_user_code") for one in found["stack"])


def test_nccls_own_dump_is_answered_and_told_to_the_other_ranks(dump: Watched, tmp_path: Path) -> None:
    (tmp_path / "flight_nccl_rank_1").write_bytes(b"pickle")
    assert dump.wrote.wait(HANG)
    dump.stop()
    assert (tmp_path / "flight_request").exists()


def test_a_request_of_an_earlier_run_is_not_answered(tmp_path: Path) -> None:
    (tmp_path / "flight_request").touch()
    dump = Watched(tmp_path, 1, 2, lambda: "")
    looked = threading.Event()
    ask, dump._changes = dump._changes, lambda: (looked.set(), ask())[1]  # type: ignore[func-returns-value, method-assign]
    assert looked.wait(HANG)
    dump.stop()
    assert not dump.wrote.is_set()


def test_an_error_is_dumped_named_in_a_note_and_told_to_the_other_ranks(dump: Watched, tmp_path: Path) -> None:
    error = failed()
    dump.note(error)
    assert error.__notes__ == [
        f"This rank's state is in {tmp_path}/flight_rank_1.json. Run: lightning-pipe diagnose {tmp_path}"
    ]
    found = content(tmp_path)
    assert found["error"] == "RuntimeError: connection closed"
    assert found["stack"][0].endswith(" failed")
    assert (tmp_path / "flight_request").exists()


@pytest.mark.parametrize("moved", [False, True])
def test_an_error_at_the_place_of_an_earlier_dump_keeps_that(dump: Watched, tmp_path: Path, moved: bool) -> None:
    places["main"] = "Forward", 7, False
    dump.write()
    if moved:
        places["main"] = "Forward", 8, False
    dump.note(failed())
    assert content(tmp_path)["error"] == ("RuntimeError: connection closed" if moved else None)


def test_after_a_timeout_other_ranks_are_waited_for_until_they_have_written(
    dump: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_dump, "_PATIENCE", HANG)
    other = Watched(tmp_path, 0, 2, lambda: "")
    error = RuntimeError("Timed out waiting 10ms")
    dump.note(error)
    other.stop()
    assert other.wrote.is_set()
    assert (tmp_path / "flight_rank_0.json").exists()


def test_an_error_that_cannot_be_dumped_stays_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dump = FlightDump(tmp_path / "file", 0, 2, lambda: "")
    error = failed()
    dump.note(error)
    (note,) = error.__notes__
    assert note.startswith(f"This rank's state could not be written to {tmp_path}/file/flight_rank_0.json: ")


def test_a_dump_that_is_stopped_leaves_no_thread(dump: Watched) -> None:
    dump.stop()
    dump.stop()
    assert "lightning_pipe-flight" not in [thread.name for thread in threading.enumerate()]
