"""Text from untrusted files for messages: shortened, and without terminal control sequences."""

from __future__ import annotations

import reprlib

_MOST = 200  # characters


class _ShortRepr(reprlib.Repr):
    """``repr`` limited to a few entries: YAML aliases can make a list of ten names stand for a billion."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict, self.maxstring, self.maxlong, self.maxother = 6, 100, 60, 100


def short_repr(value: object) -> str:
    """Shortened ``repr`` of *value*, at most a few hundred characters. ``repr`` escapes unprintable characters."""
    text = _ShortRepr().repr(value)
    return text if len(text) <= 2 * _MOST else f"{text[:_MOST]}...{text[-_MOST:]}"


def escape_unprintable(text: str) -> str:
    """Escape control characters and marks that change the text direction; line ends stay."""
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
