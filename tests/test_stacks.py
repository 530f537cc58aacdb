"""The files about versions follow from one table, and its bounds are those of the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.environment import Installed, find_problem, stacks
from scripts.stacks import ROOT, main, table_of_results, written

TABLE = tomllib.loads((ROOT / "lightning_pipe/stacks.toml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_files_are_those_that_the_table_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_a_file_that_differs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(iter(written()))
    monkeypatch.setattr("scripts.stacks.written", lambda: {path: "other"})
    assert main(["--check"]) == 1
    assert f"{path.relative_to(ROOT)} does not follow from stacks.toml" in capsys.readouterr().out


def test_the_pinned_lists_are_the_default_stack() -> None:
    tested = stacks().of_torch[stacks().default].tested
    for name, file in (("torch", "torch"), ("torchrec", "torchrec-cpu"), ("torchrec", "torchrec-gpu")):
        assert f"{name}=={tested[name]} " in (ROOT / f"requirements/{file}.txt").read_text(encoding="utf-8")
    for name, file in (("fbgemm-gpu-cpu", "torchrec-cpu"), ("fbgemm-gpu", "torchrec-gpu")):
        assert f"{name}=={tested['fbgemm']} " in (ROOT / f"requirements/{file}.txt").read_text(encoding="utf-8")


def test_each_stack_with_tables_is_one_that_the_environment_accepts() -> None:
    for stack in stacks().of_torch.values():
        torch, torchrec, fbgemm = (stack.tested.get(name) for name in ("torch", "torchrec", "fbgemm"))
        problem = find_problem(Installed(torch=torch, torchrec=torchrec, fbgemm_gpu=None, fbgemm_gpu_cpu=fbgemm))
        assert (problem is None) == (stack.torchrec is not None)


def bounds(requirements: list[str], name: str) -> str:
    (found,) = [re.sub(rf"^{name}(\[.*\])?", "", one) for one in requirements if re.match(rf"{name}[<>=\[]", one)]
    return found


def test_the_packages_bounds_are_the_versions_of_the_table() -> None:
    minors = [tuple(map(int, torch.split("."))) for torch in stacks().of_torch]
    newest, oldest = f"2.{max(minors)[1] + 1}", f"2.{min(minors)[1]}"
    extras: dict[str, Any] = PROJECT["optional-dependencies"]
    assert bounds(PROJECT["dependencies"], "torch") == f">={oldest},<{newest}"
    assert bounds(extras["hf"], "torch") == f">={stacks().language_models},<{newest}"
    assert bounds(extras["hf"], "transformers") == TABLE["transformers"]
    assert bounds(PROJECT["dependencies"], "lightning") == TABLE["lightning"]
    with_tables = [tuple(map(int, torch.split("."))) for torch in stacks().pairs]
    assert bounds(extras["recsys"], "torch") == f">={oldest},<2.{max(with_tables)[1] + 1}"


def test_the_pythons_are_those_of_the_classifiers() -> None:
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert named == list(stacks().python)


def test_results_are_listed_newest_first() -> None:
    row = {"passed": 7000, "failed": 0, "skipped": 3, "date": "2026-11-26"}
    table = table_of_results([{"torch": "2.13", "python": "3.11", **row}, {"torch": "2.14", "python": "3.12", **row}])
    assert table.splitlines()[2:] == [
        "| 2.14 | 3.12 | 7,000 | 0 | 3 | 2026-11-26 |",
        "| 2.13 | 3.11 | 7,000 | 0 | 3 | 2026-11-26 |",
    ]


def test_a_constraints_file_names_one_build_of_fbgemm() -> None:
    for path, text in written().items():
        if path.parent.name == "constraints":
            names = [line.split("==")[0] for line in text.splitlines() if line[0] != "#"]
            builds = [name for name in names if name.startswith("fbgemm")]
            assert len(builds) == ("torchrec" in names)
            assert builds in ([], ["fbgemm-gpu-cpu" if Path(path).stem.endswith("cpu") else "fbgemm-gpu"])
