"""The public API as text: what others build on, and what a release may not change in silence.

``python -m tests.public_api`` prints it; ``tests/public_api.txt`` holds what it is to be.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

PACKAGES = ("engine", "loops", "data", "recsys", "pipe", "strategies", "callbacks")
KEPT = Path(__file__).with_suffix(".txt")


def lines() -> Iterator[str]:
    """One for each name that is public, and for each method and property of a public class."""
    from lightning_pipe.llm.schedules.specs import SCHEDULES
    from lightning_pipe.recsys import PLANS
    from lightning_pipe.strategies.registry import STRATEGIES

    for package in PACKAGES:
        module = importlib.import_module(f"lightning_pipe.{package}")
        for name in sorted(module.__all__):
            yield from _described(f"lightning_pipe.{package}.{name}", getattr(module, name))
    yield from (f"strategy {name}" for name in sorted(one.name for one in STRATEGIES))
    yield from (f"recsys plan {name}" for name in sorted(PLANS))
    yield from (f"schedule {name}" for name in sorted(SCHEDULES))


def _described(name: str, found: Any) -> Iterator[str]:
    if inspect.isclass(found):
        yield f"class {name}{_signature(found)}"
        for member, value in sorted(_members(found).items()):
            if isinstance(value, property):
                yield f"    {name}.{member}: {inspect.signature(value.fget).return_annotation if value.fget else ''}"
            elif callable(value) or isinstance(value, classmethod | staticmethod):
                yield f"    {name}.{member}{_signature(getattr(found, member))}"
    elif callable(found):
        yield f"{name}{_signature(found)}"
    else:
        yield f"{name}: {type(found).__name__}"


def _members(found: type) -> dict[str, Any]:
    """What this package defines in a class or a base of it, without what it overrides of other projects."""
    bases = [base for base in reversed(found.__mro__) if base.__module__.startswith("lightning_pipe")]
    upstream = {name for base in found.__mro__ if base not in bases for name in dir(base)}
    members = {name: value for base in bases for name, value in vars(base).items()}
    return {name: value for name, value in members.items() if not name.startswith("_") and name not in upstream}


def _signature(found: Any) -> str:
    if inspect.isclass(found) and issubclass(found, Enum):
        return f"({', '.join(found.__members__)})"  # versions of Python give different signatures
    try:
        # A function that is a default is shown with its place in memory.
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(found)))
    except (TypeError, ValueError):
        return "(...)"


if __name__ == "__main__":
    print("\n".join(lines()))
