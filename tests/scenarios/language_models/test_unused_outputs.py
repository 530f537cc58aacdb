"""Gradients of parameters that only an unused output of a stage depends on, which docs/promises.md describes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_pipe.llm.run.stage_runner import StageHooks, StageRunner
from tests.distributed import run_ranks

VOCABULARY, WIDTH = 11, 6


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(ids)
        return hidden, self.unused(hidden)


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        output: Tensor = self.head(pair[0])
        return output


class Hooks(StageHooks):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Start(), End())


def gradients(rank: int, world: int) -> dict[str, Tensor | None]:
    runner = StageRunner(Hooks(), "1f1b")
    tokens = torch.arange(10).view(2, 5)
    runner.forward_backward([{"input_ids": tokens, "labels": tokens}] * 2)
    return {name: parameter.grad for name, parameter in runner.model.named_parameters()}


def test_parameters_of_an_output_that_the_next_stage_does_not_use_have_gradients_of_zero() -> None:
    first = run_ranks(gradients, 2)[0]
    for name in ("0.unused.weight", "0.unused.bias"):
        gradient = first[name]
        assert gradient is not None
        assert not gradient.any()
    tokens, alone = torch.arange(10).view(2, 5), nn.Sequential(Start(), End())
    alone(tokens).sum().backward()
    assert alone.get_parameter("0.unused.weight").grad is None
