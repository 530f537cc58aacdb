"""Option values are checked by name, and groups of them may be mappings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number, parse_option_group


@pytest.mark.parametrize("value", [0, True, 1.0, "1", None])
def test_what_is_no_whole_number_or_too_small_is_refused_by_name(value: Any) -> None:
    with pytest.raises(SetupError, match=rf"size is {value!r}; expected a whole number, 1 or more"):
        check_whole_number("size", value, 1)


def test_a_number_may_be_the_least_one_or_left_out_where_it_is_optional() -> None:
    check_whole_number("size", 1, 1)
    check_whole_number("size", None, 1, optional=True)


@pytest.mark.parametrize("value", ["c", None, 1])
def test_what_is_no_choice_is_refused_with_the_choices(value: Any) -> None:
    with pytest.raises(SetupError, match=rf"way is {value!r}; expected one of 'a', True"):
        check_choice("way", value, ("a", True))


def test_choices_are_compared_by_type_too() -> None:
    check_choice("way", "a", ("a", True))
    check_choice("way", True, ("a", True))


@dataclass(frozen=True)
class Colors:
    sky: str = "blue"
    grass: str = "green"


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, Colors()), ({"sky": "gray"}, Colors("gray")), (Colors(grass="brown"), Colors(grass="brown"))],
)
def test_a_group_is_given_as_itself_as_a_mapping_or_not_at_all(given: Any, expected: Colors) -> None:
    assert parse_option_group(Colors, "colors", given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sky": "gray", "sea": "red"}, "colors has 'sea'; expected only sky, grass"),
        ("gray", "colors is 'gray'; expected a mapping of sky, grass, or a Colors"),
    ],
)
def test_what_is_no_such_group_is_refused_with_its_fields(given: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        parse_option_group(Colors, "colors", given)
