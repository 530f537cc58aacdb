"""Reader for hand-written YAML. It refuses repeated keys, which YAML would drop, and references.

A short file with references can expand to more values than fit in memory.
"""

from __future__ import annotations

from typing import Any

import yaml

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import escape_unprintable, short_repr

_MOST_CHARACTERS = 2**17  # a plan of a hundred tasks has 15,000


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise self._make_marked_error("it has a reference (*name); write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        content = super().construct_mapping(node, deep)
        if len(content) < len(node.value):
            keys = [key.value for key, _ in node.value]
            repeated = next((key for key in keys if keys.count(key) > 1), keys[0])
            raise self._make_marked_error(f"it repeats the key {short_repr(repeated)}; write it once", node)
        return content

    def _make_marked_error(self, problem: str, node: yaml.Node | None = None) -> yaml.YAMLError:
        mark = self.get_mark() if node is None else node.start_mark
        return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def load_mapping(text: str, kind: str, allowed_keys: tuple[str, ...], *, compare: str) -> dict[Any, Any]:
    """Read the mapping with *allowed_keys* in YAML *text*; errors name the *kind* of file and point to *compare*."""
    if len(text) > _MOST_CHARACTERS:
        raise PlanError(f"the {kind} has {len(text)} characters; expected at most {_MOST_CHARACTERS}")
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or number that is none
        problem = escape_unprintable(str(error)[:1000])
        raise PlanError(f"the {kind} is not valid YAML: {problem}; compare it with {compare}") from error
    return check_mapping_keys(f"the {kind}", content, allowed_keys)


def check_mapping_keys(subject: str, content: Any, allowed_keys: tuple[str, ...]) -> dict[Any, Any]:
    """Return *content* if it is a mapping with *allowed_keys*; *subject* is its name in the error message."""
    if not isinstance(content, dict):
        raise PlanError(f"{subject} is {short_repr(content)}; expected a mapping of {', '.join(allowed_keys)}")
    for key in content:
        if key not in allowed_keys:
            raise PlanError(
                f"{subject} has the unknown key {short_repr(key)}; known keys are {', '.join(allowed_keys)}"
            )
    return content
