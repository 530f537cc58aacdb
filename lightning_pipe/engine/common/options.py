"""Checks of option values that come from a configuration, and groups of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from lightning_pipe.engine.common.errors import PipelineError, SetupError

Group = TypeVar("Group")


def check_whole_number(
    name: str, value: Any, least: int, *, optional: bool = False, error: type[PipelineError] = SetupError
) -> None:
    """Check that an option is an integer of at least *least*. True and False are refused."""
    if not (optional and value is None) and not (is_whole_numbers([value]) and value >= least):
        raise error(f"{name} is {value!r}; expected a whole number, {least} or more")


def check_choice(name: str, value: Any, choices: Sequence[Any], error: type[PipelineError] = SetupError) -> None:
    """Check that a value is one of the choices. Types are compared too: 1 is not accepted for True."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise error(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}")


def check_booleans(**flags: object) -> None:
    """Check that all flags are booleans. The string "false" from an unparsed file would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise SetupError(f"{name} is {value!r}; expected True or False")


def is_whole_numbers(values: Any) -> bool:
    """Return True for a list or tuple of integers."""
    return isinstance(values, list | tuple) and all(type(value) is int for value in values)


def check_names(name: str, options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse options that do not exist."""
    unknown = [option for option in options if option not in allowed]
    if unknown:
        raise SetupError(f"{name} has {', '.join(map(repr, unknown))}; expected only {', '.join(allowed)}")


def parse_option_group(kind: type[Group], name: str, value: Group | Mapping[str, Any] | None) -> Group:
    """Convert an argument to an option group."""
    if isinstance(value, kind):
        return value
    allowed = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if value is not None and not isinstance(value, Mapping):
        raise SetupError(f"{name} is {value!r}; expected a mapping of {', '.join(allowed)}, or a {kind.__name__}")
    check_names(name, value or {}, allowed)
    options = dict(value or {})
    flags = [field.name for field in fields(kind) if field.type == "bool"]  # type: ignore[arg-type]
    check_booleans(**{f"{name}.{flag}": options[flag] for flag in flags if flag in options})
    return kind(**options)
