"""The list of test files that take longest names files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONGEST


@pytest.mark.parametrize("path", LONGEST, ids=lambda path: path.stem)
def test_a_file_that_is_said_to_take_longest_exists(path: Path) -> None:
    assert path.is_file()
