"""A file is there whole or as it was before."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import pytest

from lightning_pipe.engine.common.whole_file import whole_file


def test_what_was_written_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "plan.yaml"
    for text in ("first", "second"):
        with whole_file(path) as unfinished:
            assert unfinished != path
            assert unfinished.suffix == path.suffix
            unfinished.write_text(text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("before")

    def write_half() -> None:
        with whole_file(path) as unfinished:
            unfinished.write_text("half")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        write_half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_writes_nothing_is_an_error_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("before")
    with pytest.raises(OSError, match="nothing was written"), whole_file(path):
        pass
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), whole_file(tmp_path / "file" / "plan.yaml"):
        pass


def test_the_name_beside_it_is_another_each_time_and_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    names = set()
    for _ in range(3):
        with whole_file(path) as unfinished:
            names.add(unfinished.name)
            unfinished.write_text("whole")
    assert len(names) == 3
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / ".guessed.part.yaml").symlink_to(other)
    with pytest.raises(FileExistsError), whole_file(path):
        pass
    assert (path.read_text(), other.read_text()) == ("whole", "mine")


def test_a_link_that_takes_the_place_of_what_is_being_written_is_no_result(tmp_path: Path) -> None:
    path, other = tmp_path / "plan.yaml", tmp_path / "other"
    path.write_text("before")
    other.write_text("another's")

    def exchange() -> None:
        with whole_file(path) as unfinished:
            unfinished.unlink()
            unfinished.symlink_to(other)

    with pytest.raises(OSError, match="was replaced while"):
        exchange()
    assert not path.is_symlink()
    assert sorted(tmp_path.iterdir()) == [other, path]
    assert path.read_text() == "before"


def test_a_link_at_the_path_is_replaced_and_what_it_points_to_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "plan.yaml", tmp_path / "other"
    other.write_text("mine")
    path.symlink_to(other)
    with whole_file(path) as unfinished:
        unfinished.write_text("whole")
    assert not path.is_symlink()
    assert (path.read_text(), other.read_text()) == ("whole", "mine")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_of_any_new_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "plan.yaml") as unfinished:
            unfinished.write_text("whole")
    finally:
        os.umask(before)
    assert (tmp_path / "plan.yaml").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_file_that_is_replaced_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("before")
    path.chmod(mode)
    with whole_file(path) as unfinished:
        assert not unfinished.stat().st_mode & 0o777 & ~(mode | 0o200)
        unfinished.write_text("whole")
    assert path.read_text() == "whole"
    assert path.stat().st_mode & 0o777 == mode


def test_the_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "folder" / "plan.yaml"
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        done.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            assert os.fstat(descriptor).st_size == len("whole")
        sync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        done.append(f"{source} becomes {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    with whole_file(path) as unfinished:
        unfinished.write_text("whole")
    # Any of the folders above may be new, whoever has made it.
    folders = [f"sync {folder}" for folder in path.resolve().parents]
    assert done[:2] == [f"sync {unfinished}", f"{unfinished} becomes {path}"]
    assert done[2:] == folders


def test_a_folder_in_the_way_is_an_error_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.mkdir()

    def write() -> None:
        with whole_file(path) as unfinished:
            unfinished.write_text("whole")

    with pytest.raises(IsADirectoryError):
        write()
    assert list(tmp_path.iterdir()) == [path]
