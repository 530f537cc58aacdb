"""The API reference has every name that a room exports, and everything it lists is there."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.docs.pages import DOCS

ROOMS = ("callbacks", "engine", "loops", "pipe", "recsys", "strategies")
LISTED = {
    name
    for page in (DOCS / "api").glob("*.md")
    for name in re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("room", ROOMS)
def test_it_lists_what_the_room_exports(room: str) -> None:
    exported = {f"lightning_pipe.{room}.{name}" for name in importlib.import_module(f"lightning_pipe.{room}").__all__}
    assert exported <= LISTED
