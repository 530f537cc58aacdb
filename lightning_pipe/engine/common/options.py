"""Options that come from a configuration: checks of their values, and groups of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from lightning_pipe.engine.common.errors import PipelineError, SetupError

__all__ = ["check_choice", "check_flags", "check_whole_number", "is_whole_numbers", "option_group"]

Group = TypeVar("Group")


def check_whole_number(
    name: str, value: Any, least: int, *, optional: bool = False, error: type[PipelineError] = SetupError
) -> None:
    """Check an integer; True and False are refused.

    Args:
        name: name of the option in the message.
        value: value to check.
        least: smallest value that is allowed.
        optional: also allow None.
        error: class of the error.

    Raises:
        SetupError: or *error*: names the option, its value and the expected one.
    """
    if not (optional and value is None) and not (is_whole_numbers([value]) and value >= least):
        raise error(f"{name} is {value!r}; expected a whole number, {least} or more")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that a value is one of the choices; 1 is not True.

    Raises:
        SetupError: names the option, its value and the choices.
    """
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise SetupError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")


def check_flags(**flags: object) -> None:
    """Check that each is True or False: the text "false", from a file that nobody parsed, would count as True.

    Raises:
        SetupError: names the first that is not, and its value.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise SetupError(f"{name} is {value!r}; needed is True or False")


def is_whole_numbers(values: Any) -> bool:
    """True for a list or tuple of integers."""
    return isinstance(values, list | tuple) and all(type(value) is int for value in values)


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
