"""A second Trainer of a process has the ranks of the process group that is there, or is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG

SCRIPT = """
import sys

import lightning.pytorch as pl

import lightning_pipe
from tests.loops.models import Net

if __name__ == "__main__":
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Net()
    for devices, run in zip(map(int, sys.argv[1:]), ("fit", "validate")):
        trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy="pipeline", max_epochs=1, **quiet)
        getattr(trainer, run)(module)
    print("validated", flush=True)
"""


def ran(folder: Path, *devices: int) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(script), *map(str, devices)],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.mark.exhaustive
def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    ended = ran(tmp_path, 2, 1)
    assert ended.returncode == 1, ended.stderr
    assert "in a process group of 2 rank(s)" in ended.stderr
    assert "this Trainer has 1 (devices times num_nodes)" in ended.stderr
    assert "validated" not in ended.stdout
