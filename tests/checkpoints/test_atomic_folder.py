"""A folder is in its place when it is whole, whatever happens while it is being written."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_pipe.checkpoints import atomic_folder
from lightning_pipe.checkpoints.atomic_folder import (
    begin_folder,
    discard_folder,
    finish_folder,
    folder_to_write,
    remove_folder,
)


def write(folder: Path, text: str) -> None:
    permissions = begin_folder(folder)
    (folder_to_write(folder) / "text").write_text(text)
    finish_folder(folder, permissions)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(params=["in one step", "in two"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "in two":
        monkeypatch.setattr(atomic_folder, "_exchange_paths_atomically", lambda one, other: False)
    return tmp_path / "made" / "folder"


def test_what_is_there_is_replaced(folder: Path) -> None:
    for text in ("first", "second"):
        write(folder, text)
        assert (folder / "text").read_text() == text
        assert names(folder.parent) == {"folder"}


def test_a_file_and_a_link_are_replaced_too(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("of another strategy")
    write(folder, "first")
    folder.rename(folder.with_name("other"))
    folder.symlink_to("other")
    write(folder, "second")
    assert not folder.is_symlink()
    assert (folder / "text").read_text() == "second"
    assert (folder.with_name("other") / "text").read_text() == "first"
    assert names(folder.parent) == {"folder", "other"}


def test_nobody_else_reads_what_is_being_written(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        permissions = begin_folder(tmp_path / "folder")
        assert stat.S_IMODE(folder_to_write(tmp_path / "folder").stat().st_mode) == 0o700
        finish_folder(tmp_path / "folder", permissions)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o755


def test_what_was_there_is_there_until_the_rest_is_whole(folder: Path) -> None:
    write(folder, "first")
    begin_folder(folder)
    assert (folder / "text").read_text() == "first"
    # As if the process had ended: the next one writes the folder anew, ...
    write(folder, "second")
    assert names(folder) == {"text"}
    # ... or gives it up.
    begin_folder(folder)
    discard_folder(folder)
    assert (folder / "text").read_text() == "second"
    assert names(folder.parent) == {"folder"}


def test_the_old_folder_is_put_back_where_a_process_ended_between_two_steps(tmp_path: Path) -> None:
    write(tmp_path / "folder", "first")
    (tmp_path / "folder").rename(tmp_path / ".folder.replaced")
    begin_folder(tmp_path / "folder")
    assert (tmp_path / "folder" / "text").read_text() == "first"


def test_a_folder_is_gone_before_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "folder", "first")

    def ended(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", ended)
        with pytest.raises(KeyboardInterrupt):
            remove_folder(tmp_path / "folder")
    assert names(tmp_path) == {".folder.removing"}
    write(tmp_path / "folder", "second")
    remove_folder(tmp_path / "folder")
    assert names(tmp_path) == set()


def test_all_is_on_disk_before_the_folder_gets_its_name_and_then_the_name_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps what was synced, and may keep anything else or not."""
    write(folder, "first")
    permissions = begin_folder(folder)
    written = folder_to_write(folder)
    (written / "below").mkdir()
    (written / "below" / "text").write_text("second")
    files = {str(path.relative_to(written)): path.stat().st_ino for path in (written, *written.rglob("*"))}
    synced: list[int] = []
    in_place: list[bool] = []

    def sync(descriptor: int, original: Any = os.fsync) -> None:
        original(descriptor)
        synced.append(os.fstat(descriptor).st_ino)
        in_place.append(folder.exists() and folder.stat().st_ino == files["."])

    monkeypatch.setattr(os, "fsync", sync)
    finish_folder(folder, permissions)
    before, after = synced[: in_place.index(True)], synced[in_place.index(True) :]
    assert set(files.values()) <= set(before)
    assert folder.parent.stat().st_ino in after


def test_an_unfinished_folder_does_not_hide_the_last_whole_one_of_a_job_that_slurm_stopped(tmp_path: Path) -> None:
    (tmp_path / "hpc_ckpt_1.ckpt").mkdir()
    begin_folder(tmp_path / "hpc_ckpt_2.ckpt")
    found = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")._checkpoint_connector._hpc_resume_path
    assert found == str(tmp_path / "hpc_ckpt_1.ckpt")


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "folder", "first")
    (tmp_path / "link").symlink_to("folder")
    remove_folder(tmp_path / "link")
    assert names(tmp_path) == {"folder"}
    remove_folder(tmp_path / "nothing")
