"""What a model is given of a chunk, so that it knows where in the sequence it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.parallel.context_parallel_group import ContextParallelGroup, ModelInputs

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Two:
    """Stands for the group of two ranks, of which nothing is sent."""

    def size(self) -> int:
        return 2


def ranks(causal_lm: bool) -> ContextParallelGroup:
    group: Any = Two()
    return ContextParallelGroup(group, causal_lm=causal_lm)


def tokens_only(batch: Mapping[str, Any]) -> Inputs:
    return (batch["input_ids"],), {}


def whole_batch(batch: Mapping[str, Any]) -> Inputs:
    return (), {"batch": batch}


def filtered(batch: Mapping[str, Any]) -> Inputs:
    return (batch["input_ids"],), {key: value for key, value in batch.items() if key == "attention_mask"}


def part() -> dict[str, Tensor]:
    return {"input_ids": torch.ones(2, 3), "position_ids": torch.tensor([[3, 4, 5]])}


@pytest.mark.parametrize(
    "model_inputs",
    [
        lambda batch: ((batch["input_ids"],), {"at": batch["position_ids"] + 2}),
        lambda batch: ((batch["input_ids"],), {"at": batch.get("position_ids")}),
        lambda batch: ((), {**batch}),
        lambda batch: ((), dict(batch.items())),
        lambda batch: (tuple(batch.values()), {}),
        lambda batch: ((batch.pop("position_ids") * 2,), {}),
        whole_batch,
    ],
    ids=["changed", "get", "unpacked", "items", "values", "popped", "as it is"],
)
def test_a_model_that_is_given_the_positions_is_let_be(model_inputs: ModelInputs) -> None:
    local = part()
    arguments, keywords = ranks(causal_lm=False).build_model_inputs(local, model_inputs)
    assert (arguments, keywords) != ((), {})


@pytest.mark.parametrize("model_inputs", [tokens_only, filtered])
def test_a_model_that_would_count_from_0_in_every_chunk_is_refused(model_inputs: ModelInputs) -> None:
    with pytest.raises(InputError, match=r"parallel.cp=2 .* 'position_ids', so that the model cannot know"):
        ranks(causal_lm=False).build_model_inputs(part(), model_inputs)


def test_a_hugging_face_model_gets_the_positions_unasked_and_makes_no_mask() -> None:
    local = part()
    _, keywords = ranks(causal_lm=True).build_model_inputs(local, tokens_only)
    assert keywords["position_ids"] is local["position_ids"]
    assert keywords["attention_mask"].all()
    local["attention_mask"] = torch.tensor([[1, 1, 0], [1, 1, 1]])
    _, keywords = ranks(causal_lm=True).build_model_inputs(local, lambda batch: ((), dict(batch)))
    assert keywords["attention_mask"].all()
    # The loss still sees which tokens are real.
    assert not local["attention_mask"].all()


def test_older_code_of_hugging_face_gets_no_mask_at_all() -> None:
    group: Any = Two()
    older = ContextParallelGroup(group, causal_lm=True, model_ignores_ones_mask=False)
    local = part() | {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    _, keywords = older.build_model_inputs(local, lambda batch: ((), dict(batch)))
    assert keywords["attention_mask"] is None


def test_a_square_mask_goes_to_the_model_as_it_is() -> None:
    local = part() | {"attention_mask": torch.zeros(2, 1, 3, 3)}
    _, keywords = ranks(causal_lm=True).build_model_inputs(local, lambda batch: ((), dict(batch)))
    assert keywords["attention_mask"] is local["attention_mask"]
