"""Uses of private names of other projects outside ``_compat``.

``python -m scripts.private_names > tests/private_names.txt`` updates the list that ``tests/test_private_names.py``
enforces as an upper limit. Prints one line per file and name, with the number of uses. A use is

- an import of a module or name of one of :data:`PROJECTS` whose name begins with ``_``;
- an attribute ``one._name``, also via ``getattr``, that the package does not define, or an attribute of ``super()``.

Names with two leading and trailing underscores belong to Python. An attribute whose name the package also defines
counts as the package's own, so the count is a lower bound.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PROJECTS = ("fbgemm_gpu", "lightning", "torch", "torchmetrics", "torchrec", "transformers")
# Public names that begin with an underscore: of named tuples, ``os`` and ``sys``.
PUBLIC = ("_", "_asdict", "_current_frames", "_exit", "_fields", "_replace")
PACKAGE = Path(__file__).parent.parent / "lightning_pipe"


def private_names(package: Path = PACKAGE) -> dict[str, Counter[str]]:
    """Uses of private names of other projects.

    Args:
        package: folder of Python files (default: this package).

    Returns:
        Number of uses of each name, by path in *package*. Files without uses are left out.
    """
    trees = {
        file.relative_to(package).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(package.rglob("*.py"))
    }
    defined = {name for tree in trees.values() for name in _defined(tree)}
    uses = {path: Counter(_used(tree, defined)) for path, tree in trees.items() if not path.startswith("_compat/")}
    return {path: names for path, names in uses.items() if names}


def _is_private(name: str) -> bool:
    return name.startswith("_") and name not in PUBLIC and not (name.startswith("__") and name.endswith("__"))


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines: functions, classes, variables, and attributes that it assigns."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            # An attribute assigned on another object may belong to that object's class.
            yield from [node.attr] * (node.value.id in ("self", "cls"))


def _used(tree: ast.AST, defined: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _imported(node.module, [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _imported(alias.name, [])
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            if node.attr not in defined or _is_super(node.value):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            names = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
            yield from (name for name in names if _is_private(name) and name not in defined)  # type: ignore[misc, arg-type]


def _imported(module: str, names: Iterable[str]) -> Iterator[str]:
    parts = module.split(".")
    if parts[0] in PROJECTS:
        yield from (part for part in parts if _is_private(part))
        yield from (name for name in names if _is_private(name))


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def main() -> None:
    """Print all uses."""
    for path, names in private_names().items():
        for name, count in sorted(names.items()):
            print(path, name, count)


if __name__ == "__main__":
    main()
