"""The pinned lists: every package has one version, and the hashes of its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTS = sorted(ROOT.glob("requirements/*.txt"))


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
