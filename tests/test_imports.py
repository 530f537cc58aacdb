"""Every sub-package imports only what the design's table lets it.

The linter reads the source, so it is tried here on a small package with wrong imports; and sub-packages are imported
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


SUBPACKAGES = ("_compat", "engine", "checkpoints", "loops", "recsys", "llm", "pipe", "strategies", "callbacks", "cli")

# The table of the design: what each sub-package must not import.
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


def module_name(target: str) -> str:
    return f"lightning_pipe.{target}" if target.split(".")[0] in SUBPACKAGES else target


@pytest.mark.parametrize("package", layers())
def test_every_sub_package_is_in_its_rooms_layers(package: str) -> None:
    folder = ROOT / Path(*package.split("."))
    found = {f"{package}.{path.name}" for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert found == set(layers()[package])


# Imports every module of one package in a fresh interpreter, past the package's own __init__ (which registers the
# strategies, so it loads Lightning), and prints what that has loaded.
IMPORT_ROOM = """
import importlib, json, pkgutil, sys, types
root, package = sys.argv[1:]
parent = types.ModuleType("lightning_pipe")
parent.__path__ = [root + "/lightning_pipe"]
sys.modules["lightning_pipe"] = parent
package = importlib.import_module("lightning_pipe." + package)
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", ["engine", "loops", "recsys", "llm"])
def test_importing_a_room_loads_nothing_that_the_table_forbids(package: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ROOM, str(ROOT), package],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    loaded = set(json.loads(result.stdout.splitlines()[-1]))
    assert f"lightning_pipe.{package}" in loaded
    assert not loaded & {module_name(target) for target in MUST_NOT_IMPORT[package]}


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
