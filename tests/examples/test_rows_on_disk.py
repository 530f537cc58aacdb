"""The demo trains the same weights under each plan, and says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_the_demo_prints_three_step_times_and_that_the_weights_are_equal_and_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    command = [sys.executable, "-m", "examples.rows_on_disk.demo", "--rounds=1", "--steps=4", f"--picture={picture}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert run.returncode == 0, run.stderr
    assert [re.search(rf"{plan} +[\d.]+ ms", run.stdout) is not None for plan in ("serial", "base", "prefetch")] == [
        True
    ] * 3
    assert "all weights and rows are equal to the bit" in run.stdout
    assert picture.stat().st_size > 0
    assert not list(ROOT.glob(".demo-*"))
