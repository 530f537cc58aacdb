"""What is public changes only where somebody means it to."""

from __future__ import annotations

import difflib

from tests.public_api import KEPT, PACKAGES, lines


def test_the_public_api_is_what_the_last_release_had_or_what_was_agreed_since() -> None:
    found, kept = list(lines()), KEPT.read_text(encoding="utf-8").splitlines()
    changes = "\n".join(difflib.unified_diff(kept, found, "tests/public_api.txt", "found", lineterm="", n=0))
    assert not changes, (
        f"the public API has changed:\n{changes}\nIf that is meant, write it down with `python -m tests.public_api >"
        " tests/public_api.txt`, and say in CHANGELOG.md what users of the old one do"
    )


def test_every_room_with_public_names_is_in_it() -> None:
    text = KEPT.read_text(encoding="utf-8")
    assert all(f"lightning_pipe.{room}." in text for room in PACKAGES)
