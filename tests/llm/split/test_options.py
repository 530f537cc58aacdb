"""Options of the split are checked by name, and say one way to cut."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.split.options import SplitOptions


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layer_ranges": [0, 4]}, r"split.layer_ranges is \[0, 4\]; expected a list of pairs"),
        ({"layer_ranges": [[0, 1, 2]]}, "expected a list of pairs"),
        ({"layers_per_stage": 3}, "split.layers_per_stage is 3; expected a list"),
        ({"tied_embeddings": True}, "split.tied_embeddings is True; expected one of 'sum', 'refuse'"),
        ({"balance": "cost"}, "split.balance is 'cost'; expected one of 'layers', 'time', 'memory'"),
        ({"input_weight": -1}, "split.input_weight is -1; expected a whole number, 0 or more"),
        ({"output_weight": 1.5}, "split.output_weight is 1.5"),
        (
            {"layers_per_stage": [4], "balance": "time"},
            "split.layers_per_stage and split.balance are given",
        ),
        (
            {"layer_ranges": [[0, 4]], "layers_per_stage": [4]},
            "split.layers_per_stage and split.layer_ranges are given",
        ),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        SplitOptions(**given)
