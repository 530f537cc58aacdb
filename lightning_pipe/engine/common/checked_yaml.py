"""YAML that a person wrote, read with an eye on slips that YAML lets pass, and on files made to harm.

YAML is a language with references: a page of it may stand for more than any memory holds. So everything is counted
while the text is read, before a value is made of it, and only plain text, numbers and truth values are known: no dates,
no numbers to the base of 60, no tags.

Tested in ``tests/scenarios/fuzzing/test_yaml_files.py``.
"""

from __future__ import annotations

from typing import Any

import yaml

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import printable, shown

__all__ = ["check_keys", "load_mapping"]

# A plan of a hundred tasks has 15 kB, 2,000 values, four levels. All that these allow is read in a second.
_MOST_CHARACTERS = 2**18
_MOST_VALUES = 20_000
_DEEPEST = 16
_LONGEST = 1_000  # characters of one text
_MOST_DIGITS = 40  # of a number: Python's own limit, of 4,300, is an error without a place

_TAG = "tag:yaml.org,2002:"
_UNKNOWN = ("timestamp", "value")  # of YAML's types: taken for text


class _Loader(yaml.SafeLoader):
    """Counts while it composes, aliases as what they stand for.

    Args:
        text: of the file.
        kind: what it is, for messages.
    """

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self._kind = kind
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}  # by the id of a node that is complete

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
                self._refuse(f"*{event.anchor} is a part of itself", event)
            self._count(self._sizes[id(node)], event)
            return node
        if event.tag not in (None, "!", f"{_TAG}str"):
            self._refuse(f"the tag {shown(event.tag)}; leave it out, text and numbers need none", event)
        if self._depth == _DEEPEST:
            self._refuse(f"more than {_DEEPEST} levels; a {self._kind} needs 4", event)
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
            # A merge ("<<: *defaults") is no key of its own, and what it brings may be said again.
            if key.tag == f"{_TAG}merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._refuse("a list or mapping as a key; write a name", key)
            name = self.construct_object(key)
            if name in seen:
                self._refuse(f"{shown(name)} twice", key, "says")
            seen.add(name)
        return node

    def _count(self, values: int, where: Any) -> None:
        self._values += values
        if self._values > _MOST_VALUES:
            self._refuse(f"more than {_MOST_VALUES} values, those that aliases repeat included", where)

    def _refuse(self, what: str, where: Any, verb: str = "has") -> None:
        hint = "; say it once" if verb == "says" else ""
        raise PlanError(f"the {self._kind} {verb} {what} (line {where.start_mark.line + 1}){hint}")


def load_mapping(text: str, kind: str, known: tuple[str, ...], *, compare: str) -> dict[Any, Any]:
    """The mapping that YAML *text* holds.

    Args:
        text: of the file.
        kind: what it is, for messages: "plan".
        known: its keys.
        compare: what shows how such a file looks, for messages.

    Raises:
        PlanError: not YAML; no mapping; a key that is unknown or there twice; more than a file of this kind needs.
    """
    if len(text) > _MOST_CHARACTERS:
        raise PlanError(f"the {kind} has {len(text)} characters; expected at most {_MOST_CHARACTERS}")
    try:
        loader = _Loader(text, kind)
        content = loader.get_single_data()
    except PlanError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # a ValueError of 0x_, which YAML takes for a number
        said = printable(str(error)[:_LONGEST])
        raise PlanError(f"the {kind} is not valid YAML: {said}; compare it with {compare}") from error
    if not isinstance(content, dict):
        raise PlanError(f"a {kind} is a mapping of {', '.join(known)}; found {type(content).__name__}")
    check_keys(f"the {kind}", content, known)
    return content


def check_keys(what: str, found: dict[Any, Any], known: tuple[str, ...]) -> None:
    """Refuse a key that is not among *known*.

    Args:
        what: has the keys, for the message.
        found: by key.
        known: the keys that there may be.

    Raises:
        PlanError: there is one.
    """
    for key in found:
        if key not in known:
            raise PlanError(f"{what} has the unknown key {shown(key)}; known keys are {', '.join(known)}")
