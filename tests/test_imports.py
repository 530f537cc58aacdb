"""Every room of the package imports only what the design's table lets it.

The linter reads the source, so it is tried here on a small package with wrong imports; and rooms are imported for
real, since a module may also be loaded by name.
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


def write_package(folder: Path, imports: dict[str, tuple[str, ...]]) -> None:
    """A package with the same rooms, of which each has the given imports, and this project's contracts."""
    strategies = ("strategies.in_process", "strategies.pipeline")  # modules that contracts name
    modules = {f"lightning_pipe.{name}.part": imports.get(name, ()) for name in ROOMS}
    modules |= {f"{name}.part": imports.get(name, ()) for name in sub_packages()}
    modules |= {f"lightning_pipe._compat.{name}": imports.get(f"_compat.{name}", ()) for name in COMPAT}
    modules |= {f"lightning_pipe.{name}": () for name in strategies}
    for name, targets in modules.items():
        path = folder / Path(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"import {module_name(target)}\n" for target in targets))
    for path in {folder / "lightning_pipe", *(folder / "lightning_pipe").rglob("*")}:
        if path.is_dir():
            (path / "__init__.py").touch()
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())


def lint(folder: Path, imports: dict[str, tuple[str, ...]]) -> tuple[int, str]:
    """Exit code and output of the linter, run on such a package."""
    write_package(folder, imports)
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG, check=False)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def test_the_linter_passes_every_import_that_the_table_allows(tmp_path: Path) -> None:
    code, said = lint(tmp_path, ALLOWED)
    assert code == 0, said


@pytest.mark.parametrize("room", layers())
def test_every_sub_package_is_in_its_rooms_layers(room: str) -> None:
    folder = ROOT / Path(*room.split("."))
    found = {f"{room}.{path.name}" for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert found == set(layers()[room])


# Of sub-packages, the lowest imports the highest; callbacks know strategies by class; a module of `_compat` knows a
# second project.
OTHER_WRONG: dict[str, tuple[str, ...]] = {
    **{found[-1]: (f"{found[0]}.part",) for found in layers().values()},
    "callbacks": tuple(f"strategies.{name}" for name in ("in_process", "language_model", "pipeline", "recommender")),
    "_compat.torch": ("lightning", "torchrec"),
    "_compat.lightning": ("torchrec",),
    "_compat.torchrec": ("lightning",),
}


@pytest.mark.parametrize("wrong", [*({room: found} for room, found in MUST_NOT_IMPORT.items()), OTHER_WRONG])
def test_the_linter_refuses_every_other_import(wrong: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    code, said = lint(tmp_path, wrong)
    assert code == 1, said
    for source, targets in wrong.items():
        own = source if source.startswith("lightning_pipe.") else f"lightning_pipe.{source}"
        module = own if source.startswith("_compat.") else f"{own}.part"
        missing = [target for target in targets if f"{module} -> {module_name(target)}" not in said]
        assert missing == [], (source, said)


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
@pytest.mark.parametrize("room", ["engine", "loops", "recsys", "llm"])
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
