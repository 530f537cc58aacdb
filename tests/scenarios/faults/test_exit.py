"""A process ends as its program says, whatever the threads of its process groups do at that moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patience import HANG
from tests.scenarios.faults.launched import Launched
from tests.tiers import sampled_rows

PROGRAM = "tests.scenarios.faults.exiting_program"


@pytest.mark.parametrize(
    ("use", "end"), sampled_rows([("pipeline", "error"), ("worker", "well")], lambda case: case[0] == "worker")
)
def test_a_collective_that_ends_while_the_interpreter_exits_does_not_abort_it(
    use: str, end: str, tmp_path: Path
) -> None:
    options = ["--nproc-per-node=2", "--standalone"]
    launched = Launched(options, PROGRAM, use, end, str(tmp_path))
    try:
        code, output = launched.wait(HANG)
    finally:
        launched.end()
    assert "terminate called" not in output
    assert "SIGABRT" not in output
    assert (code == 0) == (end == "well"), output
    assert end == "well" or "on purpose" in output
