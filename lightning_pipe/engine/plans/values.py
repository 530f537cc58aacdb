"""Checks of option values that come from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_pipe.engine.plans.errors import SetupError

__all__ = ["check_choice", "check_flags", "check_whole_number", "is_whole_numbers"]


def check_whole_number(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Check an integer; True and False are refused.

    Args:
        name: name of the option in the message.
        value: value to check.
        least: smallest value that is allowed.
        optional: also allow None.

    Raises:
        SetupError: names the option, its value and the expected one.
    """
    if not (optional and value is None) and not (is_whole_numbers([value]) and value >= least):
        raise SetupError(f"{name} is {value!r}; expected a whole number, {least} or more")


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
