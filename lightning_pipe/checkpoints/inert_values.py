"""Types and checks of the values that :mod:`lightning_pipe.checkpoints.inert_pickle` accepts."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# Limits of a result: nesting depth, and number of objects, where an object counts once for each reference to it.
_DEPTH, _TREE = 100, 5_000_000


class _Refused(Exception):
    """Reason why a file is refused. The message describes the fault; the caller adds the file's name."""


class _Damaged(_Refused):
    """Reason why a file is refused: it is truncated or its bytes have changed."""


@dataclass(frozen=True)
class Call:
    """Entry of a reader's table, which maps the names in a pickle to functions.

    Attributes:
        name: full name, for messages.
        make: function that checks the pickle's arguments and makes the object.
    """

    name: str
    make: Callable[..., Any]


@dataclass(eq=False)
class Pending:
    """Placeholder for an object that is made when the pickle gives its state.

    Attributes:
        name: full name of the object's class, for messages.
        build: function that checks the pickle's state and makes the object.
        places: memo indices of the placeholder, which are set to the object when it is made.
    """

    name: str
    build: Callable[[Any], Any]
    places: list[int] = field(default_factory=list)


def described(value: Any) -> str:
    """Short description of a value for a message: the start of a text, a number, or the type of any other value."""
    if isinstance(value, Call | Pending):
        return value.name
    if type(value) is str:
        return repr(value[:80]) if len(value) <= 80 else f"{value[:80]!r}..."
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if type(value) in (int, float, bool, type(None)) else f"a {type(value).__name__}"


def check_key(key: Any, depth: int = 2, most: int = 2**61 - 2) -> None:
    """Raise _Refused unless *key* can be the key of a dict or an item of a set at low cost.

    Many keys with the same hash would take quadratic time. Integers must be below the modulus of Python's integer hash,
    so that different integers have different hashes. For 60-bit integers, tuples with a given hash can be constructed;
    integers in tuples are therefore limited to 31 bits.
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
    """Raise _Refused unless *root* is a tree of values whose depth and size are within the limits.

    Returns:
        The number of values, where each container is counted once.
    """
    known: dict[int, tuple[int, int]] = {}

    walked = 1

    def measure(value: Any, room: int) -> tuple[int, int]:
        nonlocal walked
        kind = type(value)
        if kind in (Call, Pending):
            raise _Refused(f"it holds {value.name} without its arguments or state")
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
            raise _Refused(f"it is nested more than {_DEPTH} levels deep or contains itself")
        if size > _TREE:
            raise _Refused(f"it holds more than {_TREE:,} objects, where repeated objects are counted each time")
        return size, height

    measure(root, _DEPTH)
    return walked


def whole_size(what: str, value: Any) -> tuple[int, ...]:
    """Check the size of a tensor or array, and return it as a tuple.

    Args:
        what: name of the value, for messages.
        value: value to check.

    Raises:
        _Refused: the value is not a tuple of non-negative integers, or its product exceeds any memory.
    """
    if type(value) not in (tuple, torch.Size) or len(value) > 64:
        raise _Refused(f"{what} is {described(value)}, expected a tuple of at most 64 integers")
    product = 1
    for one in value:
        if type(one) is not int or not 0 <= one < 2**48:
            raise _Refused(f"{what} has {described(one)}, expected an integer from 0 to 2**48 - 1")
        product *= max(one, 1)
    if product >= 2**60:
        raise _Refused(f"{what} has {product} elements, expected fewer than 2**60")
    return tuple(value)
