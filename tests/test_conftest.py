"""Options of the suite: ``--shuffle`` fixes a random order by a seed, ``--long`` adds the tests that take minutes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.conftest import pytest_collection_modifyitems

TESTS = [(f"file_{file}", number) for file in range(5) for number in range(4)]


def items(long: tuple[int, ...] = ()) -> list[Any]:
    """Tests, of which those with some numbers are marked as long."""
    return [
        SimpleNamespace(path=Path(file), number=number, get_closest_marker=lambda _, number=number: number in long)
        for file, number in TESTS
    ]


def config(**options: Any) -> Any:
    given = {"--shuffle": None, "--long": False} | {f"--{name}": value for name, value in options.items()}
    return SimpleNamespace(getoption=given.__getitem__, hook=mock.Mock())


def ordered(seed: int | None) -> list[tuple[str, int]]:
    found = items()
    pytest_collection_modifyitems(config(shuffle=seed), found)
    return [(str(item.path), item.number) for item in found]


@pytest.mark.parametrize("wanted", [False, True])
def test_long_tests_are_deselected_unless_they_are_wanted(wanted: bool) -> None:
    found, given = items(long=(1, 3)), config(long=wanted)
    pytest_collection_modifyitems(given, found)
    assert [item.number for item in found] == ([0, 1, 2, 3] if wanted else [0, 2]) * 5
    left_out = [] if wanted else [call.kwargs["items"] for call in given.hook.pytest_deselected.call_args_list]
    assert [item.number for one in left_out for item in one] == ([] if wanted else [1, 3] * 5)


def test_without_a_seed_the_order_stays() -> None:
    assert ordered(None) == TESTS


def test_a_seed_fixes_the_order_of_files_and_of_the_tests_of_each() -> None:
    found = ordered(1)
    assert sorted(found) == TESTS
    assert found == ordered(1) != ordered(2)
    files = [file for file, _ in found]
    assert files[::4] != sorted(files[::4])
    assert [number for _, number in found[:4]] != [0, 1, 2, 3]


def test_the_tests_of_a_file_stay_together() -> None:
    files = [file for file, _ in ordered(1)]
    assert all(len(set(files[first : first + 4])) == 1 for first in range(0, len(files), 4))
