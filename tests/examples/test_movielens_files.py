"""Getting the MovieLens example's files, and what happens when that fails."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from examples.recsys_movielens import files
from examples.recsys_movielens.data import MovieLensData
from lightning_pipe.engine.common.errors import SetupError


def test_a_missing_file_is_named_with_its_folder_and_the_fix(folder: Path) -> None:
    (folder / "ml-100k.user").unlink()
    data = MovieLensData(data_dir=str(folder))
    data.prepare_data()
    with pytest.raises(SetupError, match=r"invented.* has no data file ml-100k\.user; .*leave out data_dir"):
        data.setup()


def test_a_file_with_another_hash_is_refused_with_both_hashes(folder: Path) -> None:
    with (folder / "ml-100k.inter").open("a") as file:
        file.write("1\t1\t5\t880000000\n")
    needed = files.SHA256["ml-100k.inter"]
    with pytest.raises(SetupError, match=rf"ml-100k\.inter in .* has sha256 [0-9a-f]{{64}}, expected {needed}"):
        files.read(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lightning_pipe" / "movielens-100k"


def test_the_files_are_read_out_of_the_wheel_once_and_kept(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1]) / "recbole-1.2.1-py3-none-any.whl", "w"
        ) as wheel:
            for name in files.SHA256:
                wheel.write(folder / name, f"{files.FOLDER_IN_WHEEL}/{name}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        data = MovieLensData()
        data.prepare_data()
        data.setup()
    assert len(calls) == 1
    assert {"download", "recbole==1.2.1", "--no-deps"} <= set(calls[0])
    assert sorted(path.name for path in cache.iterdir()) == sorted(files.SHA256)
    assert "GroupLens" in capsys.readouterr().out
