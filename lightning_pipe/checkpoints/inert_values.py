"""Values that a pickle may be made of when it is read by :mod:`lightning_pipe.checkpoints.inert_pickle`.

Tested in ``tests/scenarios/checkpoints/test_hostile_checkpoints.py``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Call", "Pending", "check_key", "check_tree", "described", "whole_size"]

# Of what is read: levels, and objects where one that is referred to twice counts twice.
_DEPTH, _TREE = 100, 5_000_000


class _Refused(Exception):
    """A file that is not read. The text says what is wrong, but not with which file."""


class _Damaged(_Refused):
    """A file that is cut short, or of which bytes have changed."""


@dataclass(frozen=True)
class Call:
    """An entry of a reader's table: what a name in a pickle stands for.

    Attributes:
        name: full name, for messages.
        make: called with the pickle's arguments; checks them.
    """

    name: str
    make: Callable[..., Any]


@dataclass(eq=False)
class Pending:
    """An object whose state is still to come, with which *build* makes it.

    Attributes:
        name: full name of its class, for messages.
        build: called with the pickle's state; checks it.
        places: numbers in the memo, where the object itself goes when it is made.
    """

    name: str
    build: Callable[[Any], Any]
    places: list[int] = field(default_factory=list)


def described(value: Any) -> str:
    """A value for a message: of text and numbers the beginning, of anything else the type."""
    if isinstance(value, Call | Pending):
        return value.name
    if type(value) is str:
        return repr(value[:80]) if len(value) <= 80 else f"{value[:80]!r}..."
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if type(value) in (int, float, bool, type(None)) else f"a {type(value).__name__}"


def check_key(key: Any, depth: int = 2, most: int = 2**61 - 2) -> None:
    """Raise _Refused unless *key* can be the key of a dict or an item of a set at little cost.

    Many keys of one hash would take quadratic time. Integers are below the prime that Python's hash divides them by, so
    that no two have one hash. The hash of a tuple can be inverted for numbers of 60 bits: in tuples they have 31.
    """
    if type(key) is int and abs(key) > most:
        raise _Refused(f"a key is {described(key)}, expected an integer of at most {most.bit_length() - 1} bits")
    if type(key) is complex or (type(key) is float and most < 2**60):
        raise _Refused(f"a key has {described(key)}, expected text or an integer")
    if type(key) in (tuple, torch.Size):
        if len(key) > 64 or depth == 0:
            raise _Refused("a key is a nested or long tuple, expected a few plain values")
        for one in key:
            check_key(one, depth - 1, 2**31 - 1)
    elif isinstance(key, list | dict | set | bytearray | Call | Pending):
        raise _Refused(f"a key is {described(key)}, expected a plain value")


def check_tree(root: Any) -> int:
    """Raise _Refused unless *root* is a tree of values, neither too deep nor too large when it is walked.

    Returns:
        The number of values in its different containers.
    """
    known: dict[int, tuple[int, int]] = {}

    walked = 1

    def measure(value: Any, room: int) -> tuple[int, int]:
        nonlocal walked
        kind = type(value)
        if kind in (Call, Pending):
            raise _Refused(f"it holds {value.name} without what it is made of")
        if kind in (dict, OrderedDict, Counter):
            children = value.values()
        elif kind in (list, tuple):
            children = value
        else:
            return 1, 0
        if not value:
            return 1, 1
        if id(value) not in known and room:
            size = height = 0
            walked += len(children)
            for one in children:
                of_one = measure(one, room - 1)
                size, height = size + of_one[0], max(height, of_one[1])
            known[id(value)] = size + 1, height + 1
        size, height = known.get(id(value), (0, room + 1))
        if height > room:
            raise _Refused(f"it is nested more than {_DEPTH} levels deep, or holds itself")
        if size > _TREE:
            raise _Refused(f"it holds more than {_TREE:,} objects, if repeated ones are counted again")
        return size, height

    measure(root, _DEPTH)
    return walked


def whole_size(what: str, value: Any) -> tuple[int, ...]:
    """A size or stride, checked.

    Raises:
        _Refused: it is no tuple of integers, or of more elements than any memory has.
    """
    if type(value) not in (tuple, torch.Size) or len(value) > 64:
        raise _Refused(f"{what} is {described(value)}, expected a tuple of at most 64 integers")
    product = 1
    for one in value:
        if type(one) is not int or not 0 <= one < 2**48:
            raise _Refused(f"{what} has {described(one)}, expected an integer of at least 0, and of 48 bits")
        product *= max(one, 1)
    if product >= 2**60:
        raise _Refused(f"{what} has {product} elements, expected at most 60 bits")
    return tuple(value)
