"""A file is there whole or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pipe.engine.whole_file import whole_file


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
    with pytest.raises(FileNotFoundError), whole_file(path):
        pass
    assert path.read_text() == "before"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), whole_file(tmp_path / "file" / "plan.yaml"):
        pass
