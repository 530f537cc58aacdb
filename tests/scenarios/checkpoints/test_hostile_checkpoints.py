"""What no checkpoint may do: run code when it is read, or pass for whole when it is not. Every rank says which file."""

from __future__ import annotations

import io
import pickle
import random
import re
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, StorageMeta

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.checkpoints.folder_reading import read_metadata
from lightning_pipe.checkpoints.safe_reading import load_object, unsafe_names
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.stage_checkpoint import load_stage_checkpoint
from lightning_pipe.strategies.recommender.sharded_checkpoint import load_sharded_checkpoint
from tests.distributed import run_ranks
from tests.scenarios.fuzzing.pickles import Build, Get, Global, Put, Reduce, assemble, torch_file
from tests.strategies import cases, llm_cases

KINDS = ("tables", "stages")
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self._marker), "w")


class Custom:
    """A class of the user's."""


class _Holding:
    """A module that puts an object of such a class into its checkpoint."""

    found: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of the user"] = Custom()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["of the user"]


class HoldingTables(_Holding, cases.Clicks):
    pass


class HoldingStages(_Holding, llm_cases.Tiny):
    pass


# ---------------------------------------------------------------------- files that somebody has changed


def _entries(folder: Path, change: Callable[[Any, Any], Any]) -> None:
    """Change ``.metadata``: what it is to have of each entry, by its index and where it is; None for the same."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = {}
    for index, info in metadata.storage_data.items():
        new_index, new_info = change(index, info) or (index, info)
        changed[new_index] = new_info
        if new_index != index:
            metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    metadata.storage_data = changed
    path.write_bytes(pickle.dumps(metadata))


def _evil_pickle(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Evil(marker)))


def _evil_contents(path: Path, marker: Path) -> None:
    """As ``torch.save`` writes it; of a rank's file each tensor."""
    if path.suffix != ".distcp":
        buffer = io.BytesIO()
        torch.save(Evil(marker), buffer)
        path.write_bytes(buffer.getvalue())
        return
    contents, places = b"", {}
    for index, info in pickle.loads((path.parent / ".metadata").read_bytes()).storage_data.items():
        if info.relative_path == path.name:
            buffer = io.BytesIO()
            torch.save((Evil(marker), torch.zeros(info.length)), buffer)
            places[index] = len(contents), len(buffer.getvalue())
            contents += buffer.getvalue()
    path.write_bytes(contents)

    def moved(index: Any, info: Any) -> Any:
        if index in places:
            info.offset, info.length = places[index]

    _entries(path.parent, moved)


def _evil_bytes(path: Path, marker: Path) -> None:
    """The same, and that they are no tensors: PyTorch's planner unpickles such freely."""
    _evil_contents(path, marker)

    def no_tensors(index: Any, info: Any) -> Any:
        return (MetadataIndex(index.fqn), info) if info.relative_path == path.name else None

    _entries(path.parent, no_tensors)


def _evil_class(path: Path, marker: Path) -> None:
    """Calls nothing, but would change a class for whoever uses it next."""
    setting = pickle.dumps((None, {"load_id": "changed"}))[:-1]
    name = f"c{StorageMeta.__module__}\n{StorageMeta.__name__}\n".encode()
    path.write_bytes(setting[:2] + name + setting[2:] + b"b.")


def _outside(path: Path, marker: Path) -> None:
    def elsewhere(index: Any, info: Any) -> Any:
        info.relative_path = f"../{path.parent.name}/{info.relative_path}"

    _entries(path.parent, elsewhere)


def _cut(path: Path, marker: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flipped(path: Path, marker: Path) -> None:
    """One bit of a number: the contents can be read all the same."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".distcp":
        info = next(i for i in _infos(path.parent) if i.relative_path == path.name)
        place = content.index(b"/data/0", info.offset) + 64
        place += -place % 64
        content[place] ^= 1
    else:
        content = bytearray(b"\x00" * len(content))
    path.write_bytes(content)


def _infos(folder: Path) -> list[Any]:
    infos = pickle.loads((folder / ".metadata").read_bytes()).storage_data.values()
    return sorted(infos, key=lambda info: info.offset)


# What is done to a file, and by the file the reason that the error gives: an error of anything else is no refusal.
CHANGES: dict[str, tuple[Callable[[Path, Path], None], dict[str, str]]] = {
    "a pickle": (
        _evil_pickle,
        {
            ".metadata": "is refused: it holds _?io.open, which torch.distributed.checkpoint does not put there",
            "__0_0.distcp": r"cannot be read: storage_data\['.*'\] ends at byte \d+ of .*, which has \d+ bytes",
            "__1_0.distcp": r"cannot be read: storage_data\['.*'\] ends at byte \d+ of .*, which has \d+ bytes",
            "meta.pt": "cannot be read: it is no file of torch.save, or is cut short",
        },
    ),
    "contents": (
        _evil_contents,
        {
            ".metadata": "cannot be read: the pickle has the opcode 0x50 at byte 0",
            **dict.fromkeys(FILES[1:], "is refused: it holds _?io.open, not only tensors, arrays of numbers"),
        },
    ),
    "bytes": (_evil_bytes, dict.fromkeys(FILES[1:3], "is refused: it holds _?io.open, not only tensors")),
    "a class": (_evil_class, {".metadata": "is refused: the pickle gives a state to StorageMeta, which has no state"}),
    "outside": (_outside, {".metadata": r"is refused: it refers to '\.\./.*' \(relative_path of storage_data\)"}),
    "cut": (
        _cut,
        {
            ".metadata": "cannot be read: the pickle is cut short",
            "__0_0.distcp": r"cannot be read: storage_data\['.*'\] ends at byte \d+ of .*, which has \d+ bytes",
            "__1_0.distcp": r"cannot be read: storage_data\['.*'\] ends at byte \d+ of .*, which has \d+ bytes",
            "meta.pt": "cannot be read: it is no file of torch.save, or is cut short",
        },
    ),
    "flipped": (
        _flipped,
        {
            ".metadata": "cannot be read: the pickle has the opcode 0x00 at byte 0",
            **dict.fromkeys(FILES[1:3], "cannot be read: its entry 'archive/data/0' is damaged: Bad CRC-32"),
            "meta.pt": "cannot be read: it is no file of torch.save, or is cut short",
        },
    ),
}
CASES = [(change, file) for change, (_, reasons) in CHANGES.items() for file in reasons]


def changed_copies(folder: Path, kind: str) -> list[Path]:
    copies = []
    for change, file in CASES:
        copy = folder / kind / change / file.strip("._")
        shutil.copytree(folder / kind / "good", copy)
        CHANGES[change][0](copy / file, folder / "marker")
        copies.append(copy)
    return copies


# ---------------------------------------------------------------------- two ranks


def on_two_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    used = cases.fit(cases.Clicks(), cases.recsys("serial", {"people": "row_wise"}), max_epochs=1)
    used.save_checkpoint(folder / "tables" / "good")
    strategy: Any = used.strategy
    sharded = strategy.sharded_model
    tables = _errors(folder, "tables", lambda path: load_sharded_checkpoint(path, sharded, with_optimizers=True))
    module = llm_cases.Tiny()
    used = llm_cases.fit(module, llm_cases.llm(), llm_cases.row_batches(1))
    used.save_checkpoint(folder / "stages" / "good")
    stages = _errors(folder, "stages", lambda path: load_stage_checkpoint(path, module, used.optimizers))
    return {"tables": tables, "stages": stages, "flag": _flag(folder)}


def _errors(folder: Path, kind: str, load: Callable[[Path], Any]) -> dict[Path, str]:
    if dist.get_rank() == 0:
        changed_copies(folder, kind)
    dist.barrier()
    errors = {}
    for path in sorted((folder / kind).glob("*/*")):
        if path.parent.name != "good":
            with pytest.raises(SetupError) as caught:
                load(path)
            errors[path] = str(caught.value)
    load(folder / kind / "good")
    return errors


def _flag(folder: Path) -> dict[str, Any]:
    """What becomes of an object of a user's class, by default and with the flag."""
    path = folder / "custom"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        cases.fit(HoldingTables(), cases.recsys(), max_epochs=1).save_checkpoint(path)
    result: dict[str, Any] = {"warned": [str(one.message) for one in warned if "Custom" in str(one.message)]}
    for name in ("fit", "validate", "predict"):
        with pytest.raises(SetupError) as caught:
            getattr(cases.trainer(cases.recsys()), name)(HoldingTables(), cases.loader(), ckpt_path=path)
        result[name] = str(caught.value)
    tables, stages = HoldingTables(), HoldingStages()
    cases.trainer(cases.recsys()).fit(tables, cases.loader(), ckpt_path=path, weights_only=False)
    batches = llm_cases.row_batches(1)
    llm_cases.fit(HoldingStages(), llm_cases.llm(), batches).save_checkpoint(folder / "custom stages")
    used = llm_cases.trainer(llm_cases.llm())
    used.validate(stages, llm_cases.loader(batches), ckpt_path=folder / "custom stages", weights_only=False)
    result["with the flag"] = [type(module.found).__name__ for module in (tables, stages)]
    # It is one call's.
    with pytest.raises(SetupError):
        used.validate(stages, llm_cases.loader(batches), ckpt_path=folder / "custom stages")
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


def test_the_attack_works_where_nothing_is_in_its_way(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_runs_nothing_and_is_named_on_every_rank(
    kind: str, change: str, ranks: list[dict[str, Any]], folder: Path
) -> None:
    assert not (folder / "marker").exists()
    for file, reason in CHANGES[change][1].items():
        path = folder / kind / change / file.strip("._")
        for result in ranks:
            message = result[kind][path]
            assert re.search(reason, message), message
            assert f"{path.name}/{file}'" in message
            assert message.endswith("Use another checkpoint"), message


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_runs_nothing_either(kind: str, ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    for change, file in CASES:
        if change in ("cut", "flipped"):
            continue  # it may be in what is not exported
        with pytest.raises(SetupError, match=CHANGES[change][1][file]):
            export_checkpoint(folder / kind / change / file.strip("._"), tmp_path / "out")
    assert not (folder / "marker").exists()
    assert list(tmp_path.iterdir()) == []


def test_no_class_is_changed_by_reading(tmp_path: Path) -> None:
    (tmp_path / "meta.pt").touch()
    _evil_class(tmp_path / ".metadata", tmp_path)
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert StorageMeta.load_id == "changed", "the attack works where nothing is in its way"
    StorageMeta.load_id = None
    with pytest.raises(SetupError):
        read_metadata(tmp_path, ("model",), "somehow")
    assert StorageMeta.load_id is None


# ---------------------------------------------------------------------- what the user allows


def test_a_class_of_the_users_needs_the_flag(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        for name in ("fit", "validate", "predict"):
            message = result["flag"][name]
            assert (
                "custom/meta.pt' is refused: it holds tests.scenarios.checkpoints.test_hostile_checkpoints.Custom"
                in message
            )
            assert "Trainer.fit(..., weights_only=False)" in message
        assert result["flag"]["with the flag"] == ["Custom", "Custom"]


def test_it_is_said_when_the_checkpoint_is_written(ranks: list[dict[str, Any]]) -> None:
    first, second = (result["flag"]["warned"] for result in ranks)
    assert len(first) == 1
    assert "as in Trainer.fit(..., weights_only=False)" in first[0]
    assert second == []


def test_plain_types_and_arrays_need_no_flag(tmp_path: Path) -> None:
    kept = {
        "python": random.getstate(),
        "numpy": np.random.default_rng(0).bit_generator.state,
        "legacy": np.random.RandomState(0).get_state(),
        "torch": torch.get_rng_state(),
        "arrays": [np.arange(3, dtype=kind) for kind in ("int8", "uint32", "int64", "float16", "float32", "float64")],
        "more": (np.float32(0.1), np.bool_(True), np.array(["text"]), np.array([1 + 2j])),
    }
    torch.save(kept, tmp_path / "kept")
    assert unsafe_names((tmp_path / "kept").read_bytes()) == []
    found = load_object(tmp_path / "kept", None)
    assert found["python"] == kept["python"]
    np.testing.assert_equal({**found, "torch": 0}, {**kept, "torch": 0})
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "kept", weights_only=True)


def test_a_class_that_the_user_allowed_needs_no_flag(tmp_path: Path) -> None:
    torch.save(Custom(), tmp_path / "kept")
    with torch.serialization.safe_globals([Custom]):
        assert isinstance(load_object(tmp_path / "kept", None), Custom)
    with pytest.raises(SetupError, match="Custom"):
        load_object(tmp_path / "kept", True)


def test_classes_that_the_user_allowed_stay_as_they_were(tmp_path: Path) -> None:
    # Among them what numpy's arrays are made of, as torch's own messages advise.
    entries: list[Any] = [Custom, np.dtype, (np.ndarray, "numpy.ndarray"), type(np.dtype("S16"))]
    torch.save(np.arange(3), tmp_path / "good")
    dtype = Build(Put(0, Reduce(Global("numpy.dtype"), ("S16", False, True))), (3, "|", None, None, None, 16, 1, 0))
    (tmp_path / "bad").write_bytes(torch_file(assemble([dtype, Build(Get(0), (3, "|", None, None, None, 99, 1, 0))])))
    with torch.serialization.safe_globals(entries):
        before = set(torch.serialization.get_safe_globals())
        seen, done = [], threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.append(set(torch.serialization.get_safe_globals()) == before)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            for _ in range(20):
                assert load_object(tmp_path / "good", None).tolist() == [0, 1, 2]
                assert unsafe_names((tmp_path / "good").read_bytes()) == []
                with pytest.raises(SetupError, match="gives a state to"):
                    load_object(tmp_path / "bad", None)
        finally:
            done.set()
            thread.join()
        assert set(torch.serialization.get_safe_globals()) == before
        assert seen
        assert all(seen)


def test_arrays_of_all_types_and_orders_are_read_to_the_bit(tmp_path: Path) -> None:
    kinds = ["?", "i1", "<i2", ">i4", "u8", "f2", ">f8", "c8", "c16", "S3", "<U4", ">U4"]
    arrays = [np.array([0, 1, 1, 0, 1, 0]).astype(kind).reshape(2, 3) for kind in kinds]
    arrays += (
        [np.asfortranarray(one) for one in arrays] + [one[:, :0] for one in arrays] + [one[:, ::2] for one in arrays]
    )
    kept: dict[str, Any] = {
        "arrays": arrays,
        "types": [np.dtype(kind) for kind in kinds],
        "one": [one.flat[1] for one in arrays[:12]],
    }
    torch.save(kept, tmp_path / "kept")
    found = load_object(tmp_path / "kept", None)
    for one, other in zip(kept["arrays"], found["arrays"], strict=True):
        assert (one.dtype, one.shape, one.tobytes("A")) == (other.dtype, other.shape, other.tobytes("A"))
        assert other.flags.writeable
    assert found["types"] == kept["types"]
    assert [(type(one), one) for one in found["one"]] == [(type(one), one) for one in kept["one"]]


def test_tensors_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    parameter: Any = torch.nn.Parameter(torch.ones(2))
    parameter.note = "kept"
    kept = {
        "views": [base, base[1:, ::2], base.t(), base[0].expand(3, 6), base[:0]],
        "types": [torch.ones(3).to(kind) for kind in (torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.bool)],
        "complex": torch.tensor([1 + 2j]).conj(),
        "parameter": parameter,
        "needs": torch.ones(2, requires_grad=True),
        "plain": [
            {1, 2},
            2 + 3j,
            b"\xff\x00",
            bytearray(b"x"),
            Counter(a=2),
            torch.Size([2]),
            torch.device("cpu"),
            2**100,
        ],
    }
    torch.save(kept, tmp_path / "kept")
    found, needed = load_object(tmp_path / "kept", None), torch.load(tmp_path / "kept", weights_only=True)
    for key in ("views", "types"):
        for one, other in zip(found[key], needed[key], strict=True):
            assert (one.dtype, one.stride(), one.storage_offset()) == (
                other.dtype,
                other.stride(),
                other.storage_offset(),
            )
            assert torch.equal(one.float(), other.float())
    assert len({one.untyped_storage().data_ptr() for one in found["views"]}) == 1
    assert torch.equal(found["complex"], needed["complex"])
    assert type(found["parameter"]) is torch.nn.Parameter
    assert vars(found["parameter"])["note"] == "kept"
    assert found["needs"].requires_grad
    assert found["plain"] == kept["plain"]
