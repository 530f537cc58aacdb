"""Checkpoints on a real S3 server: trained on from as from a disk, whole or absent whenever a process is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.checkpoints.folder_reading import read_extra_state
from lightning_pipe.checkpoints.folder_writing import write_checkpoint
from lightning_pipe.checkpoints.remote_folder import follow_checkpoint_marker, parse_local_or_remote_path
from lightning_pipe.cli.main import main
from lightning_pipe.engine import SetupError
from lightning_pipe.recsys import read_rows
from tests.distributed import run_ranks
from tests.scenarios.checkpoints.s3_server import SECRET, URL, objects, s3_server
from tests.scenarios.recommenders import test_dynamic_embeddings as dynamic
from tests.strategies.cases import Clicks, difference, fit, loader, recsys, state_of

pytest.importorskip("moto", reason="requires the packages of the extra s3 and moto")
pytest.importorskip("s3fs", reason="requires the packages of the extra s3")
pytestmark = pytest.mark.exhaustive

OTHER = "s3://checkpoints/other"


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with mock.patch.dict(os.environ), s3_server():
        yield


@pytest.fixture
def environment(server: None) -> Iterator[dict[str, str]]:
    """For ranks, which do not inherit this process's environment; no objects are left for the next test."""
    yield {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for url in (URL, OTHER):
        place: Any = parse_local_or_remote_path(url)
        place.remove()


def keeping(where: Any, **options: Any) -> dict[str, Any]:
    callback = ModelCheckpoint(where, filename="{step}", every_n_train_steps=3, **options)
    return {"enable_checkpointing": True, "callbacks": [callback]}


def trained(
    where: Any, path: str | None = None, epochs: int = 2, background: bool = False
) -> tuple[list[float], dict[str, Any]]:
    """Losses of this rank and everything that training left. A checkpoint every three steps; the last stays."""
    module = Clicks()
    kept = {"save_top_k": 1, "monitor": "step", "mode": "max", "save_last": True}
    options = {"max_epochs": epochs, **keeping(where, **kept)}
    used = fit(module, recsys(async_checkpoints=background), loader(24, in_order=True), ckpt_path=path, **options)
    return module.losses, state_of(used)


# ---------------------------------------------------------------------- the same as on a disk


def on_ranks(rank: int, world_size: int, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    os.environ.update(environment)
    trained(URL, "last", epochs=1)  # there is none yet
    return {
        "whole": trained(folder / "disk"),
        "by its URL": trained(folder / "none", f"{URL}/last.ckpt"),
        "the last one": trained(URL, "last"),
        "in the background": trained(OTHER, background=True),
    }


def resumed_from_both(rank: int, world_size: int, environment: dict[str, str], folder: Path) -> list[Any]:
    os.environ.update(environment)
    return [
        trained(folder / f"none {name}", path, epochs=3)
        for name, path in (("disk", str(folder / "disk" / "last.ckpt")), ("url", f"{URL}/last.ckpt"))
    ]


def test_training_continues_from_s3_as_from_a_disk_also_on_other_ranks(
    environment: dict[str, str], tmp_path: Path
) -> None:
    for found in run_ranks(on_ranks, 2, environment, tmp_path):
        losses, state = found.pop("whole")
        assert len(losses) == 6
        assert found["by its URL"][0] == found["the last one"][0] == losses[3:]
        for name, (_, other) in found.items():
            assert not difference(other, state), name
    for url in (URL, OTHER):
        names = {name for name in objects(url) if "/" not in name}
        assert names == {"step=6.ckpt", "last.ckpt"}
        assert len({name.partition("/")[0] for name in objects(url) if "/" in name}) == 2  # no folder of a removed one
    ((from_disk, from_url),) = run_ranks(resumed_from_both, 1, environment, tmp_path)
    assert from_disk[0] == from_url[0]
    assert not difference(from_disk[1], from_url[1])


def with_dynamic_tables(rank: int, world_size: int, environment: dict[str, str], folder: Path) -> dict[str, Any]:
    os.environ.update(environment)
    options: dict[str, Any] = {"enable_checkpointing": True, "use_distributed_sampler": False}

    def data() -> Any:
        return loader(48, in_order=True)

    whole = dynamic.run(folder / "one", "prefetch", train=data(), callbacks=[dynamic.Keeping(URL, 4)], **options)  # type: ignore[arg-type]
    # Another node has none of the first one's rows.
    elsewhere = dynamic.run(folder / "two", "prefetch", train=data(), ckpt_path=f"{URL}/step=4.ckpt", **options)
    return {"whole": whole, "elsewhere": elsewhere}


def test_rows_of_dynamic_tables_come_back_on_another_node(environment: dict[str, str], tmp_path: Path) -> None:
    for found in run_ranks(with_dynamic_tables, 2, environment, tmp_path):
        (losses, state), (resumed, other) = found["whole"], found["elsewhere"]
        assert resumed == losses[4:]
        assert dynamic.same(other, state)
    rows = list(read_rows(f"{URL}/step=4.ckpt", "people"))
    assert sum(len(one.ids) for one in rows) > 10


def saved(rank: int, world_size: int, environment: dict[str, str], where: str) -> None:
    os.environ.update(environment)
    trained(where, epochs=1)


def test_a_checkpoint_is_exported_from_its_url(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(saved, 2, environment, URL)
    run_ranks(saved, 2, environment, str(tmp_path / "disk"))
    export_checkpoint(tmp_path / "disk" / "last.ckpt", tmp_path / "from disk")
    assert main(["checkpoint", "export", f"{URL}/last.ckpt", str(tmp_path / "from url")]) in (None, 0)
    assert URL in capsys.readouterr().out
    one, other = (torch.load(tmp_path / f"from {name}", weights_only=True) for name in ("disk", "url"))
    assert not difference(one["state_dict"], other["state_dict"])


# ---------------------------------------------------------------------- faults


def save_and_die(rank: int, world_size: int, environment: dict[str, str], at: int) -> None:
    """Replace the last checkpoint by one of a later step, and be killed before the request number *at*."""
    import s3fs

    os.environ.update(environment)
    send, count = s3fs.S3FileSystem._call_s3, 0
    saving = False

    async def counted(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if saving and not method.startswith(("list", "head", "get")):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return await send(self, method, *args, **kwargs)

    module = Clicks()
    used = fit(module, recsys(), loader(24, in_order=True), max_epochs=2, ckpt_path=f"{URL}/last.ckpt")
    saving = True
    with mock.patch.object(s3fs.S3FileSystem, "_call_s3", counted):
        used.save_checkpoint(f"{URL}/last.ckpt")
    Path(environment["DONE"]).touch()


def test_killed_at_any_request_of_a_save_the_url_leads_to_the_old_or_the_new_checkpoint(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done, steps = tmp_path / "done", []
    for at in range(1, 40):
        place: Any = parse_local_or_remote_path(URL)
        place.remove()
        run_ranks(saved, 1, environment, URL)
        with suppress(AssertionError):  # of the killed rank
            run_ranks(save_and_die, 1, {**environment, "DONE": str(done)}, at)
        found = parse_local_or_remote_path(f"{URL}/last.ckpt")
        steps.append(read_extra_state(follow_checkpoint_marker(found), None)["global_step"])
        run_ranks(resumed_and_saved, 1, environment)
        left = {name.partition("/")[0] for name in objects() if name.startswith(".last.ckpt")}
        assert len(left) == 1, f"killed at {at}"
        if done.exists():
            break
    else:
        pytest.fail("a save has no 40 requests")
    # The marker is the last thing that is written; removals of the old folder follow.
    assert steps == sorted(steps)
    assert {steps[0], steps[-1]} == {6, 12}


def resumed_and_saved(rank: int, world_size: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    used = fit(Clicks(), recsys(), loader(24, in_order=True), max_epochs=3, ckpt_path=f"{URL}/last.ckpt")
    used.save_checkpoint(f"{URL}/last.ckpt")


class RemovesFiles:
    """Another job that removes the files of a checkpoint while it is written."""

    def commit(self, group: Any, *, to_write: bool) -> None:
        """Nothing to commit."""

    def write_files(self, folder: Path) -> None:
        place: Any = parse_local_or_remote_path(URL)
        (written,) = place.folders(re.compile(r"\.raced\.ckpt\..*"))
        (written / f"__{dist.get_rank()}_0.distcp").remove()


def refused(rank: int, world_size: int, environment: dict[str, str]) -> list[str]:
    os.environ.update(environment)
    used, race = fit(Clicks(), recsys(), max_epochs=1), cast(Any, RemovesFiles())

    def said(work: Any) -> str:
        with pytest.raises(SetupError) as caught:
            work()
        return str(caught.value)

    return [
        said(lambda: used.save_checkpoint("s3://key:hidden@checkpoints/last.ckpt")),
        said(lambda: fit(Clicks(), recsys(), ckpt_path=f"{URL}/none.ckpt")),
        said(lambda: used.save_checkpoint(URL, storage_options={"secret": "hidden"})),
        said(lambda: write_checkpoint(f"{URL}/raced.ckpt", {"model": {str(rank): torch.ones(2)}}, {}, race)),
    ]


def test_a_url_that_cannot_be_written_or_read_is_an_error_on_every_rank_without_credentials(
    environment: dict[str, str],
) -> None:
    for found in run_ranks(refused, 2, environment):
        password, absent, options, raced = found
        assert "contains a password" in password
        assert f"'{URL}/none.ckpt' is not there" in absent
        assert "storage_options were given" in options
        assert "another job has removed '__0_0.distcp'" in raced
        assert not parse_local_or_remote_path(f"{URL}/raced.ckpt").exists()
        assert not any(SECRET in one or "hidden" in one for one in found)
