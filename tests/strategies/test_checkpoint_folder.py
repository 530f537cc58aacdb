"""What one rank cannot do is raised on all, with the rank and what kind of error it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.engine.ranks.together import on_all_ranks
from tests.distributed import run_ranks

ERRORS: dict[str, Callable[[], Exception]] = {
    "user": lambda: KeyError("x"),
    "own": lambda: InputError("no rows: give some"),
    "system": lambda: OSError(28, "No space left on device"),
}


def failed_on_one(rank: int, world_size: int, kind: str) -> list[str]:
    """The message where the last rank fails, and where all do."""
    found = []
    for failing in ({world_size - 1}, set(range(world_size))):

        def work(failing: set[int] = failing) -> None:
            if rank in failing:
                raise ERRORS[kind]()

        with pytest.raises(SetupError) as raised:
            on_all_ranks(work, "it is not done")
        assert isinstance(raised.value.__cause__, type(ERRORS[kind]())) == (rank in failing)
        found.append(str(raised.value))
    return found


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("user", "it is not done: KeyError: 'x'"),
        ("own", "no rows: give some"),
        ("system", "it is not done: [Errno 28] No space left on device"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all_with_its_rank_and_kind(kind: str, message: str) -> None:
    for one, all_alike in run_ranks(failed_on_one, 2, kind):
        assert one == f"rank 1: {message}"
        assert all_alike == message
