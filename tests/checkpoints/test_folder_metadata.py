"""``.metadata`` is read as any version of Python pickles it. Hostile files are in ``tests/scenarios/checkpoints``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from lightning_pipe.checkpoints.safe_reading import SafeReader
from lightning_pipe.engine import SetupError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"state_dict": {"weight": torch.arange(6.0)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


class Getattr:
    """Pickled as a call of ``getattr``."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


def test_members_of_an_enum_are_read_as_early_releases_of_python_3_11_pickle_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = SafeReader(folder).read_metadata()
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (_MEM_FORMAT_ENCODING, self.name))
    )
    path.write_bytes(pickle.dumps(metadata))
    assert b"getattr" in path.read_bytes()
    assert SafeReader(folder).read_metadata() == expected


@pytest.mark.parametrize("more", [(), (None,), ((1,),)], ids=["2.14", "2.15, unknown strides", "2.15"])
def test_properties_of_tensors_are_read_as_any_release_of_pytorch_writes_them(
    folder: Path, more: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = SafeReader(folder).read_metadata()
    state = (torch.float32, torch.strided, False, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, False, *more)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda _: state)
    path.write_bytes(pickle.dumps(metadata))
    assert SafeReader(folder).read_metadata() == expected


@pytest.mark.parametrize(
    "call",
    [Getattr(dcp.Metadata, "__init__"), Getattr("text", "join"), Getattr(_MEM_FORMAT_ENCODING, 1)],
    ids=["of a class", "of a text", "not by name"],
)
def test_no_other_attribute_is_read(folder: Path, call: Getattr) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(call))
    with pytest.raises(SetupError, match="is refused: it calls getattr on"):
        SafeReader(folder).read_metadata()
