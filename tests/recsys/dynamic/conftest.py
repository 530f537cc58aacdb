"""One process that forks the ranks that get killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.forked_ranks import Nursery, nursery


@pytest.fixture(scope="package")
def ranks() -> Iterator[Nursery]:
    with nursery(["tests.recsys.dynamic.killed_ranks"]) as made:
        yield made
