from __future__ import annotations

import pytest

from lightning_pipe.engine import InputError, PlanError, SetupError, TaskError


def test_a_failed_task_says_where_and_what() -> None:
    error = TaskError("EmbForward", 3, 1, 2, ValueError("no row 7"))
    assert error.summary == "task 'EmbForward' of iteration 3 (stage 1) failed on rank 2"
    assert str(error) == f"{error.summary} with ValueError: no row 7"
    assert (error.task, error.iteration, error.stage, error.rank) == ("EmbForward", 3, 1, 2)


def test_an_error_without_a_text_can_be_reported() -> None:
    class Untold(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert str(TaskError("H2D", 0, 0, 0, Untold())).endswith("with Untold: its text cannot be read: ValueError")


@pytest.mark.parametrize(
    ("kind", "builtin"), [(PlanError, ValueError), (InputError, ValueError), (SetupError, RuntimeError)]
)
def test_an_error_is_also_what_python_would_raise(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
