"""What tests of this folder share: both ways of the library, and a process that forks the ranks that get killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_pipe.recsys.kernels import native
from tests.scenarios.faults.forked_ranks import Nursery, nursery


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways, for what is made in the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_PIPE_NATIVE", "1" if request.param == "compiled" else "0")
        native.load_native_library.cache_clear()
        assert (native.load_native_library() is not None) == (request.param == "compiled")
        yield request.param
    native.load_native_library.cache_clear()


@pytest.fixture(scope="package")
def ranks() -> Iterator[Nursery]:
    with nursery(["tests.recsys.dynamic.killed_ranks"]) as made:
        yield made
