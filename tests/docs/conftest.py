"""What a page's code does to the process is undone: it may ask Lightning to be quiet, and later tests listen."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from tests.recsys.conftest import one_rank

__all__ = ["one_rank"]


@pytest.fixture(autouse=True)
def _messages_are_as_loud_as_before() -> Iterator[None]:
    def loggers() -> dict[str, logging.Logger]:
        found = logging.root.manager.loggerDict.items()
        return {name: one for name, one in found if isinstance(one, logging.Logger)}

    before = {name: (one.level, one.disabled, one.propagate) for name, one in loggers().items()}
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        yield
    logging.disable(disabled)
    now = loggers()
    for name, (level, disabled_before, propagate) in before.items():
        now[name].disabled, now[name].propagate = disabled_before, propagate
        now[name].setLevel(level)
