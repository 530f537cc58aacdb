"""Checks the layout of the package: sizes of folders, files and constructors, and names of classes.

    python scripts/check_layout.py    # part of `make lint`; prints a line per fault and exits with status 1

Layers and import cycles are checked by import-linter, whose contracts are in ``pyproject.toml``.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_pipe"
MOST_MODULES = 18  # per folder, without __init__.py
MOST_LINES = 400  # per file
MOST_ARGUMENTS = 12  # per constructor, without self


def faults(package: Path) -> Iterator[str]:
    """Faults of the package, one line each."""
    classes: dict[str, list[str]] = defaultdict(list)
    for folder in sorted({package, *(path.parent for path in package.rglob("*.py"))}):
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(modules) > MOST_MODULES:
            yield f"{folder.relative_to(package.parent)} has {len(modules)} modules; at most {MOST_MODULES} are allowed"
    for path in sorted(package.rglob("*.py")):
        name, text = path.relative_to(package.parent), path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines >= MOST_LINES:
            yield f"{name} has {lines} lines; fewer than {MOST_LINES} are allowed"
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{name}:{node.lineno}")
                count = arguments(node)
                if count > MOST_ARGUMENTS and not node.name.startswith("_"):
                    yield (
                        f"{name}:{node.lineno}: the constructor of {node.name} has {count} arguments; at most"
                        f" {MOST_ARGUMENTS} are allowed"
                    )
    for name, places in sorted(classes.items()):
        if len(places) > 1:
            yield f"the class name {name} is used {len(places)} times: {', '.join(places)}"


def arguments(node: ast.ClassDef) -> int:
    """Number of arguments of a class's constructor, or of fields of a dataclass or named tuple."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            given = member.args
            return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
    if any("dataclass" in ast.unparse(one) for one in node.decorator_list) or any(
        ast.unparse(base) == "NamedTuple" for base in node.bases
    ):
        fields = [member for member in node.body if isinstance(member, ast.AnnAssign)]
        return sum(
            "ClassVar" not in ast.unparse(one.annotation) and "init=False" not in ast.unparse(one) for one in fields
        )
    return 0


def main() -> int:
    found = list(faults(ROOT / PACKAGE))
    print("\n".join(found) or "layout: no faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
