"""`make lint` enforces sizes of folders, files and constructors, and that a class name is used once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def check_layout() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layout", ROOT / "scripts" / "check_layout.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of(check_layout: ModuleType, folder: Path, **files: str) -> list[str]:
    package = folder / "package"
    package.mkdir()
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return list(check_layout.faults(package))


def test_the_package_has_no_faults(check_layout: ModuleType) -> None:
    assert list(check_layout.faults(ROOT / "lightning_pipe")) == []


def test_a_folder_with_many_modules_is_a_fault(check_layout: ModuleType, tmp_path: Path) -> None:
    modules = {f"module_{number}": "" for number in range(19)}
    assert of(check_layout, tmp_path, __init__="", **modules) == ["package has 19 modules; at most 18 are allowed"]


def test_a_long_file_is_a_fault(check_layout: ModuleType, tmp_path: Path) -> None:
    found = of(check_layout, tmp_path, short="x = 1\n" * 399, long="x = 1\n" * 400)
    assert found == ["package/long.py has 400 lines; fewer than 400 are allowed"]


CONSTRUCTORS = {
    "class": f"class C:\n    def __init__(self, {', '.join(f'a{i}' for i in range(9))}, *, x, y, z, w, **rest): ...\n",
    "dataclass": "@dataclass(frozen=True)\nclass C:\n" + "".join(f"    a{i}: int\n" for i in range(13)),
    "named tuple": "class C(NamedTuple):\n" + "".join(f"    a{i}: int\n" for i in range(13)),
}


@pytest.mark.parametrize("kind", CONSTRUCTORS)
def test_a_constructor_with_many_arguments_is_a_fault(check_layout: ModuleType, tmp_path: Path, kind: str) -> None:
    (found,) = of(check_layout, tmp_path, module=CONSTRUCTORS[kind])
    assert "the constructor of C has 13 arguments; at most 12 are allowed" in found


def test_a_class_name_with_two_meanings_is_a_fault(check_layout: ModuleType, tmp_path: Path) -> None:
    found = of(check_layout, tmp_path, one="class Piece: ...\n", other="class Piece: ...\nclass Other: ...\n")
    assert found == ["the class name Piece is used 2 times: package/one.py:1, package/other.py:1"]
