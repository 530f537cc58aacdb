"""Arguments that have a new name."""

from __future__ import annotations

import inspect
import warnings

import pytest

from lightning_pipe.engine.common.renamed_argument import renamed_argument


@renamed_argument("before", "after")
def double(number: int, *, after: int = 0) -> int:
    """Return both."""
    return 2 * number + after


def test_the_old_name_warns_and_is_passed_under_the_new_one() -> None:
    with pytest.warns(FutureWarning, match="double: the argument 'before' is now called 'after'") as caught:
        assert double(2, before=3) == 7  # type: ignore[call-arg]
    assert caught[0].filename == __file__


def test_the_new_name_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(2, after=3) == 7


def test_the_signature_has_the_new_name_alone() -> None:
    assert list(inspect.signature(double).parameters) == ["number", "after"]


def test_both_names_are_an_error_as_any_repeated_argument_is() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'after'"):
        double(2, after=1, before=3)  # type: ignore[call-arg]
