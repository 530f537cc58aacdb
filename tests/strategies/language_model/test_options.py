"""Option groups are dataclasses or mappings, and ranks compare their fields."""

from __future__ import annotations

from typing import Any

from lightning_pipe.strategies.language_model.options import option_pairs
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy


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
