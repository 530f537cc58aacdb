"""Predictions of models in stages whose output is no single tensor: what one process gives for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import VOCABULARY, WIDTH, Tiny, TinyLM, llm, loader, row_batches, trainer


class _Head(torch.nn.Linear):
    """Gives logits beside a score for each row."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, VOCABULARY)
        self.kind = kind

    def forward(self, hidden: Tensor) -> Any:
        logits = super().forward(hidden)
        score = logits[:, 0].mean(1)
        return (logits, score) if self.kind == "tuple" else {"logits": logits, "score": score}


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
    return {f"tensor {number}": value for number, value in enumerate(tree_leaves(outputs))}


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "what prediction makes of it"])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_a_model_may_give_several_tensors(kind: str, whole: bool) -> None:
    expected = predicted(0, 1, kind, whole)
    rounded = Reference.of(lambda: leaves(predicted(0, 1, kind, whole)))
    for found in run_ranks(predicted, 2, kind, whole):
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            assert type(one) is type(other)
        assert rounded.differences(leaves(found)) == []
