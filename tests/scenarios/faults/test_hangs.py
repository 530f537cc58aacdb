"""A run that hangs: each rank's dump says where it is, and ``lightning-pipe diagnose`` which rank waits for which."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.cli.main import main
from lightning_pipe.engine.ranks.flight_dump import places
from tests.distributed import run_ranks
from tests.loops.models import Net
from tests.patience import HANG
from tests.scenarios.faults.launched import Launched
from tests.scenarios.faults.training import KINDS, fit, module

# Of collectives, in seconds. Ranks are at the same place within it, also on a busy machine.
TIMEOUT = 30


def diagnosed(folder: Path) -> str:
    """What the command prints, on one line."""
    command = [sys.executable, "-m", "lightning_pipe.cli", "diagnose", str(folder)]
    environment = {**os.environ, "COLUMNS": "200"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    return re.sub(r"\s+", " ", ended.stdout)


def dump_of(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"flight_rank_{rank}.json").read_text())


# ---------------------------------------------------------------------- asked for while it hangs


class Asks(Net):
    """Rank 1 does not go on from the third batch until a dump of rank 0 shows that it waits for the gradients."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            self.ask_until_rank_0_waits()
        return super().training_step(batch, batch_idx)

    def ask_until_rank_0_waits(self) -> None:
        deadline, pause = time.monotonic() + HANG, threading.Event()
        request = self.folder / "flight_request"
        while time.monotonic() < deadline:
            request.touch()
            asked = request.stat().st_mtime
            paths = [self.folder / f"flight_rank_{rank}.json" for rank in range(2)]
            while not all(path.exists() and path.stat().st_mtime >= asked for path in paths):
                assert time.monotonic() < deadline
                pause.wait(0.05)
            if len(dump_of(self.folder, 0)["collectives"]) > len(dump_of(self.folder, 1)["collectives"]):
                return


def asked(rank: int, world_size: int, folder: Path) -> int:
    return fit("pipeline", world_size, Asks(folder), default_root_dir=folder).global_step


@pytest.fixture(scope="module")
def asked_for(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    assert run_ranks(asked, 2, folder) == [6, 6]
    return folder


def test_a_run_that_is_asked_for_dumps_goes_on_behind_them(asked_for: Path) -> None:
    assert sorted(path.name for path in asked_for.iterdir()) == [
        "flight_rank_0.json",
        "flight_rank_1.json",
        "flight_request",
    ]


def test_the_dumps_say_batch_task_and_code_of_each_rank(asked_for: Path) -> None:
    for rank in range(2):
        found = dump_of(asked_for, rank)
        assert (found["rank"], found["batch"], found["error"]) == (rank, "0, 2", None)
        assert "in TrainBatch of iteration 2" in found["tasks"]


def test_diagnose_says_who_waits_for_whom_and_where_that_one_is(
    asked_for: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dump_of(asked_for, 0)["collectives"]:
        pytest.skip("this PyTorch does not record Gloo's collectives")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["diagnose", str(asked_for)]) == 0
    found = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert re.search(r"In group 'default_pg' \(ranks 0, 1\), rank 0 waits in all_reduce \d+ for rank 1", found), found
    assert re.search(r"Rank 1 is in TrainBatch of iteration 2 at test_hangs.py:\d+ ask_until_rank_0_waits", found), (
        found
    )


# ---------------------------------------------------------------------- noticed by a timeout

CASES = {
    "other": r"rank 0 is in all_reduce (\d+) of sizes \[\[5\]\]; rank 1 is in broadcast \1 of sizes \[\[5\]\]",
    "skipped": r"rank 0 is in all_reduce (\d+) of sizes \[\[5\]\]; rank 1 is in (barrier|all_reduce) \1 of sizes",
    "stuck": r"rank 0 waits in all_reduce \d+ for rank 1\. Rank 1 is in TrainBatch of iteration 2 at"
    r" hanging_program.py:\d+ stuck_in_user_code",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_a_timeout_leaves_dumps_from_which_diagnose_names_the_mismatch(case: str, tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node=2"]
    arguments = [case, str(tmp_path), str(TIMEOUT)]
    code, output = Launched(options, "tests.scenarios.faults.hanging_program", *arguments).wait(HANG)
    assert code == 1, output
    assert f"This rank's state is in {tmp_path}/flight_rank_0.json. Run: lightning-pipe diagnose {tmp_path}" in output
    assert re.search("Timed out waiting|Connection closed", output), output
    for rank in range(2):
        assert "in TrainBatch of iteration 2" in dump_of(tmp_path, rank)["tasks"]
    found = diagnosed(tmp_path)
    assert re.search(CASES[case], found), found


# ---------------------------------------------------------------------- where the stages are


def noted(rank: int, world_size: int, kind: str, folder: Path) -> list[str]:
    """The last task of each thread group, behind a fit."""
    fit(kind, world_size, module(kind), default_root_dir=folder)
    return [place[0] for place in places.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_under_each_strategy_tasks_and_actions_are_noted(kind: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(noted, 2, kind, tmp_path)):
        assert found[0] in KINDS[kind].tasks
        if kind == "llm":
            assert f"backward of micro-batch 3 in stage {rank}" in found
    assert list(tmp_path.glob("flight_*")) == []
