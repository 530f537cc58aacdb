"""Reads pickles without executing them.

Python's unpickler, and that of ``torch.load(weights_only=True)``, call functions with arguments chosen by the file, and
can give any state to a class that is harmless when used as intended. In this reader, a name in a pickle can only refer
to an entry of the reader's own table, a ``Call``, whose function checks the types and sizes of its arguments. A state
is passed to the check that the preceding call returned, never to an object's ``__setstate__``.

Time and memory are bounded too. Each opcode, text and call is charged to a budget of bytes before it is executed. The
memo is a dictionary, so that a large index costs no more than a small one. Keys are plain and small, because hashing a
deeply nested tuple overflows the stack. The result is a tree of bounded depth and size, so that callers can walk it.
"""

from __future__ import annotations

import _compat_pickle
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_pipe.checkpoints.inert_values import Call, Pending, _Damaged, _Refused, check_key, check_tree, described

# Default memory budget for the objects of a pickle, in bytes. A reader that expects larger pickles passes more.
BUDGET = 128 * 2**20
# Upper bounds in bytes for one opcode (a dictionary with its entries in the stack and memo) and one call (a tensor).
_OPCODE, _CALL = 100, 1000
# Maximum size of one text in bytes. While a text is decoded, memory holds it twice.
_TEXT = 2**26
# Maximum length of the full name of a class or function, in characters.
_NAME = 1000


def load_inert(
    data: bytes,
    find: Callable[[str], Any],
    *,
    persistent: Callable[[Any], Any] | None = None,
    allowed: Mapping[str, Any] | None = None,
    budget: int = BUDGET,
) -> Any:
    """Build the object that a pickle describes.

    Args:
        data: pickle of protocol 2 to 5.
        find: function from a full name to its :class:`Call` or value; raises :class:`_Refused` for other names.
        persistent: function from a persistent id to its value (None: persistent ids are refused).
        allowed: classes and functions that the user trusts, by their full names. They are called with any arguments and
            state, as Python's unpickler calls them.
        budget: approximate limit on the memory of the objects, in bytes.

    Raises:
        _Refused: the data is not a pickle, is truncated, or holds values that are not allowed.
    """
    machine = _Machine(data, find, persistent, allowed or {}, budget)
    try:
        value = machine.run()
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise _Damaged(
            f"the pickle is malformed at byte {machine.at} of {len(data)} ({type(error).__name__}: {error})"
        ) from None
    check_tree(value)
    return value


# ---------------------------------------------------------------------- opcodes

_BYTE, _SHORT, _COUNT, _INT, _FLOAT = (struct.Struct(kind) for kind in ("<B", "<H", "<I", "<i", ">d"))


class _Machine:
    def __init__(
        self,
        data: bytes,
        find: Callable[[str], Any],
        persistent: Callable[[Any], Any] | None,
        allowed: Mapping[str, Any],
        budget: int,
    ) -> None:
        self.at = 0
        self._data, self._find, self._persistent, self._allowed = data, find, persistent, allowed
        self._left = budget
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, size = self._data, len(self._data)
        while self.at < size:
            code = data[self.at]
            self.at += 1
            self._left -= _OPCODE
            if self._left < 0:
                self._charge(0)
            if code in _CONSTANTS:
                self._stack.append(_CONSTANTS[code])
            elif code in _STEPS:
                _STEPS[code](self)
            elif code == pickle.STOP[0]:
                if self._marks or len(self._stack) != 1:
                    raise _Damaged(f"the pickle ends with {len(self._stack)} objects, expected one")
                return self._stack.pop()
            else:
                raise _Damaged(f"the pickle has the opcode {code:#04x} at byte {self.at - 1}, which does not exist")
        raise _Damaged("the pickle is cut short: it has no STOP opcode")

    # ------------------------------------------------------------------ arguments

    def _charge(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _Refused(f"the pickle creates too many or too large objects (at byte {self.at} of {len(self._data)})")

    def _take(self, count: int) -> bytes:
        """Consume the next *count* bytes."""
        end = self.at + count
        if end > len(self._data):
            raise _Damaged(
                f"the pickle is cut short: expected {count} bytes at byte {self.at}, got {len(self._data)} in all"
            )
        self._charge(count)
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def _number(self, kind: struct.Struct) -> Any:
        (number,) = kind.unpack_from(self._data, self.at)
        self.at += kind.size
        return number

    def _line(self) -> str:
        end = self._data.index(b"\n", self.at, self.at + _NAME)
        line = self._take(end - self.at)
        self.at += 1
        return line.decode()

    def _text(self, count: int) -> None:
        if count > _TEXT:
            raise _Refused(f"the pickle has a text of {count} bytes at byte {self.at}, expected at most {_TEXT}")
        raw = self._take(count)
        # Python stores every character of a string in the width of the widest one.
        if not raw.isascii() and raw.translate(None, bytes(range(0xC4))):
            self._charge(3 * count)
        self._stack.append(raw.decode("utf-8", "surrogatepass"))

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(_BYTE)), "little", signed=True))

    # ------------------------------------------------------------------ containers

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _marked_tuple(self) -> None:
        items = tuple(self._marked())
        self._stack.append(items)

    def _tuple(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise _Damaged("the pickle takes more objects from its stack than it holds")
        self._stack[-count:] = [items]

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise _Refused(f"the pickle appends to {described(target)}, expected a list")
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict, Counter) or len(items) % 2:
            raise _Refused(f"the pickle sets items of {described(target)}, expected a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    # ------------------------------------------------------------------ names, calls and states

    def _global(self, module: str, name: str) -> None:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > _NAME:
            raise _Refused(f"the pickle names {described(module)}.{described(name)}, expected text")
        # Protocol 2 uses the names of Python 2.
        module, name = _compat_pickle.NAME_MAPPING.get(
            (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        )
        full = f"{module}.{name}"
        try:
            self._stack.append(self._find(full))
        except _Refused:
            if full not in self._allowed:
                raise
            self._stack.append(self._allowed[full])

    def _is_allowed(self, value: Any) -> bool:
        return any(value is one for one in self._allowed.values())

    def _call(self, function: Any, args: Any, new: bool) -> Any:
        if type(args) is not tuple:
            raise _Refused(
                f"the pickle calls {described(function)} with {described(args)}, expected a tuple of arguments"
            )
        self._charge(_CALL + _weight(args))
        with _making(function):
            if type(function) is Call:
                return function.make(*args)
            if self._is_allowed(function):
                self._charge(_OPCODE * check_tree(args))
                return function.__new__(function, *args) if new else function(*args)
        raise _Refused(f"the pickle calls {described(function)}, expected a class or function")

    def _reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._call(function, args, new=False))

    def _new(self) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        self._stack.append(self._call(kind, args, new=True))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        kind = type(target)
        if kind is Pending:
            self._charge(_CALL + _weight(state))
            with _making(target):
                self._stack[-1] = target.build(state)
            for place in target.places:
                self._memo[place] = self._stack[-1]
        elif kind is OrderedDict and type(state) is dict:
            # torch stores module versions in the _metadata of a state_dict. Other attributes could hide methods.
            if state.keys() == {"_metadata"} and type(state["_metadata"]) is OrderedDict:
                target._metadata = state["_metadata"]
                return
            raise _Refused("the pickle sets attributes of an OrderedDict, expected only _metadata")
        elif self._is_allowed(kind):
            self._charge(_OPCODE * check_tree(state))
            with _making(target):
                _set_state(target, state)
        else:
            raise _Refused(f"the pickle gives a state to {described(target)}, which has no state")

    def _store(self) -> None:
        found = self._persistent
        if found is None:
            raise _Refused("the pickle has a persistent id, expected none")
        self._stack.append(self._call(Call("a storage", found), (self._stack.pop(),), new=False))

    # ------------------------------------------------------------------ memo

    def _put(self, number: int) -> None:
        value = self._stack[-1]
        if type(value) is Pending:
            value.places.append(number)
        self._memo[number] = value


@contextmanager
def _making(what: Any) -> Iterator[None]:
    """Convert any error to a _Refused that names the object that cannot be created."""
    try:
        yield
    except _Refused:
        raise
    except Exception as error:  # functions may raise any error for invalid arguments
        reason = str(error).partition("\n")[0][:200]
        raise _Refused(f"{described(what)} cannot be created: {type(error).__name__}: {reason}") from None


def _weight(value: Any, depth: int = 3) -> int:
    """Approximate memory that a function may allocate for a value, in bytes.

    Charged for every call, because a pickle can pass the same value many times.
    """
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, list | dict | set):
        return _OPCODE * len(value)
    if isinstance(value, tuple) and depth:
        return sum((8 + _weight(one, depth - 1) for one in value), 0)
    return 0


def _set_state(target: Any, state: Any) -> None:
    """Set an object's state as Python's unpickler does."""
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    target.__dict__.update(state or {})
    for name, value in (slots or {}).items():
        setattr(target, name, value)


_CONSTANTS: dict[int, Any] = {
    pickle.NONE[0]: None,
    pickle.NEWTRUE[0]: True,
    pickle.NEWFALSE[0]: False,
    pickle.EMPTY_TUPLE[0]: (),
}
_STEPS: dict[int, Callable[[_Machine], Any]] = {
    pickle.PROTO[0]: lambda m: m._take(1),
    pickle.FRAME[0]: lambda m: m._take(8),
    pickle.MARK[0]: _Machine._mark,
    pickle.BININT[0]: lambda m: m._stack.append(m._number(_INT)),
    pickle.BININT1[0]: lambda m: m._stack.append(m._number(_BYTE)),
    pickle.BININT2[0]: lambda m: m._stack.append(m._number(_SHORT)),
    pickle.LONG1[0]: _Machine._long,
    pickle.BINFLOAT[0]: lambda m: m._stack.append(m._number(_FLOAT)),
    pickle.BINUNICODE[0]: lambda m: m._text(m._number(_COUNT)),
    pickle.SHORT_BINUNICODE[0]: lambda m: m._text(m._number(_BYTE)),
    pickle.BINBYTES[0]: lambda m: m._stack.append(m._take(m._number(_COUNT))),
    pickle.SHORT_BINBYTES[0]: lambda m: m._stack.append(m._take(m._number(_BYTE))),
    pickle.EMPTY_LIST[0]: lambda m: m._stack.append([]),
    pickle.EMPTY_DICT[0]: lambda m: m._stack.append({}),
    pickle.TUPLE[0]: _Machine._marked_tuple,
    pickle.TUPLE1[0]: lambda m: m._tuple(1),
    pickle.TUPLE2[0]: lambda m: m._tuple(2),
    pickle.TUPLE3[0]: lambda m: m._tuple(3),
    pickle.APPEND[0]: lambda m: m._append([m._stack.pop()]),
    pickle.APPENDS[0]: lambda m: m._append(m._marked()),
    pickle.SETITEM[0]: lambda m: m._set([m._stack.pop(-2), m._stack.pop()]),
    pickle.SETITEMS[0]: lambda m: m._set(m._marked()),
    pickle.GLOBAL[0]: lambda m: m._global(m._line(), m._line()),
    pickle.STACK_GLOBAL[0]: lambda m: m._global(m._stack.pop(-2), m._stack.pop()),
    pickle.REDUCE[0]: _Machine._reduce,
    pickle.NEWOBJ[0]: _Machine._new,
    pickle.BUILD[0]: _Machine._build,
    pickle.BINPERSID[0]: _Machine._store,
    pickle.BINPUT[0]: lambda m: m._put(m._number(_BYTE)),
    pickle.LONG_BINPUT[0]: lambda m: m._put(m._number(_COUNT)),
    pickle.MEMOIZE[0]: lambda m: m._put(len(m._memo)),
    pickle.BINGET[0]: lambda m: m._stack.append(m._memo[m._number(_BYTE)]),
    pickle.LONG_BINGET[0]: lambda m: m._stack.append(m._memo[m._number(_COUNT)]),
}
