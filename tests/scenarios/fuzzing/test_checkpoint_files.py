"""Files made to harm whoever opens a checkpoint or weights: known errors, in bounded time and memory."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.checkpoints.safe_reading import load_object
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from tests.distributed import fork_preloaded
from tests.patience import HANG
from tests.scenarios.fuzzing.bounded import open_bounded
from tests.scenarios.fuzzing.corpus.checkpoints import FILES, FOLDERS, good_folder
from tests.scenarios.fuzzing.corpus.weights import WEIGHTS, good_weights

# A path of this test's folder is at the beginning of each message, and what follows says what is wrong.
NAMED = r"the checkpoint's file '.*' (is refused|cannot be read): (?!\w*Error)|.*' is a folder without meta.pt"
# Of which a reader that counts what it makes, makes nothing large.
HARMLESS = ("memo of a large index", "a frame beyond the file")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("good") / "folder")


def test_the_good_folder_is_exported(good: Path, tmp_path: Path) -> None:
    outcome = open_bounded(export_checkpoint, good, tmp_path / "out")
    outcome.check(size=0)
    assert outcome.error is None
    found = load_object(tmp_path / "out", None)
    assert found["state_dict"]["model.a"].tolist() == [
        [0.0, 1.0, 2.0, 3.0],
        [4.0, 5.0, 6.0, 7.0],
        [8.0, 9.0, 10.0, 11.0],
    ]
    assert found["optimizer_states"][0]["state"][0]["step"] == 3


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_of_torch_save_is_refused_in_bounds(name: str, tmp_path: Path) -> None:
    path = tmp_path / "meta.pt"
    path.write_bytes(FILES[name]())
    outcome = open_bounded(load_object, path, None)
    outcome.check(SetupError, size=path.stat().st_size)
    if name not in HARMLESS:
        assert re.match(NAMED, outcome.message), (outcome.error, outcome.message)
        assert outcome.message.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_bad_folder_is_refused_in_bounds(name: str, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(good, folder)
    FOLDERS[name](folder)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    outcome = open_bounded(export_checkpoint, folder, tmp_path / "out")
    outcome.check(SetupError, size=size)
    assert outcome.error is not None
    assert re.match(NAMED, outcome.message), (outcome.error, outcome.message)
    assert not (tmp_path / "out").exists()


def read_weights(folder: Path) -> None:
    """All that is read of a folder before a model is made."""
    weights = PretrainedWeights(folder)
    for tensor in next(weights.read([weights.tensors])).values():
        tensor.clone()
    weights.config()


def test_the_good_weights_are_read(tmp_path: Path) -> None:
    outcome = open_bounded(read_weights, good_weights(tmp_path / "folder"))
    outcome.check()
    assert outcome.error is None, outcome.trace


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_bad_folder_of_weights_is_refused_in_bounds(name: str, tmp_path: Path) -> None:
    folder = good_weights(tmp_path / "folder")
    WEIGHTS[name](folder)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    outcome = open_bounded(read_weights, folder)
    outcome.check(SetupError, size=size)
    assert outcome.error is not None
    assert str(folder) in outcome.message


def test_the_command_says_one_line_and_ends_with_status_1(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "folder")
    (tmp_path / "folder" / "meta.pt").write_bytes(FILES["dtype grown far"]())
    arguments = ["checkpoint", "export", str(tmp_path / "folder"), str(tmp_path / "out")]
    process = fork_preloaded(run_command, (arguments, tmp_path / "stderr"))
    process.join(HANG)
    said = (tmp_path / "stderr").read_text()
    assert process.exitcode == 1, said
    assert "meta.pt' is refused: the pickle gives a state to" in said
    assert "Traceback" not in said


def run_command(arguments: list[str], stderr: Path) -> None:
    """``python -m lightning_pipe.cli``, with what it writes to the second stream in a file."""
    with stderr.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv[1:] = arguments
    runpy.run_module("lightning_pipe.cli", run_name="__main__", alter_sys=True)
