"""Every room of the package imports only what the design's table lets it.

The linter reads the source, so it is tried here on a small package with one wrong import; and each room is imported
for real, since a module may also be loaded by name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.patience import HANG

ROOT = Path(__file__).resolve().parent.parent

# One module for each project whose private names it wraps.
COMPAT = ("lightning", "quick_lightning", "torch", "torchrec")

ROOMS = ("_compat", "engine", "checkpoints", "loops", "recsys", "llm", "pipe", "strategies", "callbacks", "cli")

# The table of the design: what each room must not import.
MUST_NOT_IMPORT = {
    "_compat": ("engine", "checkpoints", "loops", "recsys", "llm", "pipe", "strategies", "callbacks", "cli"),
    "engine": (
        "lightning",
        "torchrec",
        "checkpoints",
        "loops",
        "recsys",
        "llm",
        "pipe",
        "strategies",
        "callbacks",
        "cli",
    ),
    "checkpoints": ("lightning", "torchrec", "loops", "recsys", "llm", "pipe", "strategies", "callbacks", "cli"),
    "loops": ("torchrec", "recsys", "llm", "pipe", "strategies", "callbacks", "cli"),
    "recsys": ("lightning", "llm", "pipe", "strategies", "callbacks", "cli"),
    "llm": ("lightning", "torchrec", "recsys", "strategies", "callbacks", "cli"),
    "pipe": ("lightning", "torchrec", "recsys", "llm", "strategies", "callbacks", "cli"),
    "strategies": ("callbacks", "cli"),
    "callbacks": ("cli",),
}

ALLOWED = {
    "engine": ("_compat.torch",),
    "checkpoints": ("engine",),
    "loops": ("lightning", "_compat.lightning", "checkpoints", "engine"),
    "recsys": ("torchrec", "checkpoints", "engine"),
    "llm": ("checkpoints", "engine"),
    "pipe": ("engine",),
    "strategies": ("lightning", "torchrec", "loops", "recsys", "llm", "pipe", "checkpoints", "engine"),
    "callbacks": ("lightning", "torchrec", "strategies", "loops", "recsys", "llm", "pipe", "checkpoints", "engine"),
    "cli": (
        "lightning",
        "torchrec",
        "callbacks",
        "strategies",
        "loops",
        "recsys",
        "llm",
        "pipe",
        "checkpoints",
        "engine",
    ),
}


def layers() -> dict[str, list[str]]:
    """Rooms with sub-packages, and these, highest first, as the contracts have them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return {
        contract["containers"][0]: [
            f"{contract['containers'][0]}.{name.strip(' ()')}"
            for layer in contract["layers"]
            for name in layer.split("|")
        ]
        for contract in contracts
        if contract["type"] == "layers" and contract["containers"] != ["lightning_pipe"]
    }


def sub_packages() -> list[str]:
    return [sub_package for found in layers().values() for sub_package in found]


def module_name(target: str) -> str:
    return f"lightning_pipe.{target}" if target.split(".")[0] in ROOMS else target


def write_package(folder: Path, imports: dict[str, tuple[str, ...]]) -> None:
    """A package with the same rooms, of which each has the given imports, and this project's contracts."""
    package = folder / "lightning_pipe"
    for room in ROOMS:
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").touch()
        lines = [f"import {module_name(target)}" for target in imports.get(room, ())]
        (package / room / "part.py").write_text("\n".join(lines) + "\n")
    (package / "__init__.py").touch()
    for project in COMPAT:
        lines = [f"import {target}" for target in imports.get(f"_compat.{project}", ())]
        (package / "_compat" / f"{project}.py").write_text("\n".join(lines) + "\n")
    for sub_package in sub_packages():
        module = folder / Path(*sub_package.split("."))
        module.mkdir(parents=True, exist_ok=True)
        (module / "__init__.py").touch()
        lines = [f"import {target}" for target in imports.get(sub_package, ())]
        (module / "part.py").write_text("\n".join(lines) + "\n")
    for strategy in ("in_process", "pipeline"):  # modules that contracts name
        (package / "strategies" / f"{strategy}.py").touch()
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())


class Linted(NamedTuple):
    """What became of a run of the linter."""

    returncode: int
    said: str


Lint = Callable[[dict[str, tuple[str, ...]]], Linted]

# Lints each folder that it is told of in a copy of itself: it has imported the linter, and no package of ours.
LINTER = """
import os, sys
from importlinter.cli import lint_imports_command
for line in sys.stdin:
    process = os.fork()
    if process == 0:
        os.chdir(line.strip())
        said = os.open("said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        lint_imports_command(["--no-logo", "--no-cache"])
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def linter() -> Iterator[Callable[[Path], Linted]]:
    """Lints the package in a folder."""
    command = [sys.executable, "-c", LINTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(folder: Path) -> Linted:
            requests.write(f"{folder}\n")
            requests.flush()
            return Linted(int(answers.readline()), (folder / "said").read_text())

        yield run


@pytest.fixture
def lint(tmp_path: Path, linter: Callable[[Path], Linted]) -> Lint:
    """Run this project's import contracts on a package with the same rooms, of which each has the given imports."""

    def run(imports: dict[str, tuple[str, ...]]) -> Linted:
        write_package(tmp_path, imports)
        return linter(tmp_path)

    return run


def test_the_linter_passes_every_import_that_the_table_allows(lint: Lint) -> None:
    result = lint(ALLOWED)
    assert result.returncode == 0, result.said


@pytest.mark.parametrize("room", layers())
def test_every_sub_package_is_in_its_rooms_layers(room: str) -> None:
    folder = ROOT / Path(*room.split("."))
    found = {f"{room}.{path.name}" for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert found == set(layers()[room])


@pytest.mark.parametrize("room", layers())
def test_the_linter_refuses_an_import_of_a_higher_sub_package(lint: Lint, room: str) -> None:
    highest, *_, lowest = layers()[room]
    result = lint({lowest: (f"{highest}.part",)})
    assert result.returncode == 1, result.said
    assert f"{lowest}.part -> {highest}.part" in " ".join(result.said.split())


@pytest.mark.parametrize(
    ("room", "target"), [(room, target) for room, targets in MUST_NOT_IMPORT.items() for target in targets]
)
def test_the_linter_refuses_every_import_that_the_table_forbids(lint: Lint, room: str, target: str) -> None:
    result = lint({room: (target,)})
    assert result.returncode == 1, result.said
    assert f"lightning_pipe.{room}.part -> {module_name(target)}" in result.said


@pytest.mark.parametrize("strategy", ["in_process", "language_model", "pipeline", "recommender"])
def test_the_linter_refuses_a_callback_that_knows_a_strategy_by_class(lint: Lint, strategy: str) -> None:
    result = lint({"callbacks": (f"lightning_pipe.strategies.{strategy}",)})
    assert result.returncode == 1, result.said
    assert f"lightning_pipe.callbacks.part -> lightning_pipe.strategies.{strategy}" in result.said


@pytest.mark.parametrize(
    ("project", "target"),
    [("torch", "lightning"), ("torch", "torchrec"), ("lightning", "torchrec"), ("torchrec", "lightning")],
)
def test_the_linter_refuses_a_second_project_in_a_module_of_compat(lint: Lint, project: str, target: str) -> None:
    result = lint({f"_compat.{project}": (target,)})
    assert result.returncode == 1, result.said
    assert f"lightning_pipe._compat.{project} -> {target}" in result.said


# Imports every module of one room in a fresh interpreter, past the package's own __init__ (which registers the
# strategies, so it loads Lightning), and prints what that has loaded.
IMPORT_ROOM = """
import importlib, json, pkgutil, sys, types
root, room = sys.argv[1:]
parent = types.ModuleType("lightning_pipe")
parent.__path__ = [root + "/lightning_pipe"]
sys.modules["lightning_pipe"] = parent
package = importlib.import_module("lightning_pipe." + room)
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "room",
    [
        room
        for room, targets in MUST_NOT_IMPORT.items()
        if {"lightning", "torchrec"} & set(targets) and (ROOT / "lightning_pipe" / room).is_dir()
    ],
)
def test_importing_a_room_loads_nothing_that_the_table_forbids(room: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ROOM, str(ROOT), room], capture_output=True, text=True, timeout=HANG, check=False
    )
    assert result.returncode == 0, result.stderr
    loaded = set(json.loads(result.stdout.splitlines()[-1]))
    assert f"lightning_pipe.{room}" in loaded
    assert not loaded & {module_name(target) for target in MUST_NOT_IMPORT[room]}


def test_the_engine_is_there_without_lightning_and_torchrec() -> None:
    # None in sys.modules is what Python itself takes for "not to be had".
    code = """
import sys
sys.modules.update(dict.fromkeys(("lightning", "pytorch_lightning", "torchrec", "fbgemm_gpu")))
import lightning_pipe.engine
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert result.returncode == 0, result.stderr
