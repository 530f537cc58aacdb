"""``balance="time"`` and ``"memory"``: layers are measured on the module's example when the trainer sets up."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import PlanError, SetupError
from lightning_pipe.pipe import balance_by_memory, balance_by_parameters
from lightning_pipe.strategies import InProcessPipelineStrategy, pipe_balance
from tests.strategies import cases

ROWS = 64


class Wide(nn.Module):
    """Has no parameters, and keeps many activations for its few inputs."""

    def forward(self, input: Tensor) -> Tensor:
        return input.repeat(1, 200).sin().view(len(input), 200, -1).mean(1)


class Model(pl.LightningModule):
    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.model = nn.Sequential(Wide(), Wide(), Wide(), nn.Linear(4, 4), nn.Linear(4, 1))
        self.example_input_array = example

    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        output: Tensor = self.model(input * self.scale + torch.rand(()))
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        rows: Any = torch.randn(8, 4)
        return torch.utils.data.DataLoader(rows, batch_size=8)


class WithoutForward(Model):
    forward = pl.LightningModule.forward

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch).mean()
        return loss


class Balance(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InProcessPipelineStrategy)
        self.found = strategy.pipe.balance


def balance(module: Model, by: Any, **options: Any) -> list[int]:
    """What the layers are shared out to, on two partitions."""
    seen = Balance()
    strategy = InProcessPipelineStrategy(2, balance=by, parallel_devices=["cpu", "cpu"], **options)
    cases.trainer(strategy, callbacks=[seen], max_epochs=1).fit(module)
    return seen.found


@pytest.mark.parametrize("kind", [Model, WithoutForward])
def test_layers_are_shared_out_by_the_memory_they_take_on_the_example(kind: type[Model]) -> None:
    example = torch.randn(ROWS, 4)
    expected = balance_by_memory(kind().model, 2, example)
    assert expected != balance_by_parameters(kind().model, 2)
    assert balance(kind(example), "memory") == expected
    assert balance(kind((example,)), "memory") == expected
    assert balance(kind(), "parameters") == balance(kind(), None) == balance_by_parameters(kind().model, 2)


def test_layers_are_shared_out_by_the_time_they_take_on_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def keep(layers: nn.Sequential, partitions: int, sample: Tensor, **options: Any) -> list[int]:
        asked.append((len(layers), partitions, tuple(sample.shape), options))
        return [2, 3]

    monkeypatch.setattr(pipe_balance, "balance_by_time", keep)
    assert balance(Model({"input": torch.randn(ROWS, 4), "other": torch.zeros(1)}), "time") == [2, 3]
    assert asked == [(5, 2, (ROWS, 4), {"device": torch.device("cpu")})]


def test_measuring_leaves_no_trace_in_training() -> None:
    def trained(by: Any) -> Model:
        torch.manual_seed(3)
        module = Model(torch.randn(ROWS, 4))
        strategy = InProcessPipelineStrategy(2, balance=by, parallel_devices=["cpu", "cpu"])
        cases.trainer(strategy, max_epochs=1).fit(module)
        assert not module.model._forward_pre_hooks
        return module

    by_hand = trained(balance_by_memory(Model().model, 2, torch.randn(ROWS, 4)))
    measured = trained("memory")
    for one, other in zip(by_hand.parameters(), measured.parameters(), strict=True):
        assert torch.equal(one, other)


class Elsewhere(Model):
    def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Model(), "Model has no example_input_array. Set it to an input with about as many rows as a micro-batch"),
        (Elsewhere(torch.ones(2, 4)), "forward of Elsewhere does not call them"),
        (WithoutForward((torch.ones(2, 4), torch.ones(2, 4))), "the first takes 2 inputs; expected one input"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_the_module_is_as_it_was(module: Model, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        balance(module, "time")
    assert isinstance(module.model, nn.Sequential)
    assert not module.model._forward_pre_hooks


def test_a_balance_by_something_else_is_refused() -> None:
    with pytest.raises(PlanError, match=r"balance is 'flops'; expected .* one of 'parameters', 'time', 'memory'"):
        InProcessPipelineStrategy(2, balance="flops")  # type: ignore[arg-type]
