"""One process that forks the ranks of all these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.faults.forked_ranks import Nursery, nursery


@pytest.fixture(scope="package")
def ranks() -> Iterator[Nursery]:
    modules = ("injected", "elastic_program", "left_behind")
    with nursery([f"tests.scenarios.faults.{module}" for module in modules]) as made:
        yield made
