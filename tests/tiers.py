"""Tiers of tests: ``make test`` leaves out the tests marked as exhaustive or long, ``make test-all`` the long ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

# Each has an option of its own name, which asks for those before it, too.
TIERS = {
    "exhaustive": "all combinations of what other tests sample, long scenarios",
    "long": "minutes of soaking each",
}


def left_out(config: pytest.Config) -> list[str]:
    """The markers whose tests this run of pytest leaves out."""
    markers = list(TIERS)
    asked = [place for place, marker in enumerate(markers) if config.getoption(f"--{marker}")]
    return markers[max(asked, default=-1) + 1 :]


# Whether this run of pytest has the exhaustive tests; False in processes that tests start.
_exhaustive = [False]


def begin(config: pytest.Config) -> None:
    """Tell `examples` which tests this run of pytest has. Called before test modules are imported."""
    _exhaustive[0] = "exhaustive" not in left_out(config)


def examples(often: int, count: int) -> int:
    """Number of examples in a test: *often*, or *count* with ``--exhaustive``. For decorators and constants."""
    return count if _exhaustive[0] else often


def sampled(cases: Iterable[T], often: Callable[[T], bool], ids: Callable[[T], str] | None = None) -> list[Any]:
    """Parameters of a test or of a fixture, of which the others are marked as exhaustive.

    Args:
        cases: all of them.
        often: whether a case is one that ``make test`` runs.
        ids: names of the cases; pytest's own names if left out.
    """
    return [
        pytest.param(case, marks=() if often(case) else (pytest.mark.exhaustive,), id=ids(case) if ids else None)
        for case in cases
    ]


def sampled_rows(
    cases: Iterable[tuple[Any, ...]],
    often: Callable[[tuple[Any, ...]], bool],
    ids: Callable[[tuple[Any, ...]], str] | None = None,
) -> list[Any]:
    """As `sampled`, for tests of several parameters."""
    return [
        pytest.param(*case, marks=() if often(case) else (pytest.mark.exhaustive,), id=ids(case) if ids else None)
        for case in cases
    ]


def wanted(config: pytest.Config, cases: Iterable[T], often: Callable[[T], bool]) -> list[T]:
    """Those of the cases that this run of pytest has tests of: for a fixture that computes them all at once."""
    return [case for case in cases if "exhaustive" not in left_out(config) or often(case)]
