"""Names and values of other people's files in messages: short, and without what a terminal would obey.

Tested in ``tests/scenarios/fuzzing/test_yaml_files.py``.
"""

from __future__ import annotations

import reprlib

__all__ = ["printable", "shown"]

_MOST = 200  # characters


class _Short(reprlib.Repr):
    """A ``repr`` that looks at a few entries only: a list of ten names may stand for a billion."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict, self.maxstring, self.maxlong, self.maxother = 6, 100, 60, 100


def shown(value: object) -> str:
    """*value* as Python writes it, at most a few hundred characters: ``repr`` escapes what cannot be printed."""
    text = _Short().repr(value)
    return text if len(text) <= 2 * _MOST else f"{text[:_MOST]}...{text[-_MOST:]}"


def printable(text: str) -> str:
    """*text* with every character escaped that is neither printable nor a line's end.

    Those are control characters, which begin a terminal's commands, and the marks that reverse what follows them.
    """
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii") for one in text
    )
