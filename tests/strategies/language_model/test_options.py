"""Option groups are dataclasses or mappings, and ranks compare their fields."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.parallel.dimensions import ParallelDims
from lightning_pipe.strategies.language_model.options import option_group, option_pairs
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy


@pytest.mark.parametrize("given", [ParallelDims(tp=2), {"tp": 2}])
def test_a_group_is_given_as_itself_or_as_a_mapping(given: Any) -> None:
    assert option_group(ParallelDims, "parallel", given) == ParallelDims(tp=2)


def test_a_group_that_is_left_out_has_its_defaults() -> None:
    assert option_group(ParallelDims, "parallel", None) == ParallelDims()


@pytest.mark.parametrize(
    ("given", "words"),
    [(2, "parallel is 2; expected a mapping of pp, .* or a ParallelDims"), ({"ppp": 2}, "'ppp'; expected only pp, ")],
)
def test_other_values_and_unknown_fields_are_refused(given: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        option_group(ParallelDims, "parallel", given)


def test_ranks_compare_each_field_by_its_name() -> None:
    def pairs(**options: Any) -> dict[str, str]:
        return dict(option_pairs("", LLMPipelineStrategy(**options)._options))

    given, other = pairs(parallel={"tp": 2}, schedule="gpipe"), pairs(split={"split_policy": max})
    differing = {name: (given[name], other[name]) for name in given if given[name] != other[name]}
    assert differing == {
        "schedule": ("'gpipe'", "'1f1b'"),
        "parallel.tp": ("2", "1"),
        "split.split_policy": ("None", "max"),  # a function by its name: its address differs between ranks
    }
