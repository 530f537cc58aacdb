"""What the README shows runs as it is written, fits on two screens, and leads where it says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pipe.environment import TORCHREC
from lightning_pipe.strategies.registry import STRATEGIES
from tests.patience import HANG
from tests.running_in import running_in

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")


def the_one_with(part: str) -> str:
    found = [code for code in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) if part in code]
    assert len(found) == 1, f"the README has {len(found)} snippets with {part!r}"
    return found[0]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with running_in(tmp_path):
        yield tmp_path


def test_every_snippet_of_code_is_run_by_a_test_here() -> None:
    assert re.findall(r"^```(\w+)$", README, re.MULTILINE) == ["python", "python"]


def test_the_recommender_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recommender.py").write_text(the_one_with("class Recommender"))
    runpy.run_path("recommender.py", run_name="__main__")
    assert "100/100" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_language_model_trains_in_two_stages(folder: Path) -> None:
    Path("language.py").write_text(the_one_with("HFCausalLM"))
    command = [sys.executable, "language.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert result.returncode == 0, result.stderr
    assert "4/4" in result.stdout


def test_it_fits_on_two_screens_with_one_picture() -> None:
    text = re.sub(r"^```\w+\n.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) <= 90
    assert len(README.splitlines()) <= 140
    assert len(re.findall(r"!\[", README)) == 1


def test_the_strategies_it_names_are_there() -> None:
    named = set(re.findall(r"`(\w*pipeline)`", README)) | set(re.findall(r'strategy="(\w+)"', README))
    assert named
    assert named <= {entry.name for entry in STRATEGIES}


def test_the_files_and_make_targets_that_it_names_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake ([\w-]+)\b", README)
    assert "train-llm" in targets
    for target in {target for target in targets if target != "s"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    named = re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("text", [README, START], ids=["README", "start"])
def test_it_installs_the_newest_tested_stack(text: str) -> None:
    assert set(re.findall(r"-c (\S+)", text)) == {f"requirements/constraints/torch-{next(iter(TORCHREC))}.txt"}
