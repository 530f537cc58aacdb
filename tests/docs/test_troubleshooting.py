"""The page on troubleshooting has every error class, and quotes messages that the package has."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lightning_pipe.engine.common import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^> `(.+?)` — (.+)$", PAGE, re.MULTILINE)
CLASSES = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
# What stands for a value in the text of an f-string, as the page has it.
GAP = "…"


def trees() -> Iterator[ast.Module]:
    for path in sorted((ROOT / "lightning_pipe").rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def text_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(GAP if isinstance(part, ast.FormattedValue) else str(text_of(part)) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text_of(side) or GAP for side in (node.left, node.right))
    return None


@cache
def messages() -> tuple[tuple[str, str | None], ...]:
    """Every text of the package, with the error class that it is given to, where it is given to one directly."""
    found: list[tuple[str, str | None]] = []
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and (text := text_of(node.args[0])) is not None:
                name = getattr(node.func, "id", None)
                found.append((text, name if name in CLASSES else None))
            elif (text := text_of(node)) is not None:
                found.append((text, None))
    return tuple(found)


def raised_as(quoted: str) -> set[str | None]:
    """The classes of the messages that have the pieces of a quoted one in their order; empty where there is none."""
    pieces = [piece.strip() for piece in quoted.split(GAP)]
    pattern = re.compile(".*?".join(map(re.escape, pieces)), re.DOTALL)
    return {name for text, name in messages() if pattern.search(text)}


def test_every_error_class_has_an_entry_with_its_cause_and_its_fix() -> None:
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))
    assert set(sections) == CLASSES
    for name, text in sections.items():
        if name != "PipelineError":
            assert "*Cause:*" in text, name
            assert "*Fix:*" in text, name


def test_the_package_has_no_other_public_error_class() -> None:
    bases = CLASSES | {
        name for name, value in vars(builtins).items() if inspect.isclass(value) and issubclass(value, BaseException)
    }
    defined = {
        node.name
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", None) in bases for base in node.bases)
    }
    assert {name for name in defined if not name.startswith("_")} == CLASSES


@pytest.mark.parametrize(("quoted", "said"), ENTRIES)
def test_a_quoted_message_is_one_of_the_package_and_of_that_class(quoted: str, said: str) -> None:
    found = raised_as(quoted)
    assert found, "no message of the package has these words"
    named = set(re.findall(r"`(\w+)`", said))
    classes = {name for name in found if name is not None}
    assert named <= CLASSES
    if named and classes:
        assert classes <= named
    if not named:
        assert said in ("note", "warning")
        assert not classes - {"TaskError"}
