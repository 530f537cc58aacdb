"""What a configuration may give for a group of options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.plans.option_groups import option_group


@dataclass(frozen=True)
class Colours:
    sky: str = "blue"
    grass: str = "green"


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, Colours()), ({"sky": "grey"}, Colours("grey")), (Colours(grass="brown"), Colours(grass="brown"))],
)
def test_a_group_is_given_as_itself_as_a_mapping_or_not_at_all(given: Any, expected: Colours) -> None:
    assert option_group(Colours, "colours", given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sky": "grey", "sea": "red"}, "colours has 'sea'; expected only sky, grass"),
        ("grey", "colours is 'grey'; expected a mapping of sky, grass, or a Colours"),
    ],
)
def test_what_is_no_such_group_is_refused_with_its_fields(given: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        option_group(Colours, "colours", given)
