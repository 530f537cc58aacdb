"""Options of the suite: ``--shuffle`` fixes a random order by a seed; ``--exhaustive`` and ``--long`` add tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.conftest import LONGEST, pytest_collection_modifyitems
from tests.patience import HANG
from tests.tiers import TIERS

TESTS = [(f"file_{file}", number) for file in range(5) for number in range(4)]


def items(marked: dict[int, str] | None = None) -> list[Any]:
    """Tests, of which those with some numbers are marked."""
    marks = marked or {}
    return [
        SimpleNamespace(
            path=Path(file),
            nodeid=f"{file}::test_{number}",
            number=number,
            get_closest_marker=lambda marker, number=number: marks.get(number) == marker,
        )
        for file, number in TESTS
    ]


def config(**options: Any) -> Any:
    defaults: dict[str, Any] = {
        "--shuffle": None,
        **dict.fromkeys((f"--{marker}" for marker in TIERS), False),
    }
    given = defaults | {f"--{name}": value for name, value in options.items()}
    return SimpleNamespace(getoption=given.__getitem__, hook=mock.Mock())


def ordered(seed: int | None) -> list[tuple[str, int]]:
    found = items()
    pytest_collection_modifyitems(config(shuffle=seed), found)
    return [(str(item.path), item.number) for item in found]


@pytest.mark.parametrize(
    ("wanted", "left_out"), [((), [1, 3]), (("exhaustive",), [1]), (("long",), []), (("exhaustive", "long"), [])]
)
def test_exhaustive_and_long_tests_are_deselected_unless_they_are_wanted(
    wanted: tuple[str, ...], left_out: list[int]
) -> None:
    marked = {1: "long", 3: "exhaustive"}
    found, given = items(marked), config(**dict.fromkeys(wanted, True))
    pytest_collection_modifyitems(given, found)
    assert [item.number for item in found] == [number for number in range(4) if number not in left_out] * 5
    told = [call.kwargs["items"] for call in given.hook.pytest_deselected.call_args_list]
    assert [item.number for one in told for item in one] == left_out * 5


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


def test_the_files_that_take_longest_come_first_and_the_others_as_they_were() -> None:
    found = [
        SimpleNamespace(path=path, nodeid="", get_closest_marker=lambda marker: None)
        for path in (Path("a"), *LONGEST[::-1], Path("b"))
    ]
    pytest_collection_modifyitems(config(), found)  # type: ignore[arg-type]
    assert [item.path for item in found] == [*LONGEST, Path("a"), Path("b")]


@pytest.mark.parametrize("path", LONGEST, ids=lambda path: path.stem)
def test_a_file_that_is_said_to_take_longest_exists(path: Path) -> None:
    assert path.is_file()


def test_a_failed_test_is_reported_at_once_though_a_thread_of_it_waits_for_ever(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import _no_thread_is_left_behind, pytest_runtest_makereport\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import queue, threading\n"
        "def test_it():\n"
        "    given = queue.SimpleQueue()\n"
        "    threading.Thread(target=given.get, daemon=True, name='lightning_pipe worker').start()\n"
        "    assert not given, 'the reason'\n"
    )
    command = [sys.executable, *f"-m pytest -q -p no:cacheprovider --rootdir {tmp_path} {tmp_path}".split()]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG / 2)
    assert "the reason" in ended.stdout
    assert "1 failed" in ended.stdout
    assert "left threads behind" not in ended.stdout
