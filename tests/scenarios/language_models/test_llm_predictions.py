"""Models in stages whose outputs or inputs are no single tensor of rows: what one process makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    MAX_LENGTH,
    VOCABULARY,
    WIDTH,
    Tiny,
    TinyLM,
    Trained,
    fit,
    llm,
    loader,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    train_with_lightning,
    trainer,
    values_of,
)


class _Head(torch.nn.Linear):
    """Gives logits beside a score for each row."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, VOCABULARY)
        self.kind = kind

    def forward(self, hidden: Tensor) -> Any:
        logits = super().forward(hidden)
        score = logits[:, 0].mean(1)
        return (logits, score, None) if self.kind == "tuple" else {"logits": logits, "score": score, "cache": None}


class _Predicting(Tiny):
    def __init__(self, kind: str, whole: bool) -> None:
        super().__init__()
        self.kind, self.whole = kind, whole

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(4)
        model = TinyLM(self.layers)
        model.head = _Head(self.kind)
        return model

    def prediction(self, output: Any, micro_batch: Any) -> Any:
        if self.whole:
            return output
        logits: Tensor = output[0] if self.kind == "tuple" else output["logits"]
        return logits.argmax(-1)


def predicted(rank: int, world: int, kind: str, whole: bool) -> Any:
    # Five rows do not fill the micro-batches of two, and sequences of several lengths are padded.
    return trainer("auto" if world == 1 else llm("1f1b", 2)).predict(
        _Predicting(kind, whole), loader(row_batches(2, 5))
    )


def leaves(outputs: Any) -> dict[str, Tensor]:
    found = [value for value in tree_leaves(outputs) if value is not None]
    return {f"tensor {number}": value for number, value in enumerate(found)}


@pytest.mark.parametrize(("kind", "whole"), [("tuple", True), ("dict", False)])
def test_a_model_may_give_several_tensors(kind: str, whole: bool) -> None:
    expected = predicted(0, 1, kind, whole)
    rounded = Reference.of(lambda: leaves(predicted(0, 1, kind, whole)))
    for found in run_ranks(predicted, 2, kind, whole):
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            assert type(one) is type(other)
            assert len(one) == len(other)
        assert rounded.differences(leaves(found)) == []


class _Biased(TinyLM):
    """Takes two positions of each token, (2, rows, length), and one bias of attention for all rows."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        length = input_ids.shape[1]
        x = self.embedding(input_ids, position_ids[0] + position_ids[1])
        for layer in self.layers:
            x = layer(x, bias[:length, :length])
        out: Tensor = self.head(self.norm(x))
        return out


class _Chunked(Tiny):
    def build_model(self) -> torch.nn.Module:
        return _Biased(self.layers)


def biased_batches() -> list[dict[str, Tensor]]:
    batches = row_batches(3, 7)
    generator = torch.Generator().manual_seed(3)
    later = torch.full((MAX_LENGTH, MAX_LENGTH), float("-inf")).triu(1)
    for batch in batches:
        shape = (2, *batch["input_ids"].shape)
        batch["position_ids"] = torch.randint(MAX_LENGTH // 2, shape, generator=generator)
        batch["bias"] = later + torch.rand(MAX_LENGTH, MAX_LENGTH, generator=generator)
    return batches


def chunked(rank: int, world: int) -> dict[str, Any]:
    module = _Chunked()
    fit(module, llm("1f1b", 2, chunk_dims={"position_ids": 1, "bias": None}), biased_batches())
    return results_of(Trained(module.losses, module.gradients, values_of(module.model)))


def test_rows_may_be_in_another_dimension_or_a_value_be_the_same_for_all_micro_batches() -> None:
    expected = Reference.of(lambda: results_of(train_with_lightning(_Chunked(), biased_batches())))
    assert not ranks_beyond_rounding(run_ranks(chunked, 2), expected)
