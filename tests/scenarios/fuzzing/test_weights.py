"""Files of weights made to harm whoever opens them: a known error or success, in bounded time and memory.

Each file is opened in a process of its own. Some are stored, others are made by hypothesis: the ordinary run is short
and always the same. ``FUZZ_SECONDS=60`` in the environment is the long run: so many seconds for all tests together,
with other files each time.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from tests.scenarios.fuzzing.bounded import open_bounded
from tests.scenarios.fuzzing.corpus.weights import WEIGHTS, good_weights, safetensors_file
from tests.tiers import examples


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


# ---------------------------------------------------------------------- files that hypothesis makes

# An example takes a fiftieth of a second or more.
_SECONDS, _TESTS = float(os.environ.get("FUZZ_SECONDS", "0")), 2
fuzzed = settings(
    max_examples=int(50 * _SECONDS / _TESTS) or examples(8, 20),
    derandomize=not _SECONDS,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def end() -> float:
    return time.monotonic() + (_SECONDS / _TESTS if _SECONDS else 3600.0)


NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 4, 16, 255, 2**16, 150_000_000, 2**31 - 1, 2**31, 2**48, 2**62, 2**63, -(2**31)]
)
TEXTS = st.sampled_from(
    [
        "",
        "0",
        "storage",
        "cpu",
        "meta",
        "cuda",
        "latin1",
        "S16",
        "f8",
        "U9",
        "O",
        "<",
        ">",
        "|",
        "b",
        "torch.strided",
        "../x",
        "/etc/passwd",
        "a.b",
        "size",
        "_metadata",
        "state_dict",
        "data",
        "x" * 1000,
        "\x1b[2J",
        "é",
        "�",
    ]
)
# Where bytes are changed, by thousandths of the file, and to what.
CHANGES = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 3), st.binary(max_size=6)), max_size=4)


def changed(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, removed, added in changes:
        at = place * len(content) // 1000
        content = content[:at] + added + content[at + removed :]
    return content


def check(end: float, size: int, reader: Callable[..., Any], *args: Any) -> None:
    if time.monotonic() < end:
        open_bounded(reader, *args).check(SetupError, size=size)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "model_type",
        "num_hidden_layers",
        "num_labels",
        "id2label",
        "layer_types",
        "rope_scaling",
        "dtype",
        "hidden_size",
        "num_attention_heads",
        "quantization_config",
        "vocab_size",
        "architectures",
        "auto_map",
        "pruned_heads",
    ]
)


@fuzzed
@given(index=JSON, entries=st.dictionaries(TEXTS, JSON, max_size=3), whole=st.booleans(), changes=CHANGES | st.just([]))
def test_indices(end: float, tmp_path: Path, index: Any, entries: Any, whole: bool, changes: Any) -> None:
    folder = _weights(tmp_path)
    content = json.dumps(index if whole else {"weight_map": {"a": "model-1.safetensors"} | entries})
    (folder / "model.safetensors.index.json").write_bytes(changed(content.encode(), changes))
    check(end, len(content), PretrainedWeights, folder)


@fuzzed
@given(
    config=st.dictionaries(FIELDS, JSON, max_size=3),
    header=st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), JSON, max_size=2),
    changes=CHANGES | st.just([]),
)
def test_configs_and_headers(end: float, tmp_path: Path, config: Any, header: Any, changes: Any) -> None:
    folder = _weights(tmp_path)
    present = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(present | config))
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | header
    (folder / "model-1.safetensors").write_bytes(changed(safetensors_file({"a": tensor}, b"\0" * 8), changes))
    check(end, 0, _read_tensors, folder)
    good_weights(tmp_path / "other")
    shutil.copy(folder / "config.json", tmp_path / "other")
    check(end, 0, _read_config, tmp_path / "other")


def _read_tensors(folder: Path) -> None:
    weights = PretrainedWeights(folder)
    for value in next(weights.read([weights.tensors])).values():
        value.clone()


def _read_config(folder: Path) -> None:
    PretrainedWeights(folder).config()


def _weights(tmp_path: Path) -> Path:
    for name in ("folder", "other"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    return good_weights(tmp_path / "folder")
