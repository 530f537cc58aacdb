"""Contracts with PyTorch's ``.metadata``: all that a save writes there is read as PyTorch itself reads it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from lightning_pipe._compat.checkpoint_metadata import load_metadata

STATE = {
    "tensors": {
        name: torch.zeros(2, 3, dtype=getattr(torch, name)) for name in ("float32", "bfloat16", "int64", "bool")
    },
    "others": {"step": 3, "list": [1, torch.ones(2)]},
}


@pytest.mark.parametrize("early", [False, True], ids=["enum by value", "enum by getattr, as Python 3.11.2"])
def test_metadata_are_those_that_pytorch_reads(early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    expected = pickle.loads((tmp_path / ".metadata").read_bytes())
    if early:
        monkeypatch.setattr(
            _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (_MEM_FORMAT_ENCODING, self.name))
        )
    content = pickle.dumps(expected)
    assert (b"getattr" in content) == early
    metadata: Any = load_metadata(io.BytesIO(content))
    expected.storage_meta.checkpoint_id = metadata.storage_meta.checkpoint_id = None  # a path, which no load uses
    assert metadata == expected


@pytest.mark.parametrize(
    "value", [print, dcp.load, 3, {"storage_data": {}}], ids=["builtin", "function", "number", "dict"]
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="it holds"):
        load_metadata(io.BytesIO(pickle.dumps(value)))
