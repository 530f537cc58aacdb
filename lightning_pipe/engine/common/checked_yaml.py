"""Reader for hand-written YAML that refuses repeated keys and oversized or malicious files.

YAML has references, so a short file can expand to more values than fit in memory. Values are therefore counted while
the text is composed, before any Python object is built. Only text, numbers and booleans are supported: no dates, no
base-60 numbers, no tags.
"""

from __future__ import annotations

from typing import Any

import yaml

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import printable, shown

# A plan of a hundred tasks has 15 kB, 2,000 values and 4 levels. The largest file within these limits is read in 1 s.
_MOST_CHARACTERS = 2**18
_MOST_VALUES = 20_000
_DEEPEST = 16
_LONGEST = 1_000  # characters of one text
_MOST_DIGITS = 40  # of one number; the error at Python's own limit (4,300 digits) would not name the line

_TAG = "tag:yaml.org,2002:"
_UNKNOWN = ("timestamp", "value")  # YAML types that are read as text


class _Loader(yaml.SafeLoader):
    """YAML loader that counts values while it composes them. An alias counts as all values that it repeats."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self._kind = kind
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}  # number of values by id() of a composed node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if kind is yaml.ScalarNode and (":" in value or tag.removeprefix(_TAG) in _UNKNOWN):
            return f"{_TAG}str"
        return tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                self._refuse(f"the alias *{event.anchor} inside its own anchor", event)
            self._count(self._sizes[id(node)], event)
            return node
        if event.tag not in (None, "!", f"{_TAG}str"):
            self._refuse(f"the tag {shown(event.tag)}; remove it, text and numbers need no tag", event)
        if self._depth == _DEEPEST:
            self._refuse(f"more than {_DEEPEST} levels of nesting; a {self._kind} needs 4", event)
        before = self._values
        self._count(1, event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes[id(node)] = self._values - before
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if len(node.value) > _MOST_DIGITS and node.tag in (f"{_TAG}int", f"{_TAG}float"):
            self._refuse(f"a number of {len(node.value)} digits, expected at most {_MOST_DIGITS}", node)
        if len(node.value) > _LONGEST:
            self._refuse(f"a text of {len(node.value)} characters, expected at most {_LONGEST}", node)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            # A merge ("<<: *defaults") is not a key, and keys of the mapping may override the merged ones.
            if key.tag == f"{_TAG}merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._refuse("a list or mapping as a key; write a name", key)
            name = self.construct_object(key)
            if name in seen:
                self._refuse(f"the key {shown(name)}", key, "repeats")
            seen.add(name)
        return node

    def _count(self, values: int, where: Any) -> None:
        self._values += values
        if self._values > _MOST_VALUES:
            self._refuse(f"more than {_MOST_VALUES} values, including values repeated by aliases", where)

    def _refuse(self, what: str, where: Any, verb: str = "has") -> None:
        hint = "; write it once" if verb == "repeats" else ""
        raise PlanError(f"the {self._kind} {verb} {what} (line {where.start_mark.line + 1}){hint}")


def load_mapping(text: str, kind: str, known: tuple[str, ...], *, compare: str) -> dict[Any, Any]:
    """Read the mapping in YAML *text*."""
    if len(text) > _MOST_CHARACTERS:
        raise PlanError(f"the {kind} has {len(text)} characters; expected at most {_MOST_CHARACTERS}")
    try:
        loader = _Loader(text, kind)
        content = loader.get_single_data()
    except PlanError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: PyYAML resolves "0x_" as a number
        said = printable(str(error)[:_LONGEST])
        raise PlanError(f"the {kind} is not valid YAML: {said}; compare it with {compare}") from error
    if not isinstance(content, dict):
        raise PlanError(f"a {kind} must be a mapping of {', '.join(known)}; found {type(content).__name__}")
    check_keys(f"the {kind}", content, known)
    return content


def check_keys(what: str, found: dict[Any, Any], known: tuple[str, ...]) -> None:
    """Raise an error for a key that is not in *known*."""
    for key in found:
        if key not in known:
            raise PlanError(f"{what} has the unknown key {shown(key)}; known keys are {', '.join(known)}")
