"""Option groups are dataclasses or mappings, and ranks compare their fields."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.run.options import flatten_option_fields
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy


def test_ranks_compare_each_field_by_its_name() -> None:
    def pairs(**options: Any) -> dict[str, str]:
        return dict(flatten_option_fields("", LLMPipelineStrategy(**options)._options))

    given, other = pairs(parallel={"tp": 2}, schedule="gpipe"), pairs(split={"balance": "time"})
    differing = {name: (given[name], other[name]) for name in given if given[name] != other[name]}
    assert differing == {
        "schedule": ("'gpipe'", "'1f1b'"),
        "parallel.tp": ("2", "1"),
        "split.balance": ("'layers'", "'time'"),
    }


def test_sequences_whose_rows_are_not_the_first_dimension_are_not_cut_over_context_ranks() -> None:
    moved = {"chunk_dims": {"position_ids": 1, "bias": 1}}
    LLMPipelineStrategy(batching=moved)
    LLMPipelineStrategy(batching={"chunk_dims": {"position_ids": None, "bias": 1}}, parallel={"cp": 2})
    with pytest.raises(SetupError, match=r"moves the rows of position_ids, and parallel.cp=2 cuts .* Transpose"):
        LLMPipelineStrategy(batching=moved, parallel={"cp": 2})
