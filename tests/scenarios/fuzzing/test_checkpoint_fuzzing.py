"""Files of checkpoints and weights as hypothesis makes them: known error or success, in bounds, and never a signal.

Each example is opened in a process of its own. The ordinary run is short and always the same. ``FUZZ_SECONDS=60`` in
the environment is the long run: so many seconds for all tests together, with other files each time.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.checkpoints.safe_reading import load_object
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from tests.scenarios.fuzzing.bounded import open_bounded
from tests.scenarios.fuzzing.corpus.checkpoints import good_folder
from tests.scenarios.fuzzing.corpus.weights import good_weights, safetensors_file
from tests.scenarios.fuzzing.pickles import Build, Get, Global, New, Persistent, Put, Raw, Reduce, assemble, torch_file
from tests.tiers import examples

# An example takes a fiftieth of a second or more.
_SECONDS, _TESTS = float(os.environ.get("FUZZ_SECONDS", "0")), 5
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


# ---------------------------------------------------------------------- what files are made of

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
NAMES = st.sampled_from(
    ["collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.bytearray", "builtins.complex"]
    + ["_codecs.encode", "torch.Size", "torch.device", "torch.float32", "torch.bool", "torch.quint8", "torch.Tensor"]
    + ["torch.FloatStorage", "torch.BoolStorage", "torch.storage.UntypedStorage", "torch.FloatTensor"]
    + [f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "parameter", "qtensor")]
    + ["torch._utils._rebuild_parameter_with_state", "torch._utils._rebuild_sparse_tensor"]
    + ["torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter", "torch.serialization._get_layout"]
    + ["numpy.dtype", "numpy.ndarray", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray.scalar"]
    + ["builtins.eval", "os.system", "builtins.getattr", "numpy.dtypes.Float64DType", "tensordict._td.TensorDict"]
)
PLACES = st.integers(0, 5)


def _groups(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=9)
    made = st.builds(Reduce, st.builds(Global, NAMES), several.map(tuple))
    return st.one_of(
        several,
        several.map(tuple),
        st.dictionaries(TEXTS | NUMBERS, inner, max_size=3),
        made,
        st.builds(New, st.builds(Global, NAMES), several.map(tuple)),
        st.builds(Build, made | inner, inner),
        st.builds(Put, PLACES, inner),
        st.builds(Persistent, inner),
    )


PLAIN = st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS | st.binary(max_size=16)
# The right calls, with arguments that may be wrong.
STORAGE = st.builds(
    lambda kind, key, count: Persistent(("storage", Global(kind), key, "cpu", count)),
    st.sampled_from(["torch.FloatStorage", "torch.BoolStorage", "torch.ByteStorage", "torch.LongStorage"]),
    st.sampled_from(["0", "1"]),
    st.sampled_from([0, 2, 4, 16, 2**40]),
)
SIZES = st.lists(NUMBERS, max_size=3).map(tuple) | st.sampled_from([(4,), (2, 2), ()])
TENSOR = st.builds(
    lambda name, *args: Reduce(
        Global(f"torch._utils.{name}"), (*args, False, Reduce(Global("collections.OrderedDict")))
    ),
    st.sampled_from(["_rebuild_tensor_v2", "_rebuild_tensor_v3"]),
    STORAGE,
    NUMBERS,
    SIZES,
    SIZES,
)
DTYPE = st.builds(
    lambda name, order, parts, sizes: Build(
        Put(0, Reduce(Global("numpy.dtype"), (name, False, True))), (3, order, *parts, *sizes)
    ),
    TEXTS,
    TEXTS,
    st.sampled_from([(None, None, None), (1, None, None), (None, ("a",), {"a": 1})]),
    st.lists(NUMBERS, min_size=3, max_size=3) | st.sampled_from([[-1, -1, 0], [16, 1, 0], [36, 4, 8]]),
)
ARRAY = st.builds(
    lambda shape, dtype, raw: Build(
        Reduce(Global("numpy.core.multiarray._reconstruct"), (Global("numpy.ndarray"), (0,), b"b")),
        (1, shape, dtype, False, raw),
    ),
    SIZES,
    DTYPE,
    st.binary(max_size=40),
)
LEAVES = PLAIN | st.builds(Get, PLACES) | st.builds(Global, NAMES) | STORAGE | TENSOR | DTYPE | ARRAY
VALUES = st.recursive(LEAVES, _groups, max_leaves=12)
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


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("good") / "folder")


# ---------------------------------------------------------------------- readers


@fuzzed
@given(value=VALUES, changes=CHANGES, file_changes=CHANGES | st.just([]), storage=st.binary(min_size=16, max_size=16))
def test_files_of_torch_save(
    end: float, tmp_path: Path, value: Any, changes: Any, file_changes: Any, storage: bytes
) -> None:
    try:
        pickled = assemble(value)
    except UnicodeEncodeError:
        pickled = assemble(None)
    file = tmp_path / "file"
    file.write_bytes(changed(torch_file(changed(pickled, changes), {"0": storage, "1": b""}), file_changes))
    check(end, file.stat().st_size, load_object, file, None)


OPCODES = st.lists(st.sampled_from([bytes([code]) for code in range(256)]) | st.binary(max_size=9), max_size=60)


@fuzzed
@given(opcodes=OPCODES)
def test_opcodes_in_any_order(end: float, tmp_path: Path, opcodes: list[bytes]) -> None:
    file = tmp_path / "file"
    file.write_bytes(torch_file(assemble(Raw(b"".join(opcodes)))))
    check(end, file.stat().st_size, load_object, file, None)


HOSTILE = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple), max_leaves=6
)


@fuzzed
@given(
    fields=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), HOSTILE), max_size=3),
    changes=CHANGES | st.just([]),
    data=CHANGES | st.just([]),
)
def test_metadata(end: float, good: Path, tmp_path: Path, fields: Any, changes: Any, data: Any) -> None:
    folder = tmp_path / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    path, file = folder / ".metadata", folder / "__0_0.distcp"
    metadata = pickle.loads(path.read_bytes())
    for which, field, value in fields:
        _set_field(metadata, which, field, value)
    path.write_bytes(changed(pickle.dumps(metadata), changes))
    file.write_bytes(changed(file.read_bytes(), data))
    check(end, 0, export_checkpoint, folder, tmp_path / "out")


def _set_field(metadata: Any, which: int, field: int, value: Any) -> None:
    """Give one of the fields another value, of the entry that a number chooses."""

    def one(entries: Any) -> Any:
        return list(entries)[which % len(entries)] if isinstance(entries, dict) and entries else None

    infos, tensors, paths = metadata.storage_data, metadata.state_dict_metadata, metadata.planner_data
    targets: list[tuple[Any, str]] = [
        (metadata, name) for name in ("planner_data", "storage_data", "state_dict_metadata")
    ]
    targets += [(infos[one(infos)], name) for name in ("relative_path", "offset", "length")] if one(infos) else []
    targets += [(tensors[one(tensors)], name) for name in ("size", "chunks", "properties")] if one(tensors) else []
    target, name = targets[field % len(targets)]
    if field == 9 and one(paths) is not None:
        paths[one(paths)] = ("state_dict", "x", value) if which % 2 else value
    elif hasattr(target, name):
        setattr(target, name, value)


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
