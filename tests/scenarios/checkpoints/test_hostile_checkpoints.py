"""No file of a checkpoint runs code when it is read; every rank names a damaged or foreign one in one error."""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, StorageMeta

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.checkpoints.folder_reading import read_metadata
from lightning_pipe.checkpoints.safe_reading import SafeFileSystemReader, with_checksum
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies import PipelineStrategy
from lightning_pipe.strategies.language_model.stage_checkpoint import load_stage_checkpoint
from lightning_pipe.strategies.recommender.sharded_checkpoint import load_sharded_checkpoint
from tests.distributed import run_ranks
from tests.loops.models import Net, trainer
from tests.strategies import cases, llm_cases

KINDS = ("tables", "stages")
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt")
SINGLE = "whole.ckpt"


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


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _entries(folder: Path, change: Callable[[Any, Any], Any]) -> None:
    """Change the index and the place of each entry in ``.metadata``; None leaves both."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = {}
    for index, info in metadata.storage_data.items():
        new_index, new_info = change(index, info) or (index, info)
        changed[new_index] = new_info
        if new_index != index:
            metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    metadata.storage_data = changed
    path.write_bytes(with_checksum(pickle.dumps(metadata)))


def _evil_pickle(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Evil(marker)))


def _evil_contents(path: Path, marker: Path) -> None:
    """As ``torch.save`` writes it; of a rank's file each tensor."""
    if path.suffix == ".ckpt":
        path.write_bytes(_saved(torch.load(path, weights_only=True) | {"evil": Evil(marker)}))
        return
    if path.suffix != ".distcp":
        path.write_bytes(_saved(Evil(marker)))
        return
    contents, places = b"", {}
    for index, info in _infos(path):
        value = _saved((Evil(marker), torch.zeros(info.length)))
        places[index] = len(contents), len(value)
        contents += value
    path.write_bytes(contents)

    def moved(index: Any, info: Any) -> Any:
        if index in places:
            info.offset, info.length = places[index]

    _entries(path.parent, moved)


def _evil_bytes(path: Path, marker: Path) -> None:
    """The same, as values that are no tensors, which PyTorch's planner unpickles without restrictions."""
    _evil_contents(path, marker)

    def no_tensors(index: Any, info: Any) -> Any:
        return (MetadataIndex(index.fqn), info) if info.relative_path == path.name else None

    _entries(path.parent, no_tensors)


def _cut(path: Path, marker: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _empty(path: Path, marker: Path) -> None:
    path.write_bytes(b"")


def _flipped(path: Path, marker: Path) -> None:
    """One bit: of a number of a tensor, or of a name."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".distcp":
        place = content.index(b"/data/0", _infos(path)[0][1].offset) + 64
        place += -place % 64
    else:
        place = content.index(b"relative_path" if path.name == ".metadata" else b"pytorch-lightning_version") + 1
    content[place] ^= 1
    path.write_bytes(content)


def _infos(path: Path) -> list[Any]:
    infos = pickle.loads((path.parent / ".metadata").read_bytes()).storage_data.items()
    return sorted(((i, info) for i, info in infos if info.relative_path == path.name), key=lambda pair: pair[1].offset)


def _foreign(path: Path, marker: Path) -> None:
    path.write_bytes(_saved({"weight": torch.ones(2)} if path.suffix == ".ckpt" else torch.ones(2)))


CHANGES: dict[str, tuple[Callable[[Path, Path], None], tuple[str, ...]]] = {
    "a pickle": (_evil_pickle, (*FILES, SINGLE)),
    "contents": (_evil_contents, (*FILES, SINGLE)),
    "bytes": (_evil_bytes, FILES[1:3]),
    "cut": (_cut, (*FILES, SINGLE)),
    "empty": (_empty, (*FILES, SINGLE)),
    "flipped": (_flipped, (*FILES, SINGLE)),
    "foreign": (_foreign, (*FILES, SINGLE)),
}
CASES = [(change, file) for change, (_, files) in CHANGES.items() for file in files if file != SINGLE]


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
    return {"tables": tables, "stages": stages, "single": _single(folder)}


def _message(load: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(SetupError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


def _errors(folder: Path, kind: str, load: Callable[[Path], Any]) -> dict[tuple[str, str], str]:
    if dist.get_rank() == 0:
        for change, file in CASES:
            copy = folder / kind / change / file
            shutil.copytree(folder / kind / "good", copy)
            CHANGES[change][0](copy / file, folder / "marker")
    dist.barrier()
    errors = {(change, file): _message(load, folder / kind / change / file) for change, file in CASES}
    load(folder / kind / "good")
    return errors


def _single(folder: Path) -> dict[str, str]:
    used = trainer(strategy=PipelineStrategy(), devices=2, max_epochs=1)
    used.fit(Net())
    used.save_checkpoint(folder / SINGLE)
    if dist.get_rank() == 0:
        for change, (apply, files) in CHANGES.items():
            if SINGLE in files:
                (folder / "single" / change).mkdir(parents=True)
                shutil.copy(folder / SINGLE, folder / "single" / change)
                apply(folder / "single" / change / SINGLE, folder / "marker")
    dist.barrier()
    paths = sorted((folder / "single").glob("*/*"))
    return {str(path): _message(used.strategy.load_checkpoint, path) for path in paths}


def with_a_class_of_the_users(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """What becomes of an object of a user's class, by default and with the flag."""
    path = folder / "custom"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        cases.fit(HoldingTables(), cases.recsys(), max_epochs=1).save_checkpoint(path)
    result: dict[str, Any] = {"warned": [str(one.message) for one in warned if "Custom" in str(one.message)]}
    for name in ("fit", "validate"):
        call = getattr(cases.trainer(cases.recsys()), name)
        result[name] = _message(call, HoldingTables(), cases.loader(), ckpt_path=path)
    tables, stages = HoldingTables(), HoldingStages()
    cases.trainer(cases.recsys()).fit(tables, cases.loader(), ckpt_path=path, weights_only=False)
    batches = llm_cases.row_batches(1)
    llm_cases.fit(HoldingStages(), llm_cases.llm(), batches).save_checkpoint(folder / "custom stages")
    used = llm_cases.trainer(llm_cases.llm())
    used.validate(stages, llm_cases.loader(batches), ckpt_path=folder / "custom stages", weights_only=False)
    result["with the flag"] = [type(module.found).__name__ for module in (tables, stages)]
    # It is one call's.
    _message(used.validate, stages, llm_cases.loader(batches), ckpt_path=folder / "custom stages")
    with torch.serialization.safe_globals([Custom]):
        cases.trainer(cases.recsys()).fit(tables, cases.loader(), ckpt_path=path)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


@pytest.fixture(scope="module")
def flag(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(with_a_class_of_the_users, 2, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_of_a_folder_runs_nothing_and_is_named_on_every_rank(
    kind: str, ranks: list[dict[str, Any]], folder: Path
) -> None:
    assert not (folder / "marker").exists()
    for result in ranks:
        for (change, file), message in result[kind].items():
            assert f"{folder / kind / change / file / file}'" in message, message
            assert message.endswith("se another checkpoint"), message
            is_class = change in ("contents", "bytes") and file != ".metadata"
            assert ("holds more than tensors and plain types" in message) == is_class, message


def test_a_changed_single_file_runs_nothing_and_is_named_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert len(result["single"]) == sum(SINGLE in files for _, files in CHANGES.values())
        for path, message in result["single"].items():
            assert f"{path}'" in message, message
            assert message.endswith("se another checkpoint"), message


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_runs_nothing_either(kind: str, ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    for change, file in CASES:
        if change in ("a pickle", "contents", "bytes"):
            with pytest.raises(SetupError, match=file):
                export_checkpoint(folder / kind / change / file, tmp_path / "out")
    assert not (folder / "marker").exists()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- .metadata


def test_no_changed_byte_of_metadata_passes(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    dcp.save({"state_dict": {"a": torch.arange(12.0)}}, checkpoint_id=tmp_path / "good", no_dist=True)
    path = tmp_path / "good" / ".metadata"
    content = with_checksum(path.read_bytes())
    path.write_bytes(content)
    assert SafeFileSystemReader(path.parent).read_metadata().planner_data == {"state_dict.a": ("state_dict", "a")}
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(SetupError, match=r"good/\.metadata' cannot be read"):
            SafeFileSystemReader(path.parent).read_metadata()


def test_no_class_is_changed_by_reading(tmp_path: Path) -> None:
    """A pickle that calls nothing, but would change a class for whoever uses it next."""
    (tmp_path / "meta.pt").touch()
    setting = pickle.dumps((None, {"load_id": "changed"}))[:-1]
    name = f"c{StorageMeta.__module__}\n{StorageMeta.__name__}\n".encode()
    (tmp_path / ".metadata").write_bytes(setting[:2] + name + setting[2:] + b"b.")
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert StorageMeta.load_id == "changed", "the attack works where nothing is in its way"
    StorageMeta.load_id = None
    with pytest.raises(SetupError):
        read_metadata(tmp_path, ("model",), "somehow")
    assert StorageMeta.load_id is None


# ---------------------------------------------------------------------- what the user allows


def test_a_class_of_the_users_needs_the_flag_or_its_permission(flag: list[dict[str, Any]]) -> None:
    for result in flag:
        for name in ("fit", "validate"):
            message = result[name]
            assert "custom/meta.pt' holds more than tensors and plain types" in message
            assert "GLOBAL tests.scenarios.checkpoints.test_hostile_checkpoints.Custom" in message
            assert "Trainer.fit(..., weights_only=False)" in message
        assert result["with the flag"] == ["Custom", "Custom"]


def test_a_save_warns_of_such_a_class(flag: list[dict[str, Any]]) -> None:
    first, second = (result["warned"] for result in flag)
    assert len(first) == 1
    assert "as in Trainer.fit(..., weights_only=False)" in first[0]
    assert second == []
