"""Values that are too large for memory are read from their place in a file of many values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_pipe.checkpoints.folder_reading import load_state_no_dist
from lightning_pipe.checkpoints.safe_reading import SafeFileSystemReader
from lightning_pipe.engine import SetupError

LARGE = 2**22 + 1  # floats: more than 16 MiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    values = {"small": torch.arange(4.0), "first": torch.arange(float(LARGE)), "second": -torch.arange(float(LARGE))}
    dcp.save({**values, "text": "of another program"}, checkpoint_id=path, no_dist=True)
    return path


def read(folder: Path) -> dict[str, object]:
    state: dict[str, object] = {name: torch.zeros(LARGE) for name in ("first", "second")}
    state |= {"small": torch.zeros(4), "text": None}
    load_state_no_dist(folder, SafeFileSystemReader(folder).read_metadata(), state, None)
    return state


def test_each_value_is_what_was_saved(folder: Path) -> None:
    state = read(folder)
    assert torch.equal(state["first"], torch.arange(float(LARGE)))  # type: ignore[arg-type]
    assert torch.equal(state["second"], -torch.arange(float(LARGE)))  # type: ignore[arg-type]
    assert torch.equal(state["small"], torch.arange(4.0))  # type: ignore[arg-type]
    assert state["text"] == "of another program"


def test_a_changed_bit_in_a_large_value_is_noticed(folder: Path, tmp_path: Path) -> None:
    metadata = SafeFileSystemReader(folder).read_metadata()
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "second")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / place.relative_path).open("r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(SetupError, match=r"the checksum of its entry .* differs"):
        read(tmp_path)
