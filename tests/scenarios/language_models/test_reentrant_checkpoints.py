"""Layers that recompute themselves by PyTorch's function, under schedules whose backwards run in two parts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.run.stage_runner import StageHooks, StageRunner
from tests.distributed import run_ranks
from tests.strategies.llm_cases import (
    SEED,
    Block,
    TinyHF,
    TinyLM,
    differing,
    hf_config,
    microbatches_of,
    row_batches,
)


class Recomputed(Block):
    """A layer that recomputes itself by PyTorch's function while it trains."""

    use_reentrant = True

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not self.training:
            return super().forward(x, mask)
        output: Tensor = checkpoint(super().forward, x, mask, use_reentrant=self.use_reentrant)
        return output


class RecomputedOnce(Recomputed):
    use_reentrant = False


class OfLayers(StageHooks):
    """The model of ``Tiny`` with other layers after the first two."""

    def __init__(self, layer: type[Block]) -> None:
        self.layer = layer

    def build_model(self) -> nn.Module:
        model = TinyLM()
        for layer in list(model.layers)[2:]:
            layer.__class__ = self.layer
        return model


class HuggingFace(StageHooks):
    def build_model(self) -> nn.Module:
        model: Any = TinyHF(hf_config("llama")).build_model()
        model.activation_checkpointing_enable({"use_reentrant": True})
        return nn.Module.train(model)


ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


def recomputing(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    batch = microbatches_of(row_batches(1)[0], 4)
    refused: dict[str, StageHooks] = dict.fromkeys(ZERO_BUBBLE, OfLayers(Recomputed))
    for name, hooks in (refused | {"Hugging Face's": HuggingFace()}).items():
        schedule = name if name in ZERO_BUBBLE else "zbv_zero_bubble"
        runner = StageRunner(hooks, schedule)
        runner.forward_only(batch)
        with pytest.raises(SetupError) as caught:
            runner.forward_backward(batch)
        found[name] = str(caught.value)
    cases: dict[str, tuple[type[Block], str, dict[str, Any]]] = {
        "plain": (Block, "zbv_zero_bubble", {}),
        "not reentrant": (RecomputedOnce, "zbv_zero_bubble", {}),
        "activation_checkpoint": (Block, "zbv_zero_bubble", {"activation_checkpoint": {"mode": "full"}}),
        "1f1b": (Block, "1f1b", {}),
        "reentrant under 1f1b": (Recomputed, "1f1b", {}),
    }
    for case, (layer, schedule, options) in cases.items():
        torch.manual_seed(SEED)
        runner = StageRunner(OfLayers(layer), schedule, **options)
        runner.forward_backward(batch)
        found[case] = {name: one.grad for name, one in runner.model.named_parameters()}
    return found


def test_reentrant_checkpoints_are_refused_on_every_rank_where_backwards_are_in_two_parts_and_the_fixes_work() -> None:
    ranks = run_ranks(recomputing, 2)
    for found in ranks:
        for schedule in ZERO_BUBBLE:
            assert re.match(
                r"layers\.[23] of stage [123] calls torch.utils.checkpoint with use_reentrant=True, which"
                rf" schedule {schedule} cannot run",
                found[schedule],
            )
        assert re.match(r"model\.layers\.\d.* of stage \d calls .* use_reentrant=True", found["Hugging Face's"])
        for case in ("not reentrant", "activation_checkpoint"):
            assert differing(found[case], found["plain"]) == []
        assert differing(found["reentrant under 1f1b"], found["1f1b"]) == []
