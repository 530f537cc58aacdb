"""What layers cost: times by a clock that the test sets, and bytes that can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.measure.layer_bench import Pieces
from lightning_pipe.llm.measure.layer_costs import measure_costs
from lightning_pipe.llm.model.derived_config import derive_config
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from lightning_pipe.llm.model.module_config import ModuleConfig
from tests.distributed import run_ranks

WIDTH, VOCABULARY, ROWS, LENGTH = 8, 11, 2, 5
CONFIG = ModuleConfig(3, "layers", ("embedding",), ("head",))
HIDDEN = ROWS * LENGTH * WIDTH * 4  # bytes


class Clock:
    """Goes forward when it is told to, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.forwards: list[str] = []

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Passing(torch.autograd.Function):
    """Takes time in forward and twice as much in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        CLOCK.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        CLOCK.now += 2 * ctx.seconds
        return gradients[0], None


class Slow(nn.Module):
    """A linear layer after which some time has passed."""

    def __init__(self, name: str, seconds: float, out: int = WIDTH, index: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, out)
        self.name = name
        self.seconds = seconds
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.forwards.append(self.name)
        y: Tensor = Passing.apply(self.linear(x), self.seconds)
        return y


class Model(nn.Module):
    """Takes a second in each forward, whatever is left of it."""

    def __init__(self, seconds: tuple[float, ...] = (1.0, 2.0, 3.0), names: str = "abc") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            Slow(name, one, index=index) for index, (name, one) in enumerate(zip(names, seconds, strict=True))
        )
        self.head = Slow("head", 4.0, VOCABULARY)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        CLOCK.now += 1
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Plain(nn.Module):
    """Of which bytes can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.layers[2].register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ids() -> Tensor:
    return torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY


def loss_of(output: Tensor, part: nn.Module) -> Tensor:
    return output.sum()


def measure(model: nn.Module, **options: Any) -> Pieces[float]:
    CLOCK.forwards.clear()
    return measure_costs(model, CONFIG, (ids(),), {}, loss_of, clock=CLOCK, **options)


def test_time_is_of_forward_and_backward_without_what_every_stage_takes() -> None:
    costs = measure(Model())
    assert costs == Pieces(0.0, 0.0, (3.0, 6.0, 9.0), 12.0)


def test_layers_that_are_alike_are_measured_once() -> None:
    measure(Model((2.0, 2.0, 2.0), "aaa"))
    alike = CLOCK.forwards.count("a")
    measure(Model((2.0, 2.0, 2.0), "aba"))
    assert CLOCK.forwards.count("a") == CLOCK.forwards.count("b") == alike


def test_memory_is_of_parameters_gradients_states_buffers_and_what_is_kept_for_backward() -> None:
    linear = (WIDTH * WIDTH + WIDTH) * 4
    costs = measure(Plain(), unit="memory")
    assert costs.input == VOCABULARY * WIDTH * 4 * 4 + HIDDEN
    # What a linear layer gives is gone once the ReLU has made of it what both keep.
    assert costs.layers == (4 * linear + HIDDEN, linear + HIDDEN, 4 * linear + HIDDEN + 3 * 8)
    assert costs.output == VOCABULARY * WIDTH * 4 * 4 + 4  # and the loss


@pytest.mark.parametrize("unit", ["time", "memory"])
def test_a_model_on_the_meta_device_stays_there_and_costs_the_same(unit: Any) -> None:
    with parameters_on_meta():
        model = Model()
    assert measure(model, unit=unit) == measure(Model(), unit=unit)
    assert all(one.is_meta for one in model.layers.parameters())


def test_a_model_and_random_states_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    measure_costs(model, derive_config(model), (torch.randn(3, 4, generator=torch.Generator()),), {}, loss_of)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(model) == 3


def test_another_unit_is_refused() -> None:
    with pytest.raises(SetupError, match="the unit of costs is 'energy'; expected 'time' or 'memory'"):
        measure(Model(), unit="energy")


def fails(output: Tensor, part: nn.Module) -> Tensor:
    raise KeyError("labels")


def two_ranks(rank: int, world: int) -> tuple[Pieces[float], str, int]:
    seconds = (1.0, 2.0, 3.0) if rank == 0 else (5.0, 5.0, 5.0)
    costs = measure(Model(seconds), group=dist.group.WORLD)
    ran = len(CLOCK.forwards)
    try:
        measure_costs(Model(), CONFIG, (ids(),), {}, fails, group=dist.group.WORLD)
    except SetupError as error:
        return costs, str(error), ran
    return costs, "", ran


def test_all_ranks_get_what_the_first_has_measured_or_its_failure() -> None:
    found = run_ranks(two_ranks, 2)
    assert [costs for costs, _, _ in found] == [Pieces(0.0, 0.0, (3.0, 6.0, 9.0), 12.0)] * 2
    assert all("could not measure what layers cost: KeyError: 'labels'" in says for _, says, _ in found)
    assert found[0][2] > 0
    assert found[1][2] == 0
