"""The check after an installation says in one sentence whether the packages fit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_pipe import check_installation
from lightning_pipe.engine.common.errors import SetupError


def test_packages_that_fit_are_named_with_their_versions() -> None:
    command = [sys.executable, "-m", "lightning_pipe.check_installation"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("These versions fit together and can be imported: torch 2.")
    assert len(run.stdout.splitlines()) == 1


def test_a_problem_is_printed_and_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise SetupError("torch and torchrec do not fit")

    monkeypatch.setattr(check_installation, "import_torchrec", fail)
    assert check_installation.main() == 1
    assert capsys.readouterr().err == "torch and torchrec do not fit\n"
