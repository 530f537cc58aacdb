"""The pinned lists: every package has one version, and the hashes of its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_pipe.environment import TORCHREC

ROOT = Path(__file__).parents[1]
LISTS = sorted(ROOT.glob("requirements/*.txt"))
CONSTRAINTS = sorted(ROOT.glob("requirements/constraints/*.txt"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_every_package_has_one_version_and_hashes(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace(" \\\n   ", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    hashes = "" if path.name == "torch-cpu.txt" else r"( --hash=sha256:[0-9a-f]{64})+"
    assert lines
    for line in lines:
        assert re.fullmatch(rf"[\w.-]+==[\w.+]+{hashes}", line), line
    names = [line.split("==")[0].lower() for line in lines]
    assert len(names) == len(set(names))


def test_both_builds_of_torch_are_of_one_version() -> None:
    default, cpu = ((ROOT / "requirements" / name).read_text() for name in ("torch.txt", "torch-cpu.txt"))
    found = re.search(r"^torch==([\d.]+)\+cpu$", cpu, re.MULTILINE)
    assert found
    assert f"\ntorch=={found[1]} \\\n" in default


def versions(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\d.]+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def test_each_tested_torch_has_constraints_that_fit_it() -> None:
    stacks = {}
    for path in CONSTRAINTS:
        stack = {name: version.rstrip(".") for name, version in versions(path).items()}
        assert set(stack) == {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}
        assert path.name == f"torch-{stack['torch']}.txt"
        assert stack["torchrec"] == stack["fbgemm-gpu"] == stack["fbgemm-gpu-cpu"]
        stacks[stack["torch"]] = stack["torchrec"]
    assert stacks == TORCHREC


def test_no_package_is_in_two_of_the_lists_that_are_installed_together() -> None:
    names = [
        name.lower() for path in LISTS if path.name in ("train.txt", "test.txt", "torch.txt") for name in versions(path)
    ]
    assert len(names) == len(set(names))


def test_setup_installs_nothing_else_without_hashes() -> None:
    script = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    free = [
        line
        for line in script.splitlines()
        if "pip install" in line and "--require-hashes" not in line and line[0] != "#"
    ]
    assert len(free) == 2
    assert "requirements/torch-cpu.txt" in free[0]
    assert free[1].endswith("--no-deps --no-build-isolation --editable .")
