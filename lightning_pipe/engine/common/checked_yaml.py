"""Reader for hand-written YAML, which refuses repeated keys: YAML itself would silently use the last value."""

from __future__ import annotations

from typing import Any

import yaml

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import printable, shown

_MOST_CHARACTERS = 2**18  # a plan of a hundred tasks has 15 kB


class _Loader(yaml.SafeLoader):
    """YAML loader without aliases, by which a short file could expand to more values than fit in memory."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _problem(f"found the alias *{event.anchor}; write the value itself", event)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            names = [self.construct_object(key) for key, _ in node.value]
            place, name = next((place, name) for place, name in enumerate(names) if name in names[:place])
            raise _problem(f"the key {shown(name)} repeats; write it once", node.value[place][0])
        return mapping


def _problem(what: str, where: Any) -> yaml.YAMLError:
    return yaml.YAMLError(f"{what} (line {where.start_mark.line + 1})")


def load_mapping(text: str, kind: str, known: tuple[str, ...], *, compare: str) -> dict[Any, Any]:
    """Read the mapping in YAML *text*."""
    if len(text) > _MOST_CHARACTERS:
        raise PlanError(f"the {kind} has {len(text)} characters; expected at most {_MOST_CHARACTERS}")
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: PyYAML resolves "0x_" as a number
        said = printable(str(error)[:1000])
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
