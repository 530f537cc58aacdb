"""Every module has tests in a file of its own name, or its docstring says which file tests it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_pipe"
TESTED = re.compile(r"Tested in ``(tests/[\w/]+\.py)``\.")


def modules() -> list[Path]:
    return [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


def own_tests(module: Path) -> Path:
    return ROOT / "tests" / module.parent / f"test_{module.name}"


def named_tests(module: Path) -> list[str]:
    return TESTED.findall(ast.get_docstring(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))) or "")


def test_each_module_has_tests_of_its_name_or_says_where_it_is_tested() -> None:
    assert [str(module) for module in modules() if not own_tests(module).exists() and not named_tests(module)] == []


def test_tests_that_a_module_names_are_there_and_it_has_no_others_of_its_name() -> None:
    for module in modules():
        for name in named_tests(module):
            assert (ROOT / name).exists(), f"{module} names {name}"
            assert not own_tests(module).exists(), f"{module} has {own_tests(module).name}, and need not name {name}"


def test_a_file_of_tests_mirrors_a_module_unless_it_is_a_scenario() -> None:
    # Folders that the package does not have are of pages, examples and scenarios.
    files = [
        path for room in PACKAGE.iterdir() if room.is_dir() for path in (ROOT / "tests" / room.name).rglob("test_*.py")
    ]
    assert len(files) > 100
    assert [str(path.relative_to(ROOT)) for path in files if not mirrored(path)] == []


def mirrored(path: Path) -> bool:
    """Whether there is a module of this name in the package, or a helper of the tests beside it."""
    module = path.relative_to(ROOT / "tests").with_name(path.name.removeprefix("test_"))
    return (PACKAGE / module).exists() or (ROOT / "tests" / module).exists()
