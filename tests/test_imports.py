"""Every room of the package imports only what the design's table lets it.

The linter reads the source, so it is tried here on a small package with one wrong import; and each room is imported
for real, since a module may also be loaded by name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

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


def lint(folder: Path, imports: dict[str, tuple[str, ...]]) -> subprocess.CompletedProcess[str]:
    """Run this project's import contracts on a package with the same rooms, of which each has the given imports."""
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
    lint_imports = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [lint_imports, "--no-logo", "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=HANG, check=False
    )


def test_the_linter_passes_every_import_that_the_table_allows(tmp_path: Path) -> None:
    result = lint(tmp_path, ALLOWED)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("room", layers())
def test_every_sub_package_is_in_its_rooms_layers(room: str) -> None:
    folder = ROOT / Path(*room.split("."))
    found = {f"{room}.{path.name}" for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert found == set(layers()[room])


@pytest.mark.parametrize("room", layers())
def test_the_linter_refuses_an_import_of_a_higher_sub_package(tmp_path: Path, room: str) -> None:
    highest, *_, lowest = layers()[room]
    result = lint(tmp_path, {lowest: (f"{highest}.part",)})
    assert result.returncode == 1, result.stdout
    assert f"{lowest}.part -> {highest}.part" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("room", "target"), [(room, target) for room, targets in MUST_NOT_IMPORT.items() for target in targets]
)
def test_the_linter_refuses_every_import_that_the_table_forbids(tmp_path: Path, room: str, target: str) -> None:
    result = lint(tmp_path, {room: (target,)})
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"lightning_pipe.{room}.part -> {module_name(target)}" in result.stdout


@pytest.mark.parametrize("strategy", ["in_process", "language_model", "pipeline", "recommender"])
def test_the_linter_refuses_a_callback_that_knows_a_strategy_by_class(tmp_path: Path, strategy: str) -> None:
    result = lint(tmp_path, {"callbacks": (f"lightning_pipe.strategies.{strategy}",)})
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"lightning_pipe.callbacks.part -> lightning_pipe.strategies.{strategy}" in result.stdout


@pytest.mark.parametrize(
    ("project", "target"),
    [("torch", "lightning"), ("torch", "torchrec"), ("lightning", "torchrec"), ("torchrec", "lightning")],
)
def test_the_linter_refuses_a_second_project_in_a_module_of_compat(tmp_path: Path, project: str, target: str) -> None:
    result = lint(tmp_path, {f"_compat.{project}": (target,)})
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"lightning_pipe._compat.{project} -> {target}" in result.stdout


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
