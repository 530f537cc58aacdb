"""YAML that a person wrote, read with an eye on slips that YAML itself lets pass."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from lightning_pipe.engine.errors import PlanError

__all__ = ["check_keys", "load_mapping"]


def load_mapping(text: str, kind: str, known: tuple[str, ...], *, compare: str) -> dict[Any, Any]:
    """The mapping that YAML *text* holds.

    Args:
        text: of the file.
        kind: what it is, for messages: "plan".
        known: its keys.
        compare: what shows how such a file looks, for messages.

    Raises:
        PlanError: it is not YAML, no mapping, or has a key that is unknown or there twice.
    """

    class Loader(yaml.SafeLoader):
        """Refuses a repeated key, of which YAML's own loader silently keeps the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            # A merge ("<<: *defaults") is no key of its own, and what it brings may be said again.
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if not key.tag.endswith(":merge")]
            for key in keys:
                if keys.count(key) > 1:
                    raise PlanError(f"the {kind} says {key!r} twice (line {node.start_mark.line + 1}); say it once")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise PlanError(f"the {kind} is not valid YAML: {error}; compare it with {compare}") from error
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
            raise PlanError(f"{what} has the unknown key {key!r}; known keys are {', '.join(known)}")
