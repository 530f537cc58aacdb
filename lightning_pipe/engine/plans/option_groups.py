"""Groups of options: dataclasses that a configuration gives as a mapping of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lightning_pipe.engine.plans.errors import SetupError

__all__ = ["option_group"]

Group = TypeVar("Group")


def option_group(kind: type[Group], name: str, given: Group | Mapping[str, Any] | None) -> Group:
    """The option group that an argument stands for.

    Args:
        kind: dataclass of the group.
        name: name of the argument.
        given: the group, a mapping of its fields, or None for its defaults.

    Raises:
        SetupError: neither, or a field that the group does not have.
    """
    if isinstance(given, kind):
        return given
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if given is not None and not isinstance(given, Mapping):
        raise SetupError(f"{name} is {given!r}; expected a mapping of {', '.join(known)}, or a {kind.__name__}")
    unknown = [field for field in given or {} if field not in known]
    if unknown:
        raise SetupError(f"{name} has {', '.join(map(repr, unknown))}; expected only {', '.join(known)}")
    return kind(**(given or {}))
