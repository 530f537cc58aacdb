"""What each kind of work takes: times by a clock that the test sets, bytes that equal those of a real run."""

from __future__ import annotations

import gc
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_costs import measure_layer_costs
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork, measure_footprints, measure_layer_times
from lightning_pipe.llm.measure.live_bytes import LiveBytes
from lightning_pipe.llm.model.activation_checkpoint import apply_activation_checkpoint
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.stage_module import StageModule, copy_model_sharing_tensors, make_stage_module
from tests.distributed import run_ranks

WIDTH, VOCABULARY, ROWS, LENGTH = 8, 11, 2, 5
HIDDEN = ROWS * LENGTH * WIDTH * 4  # bytes
CONFIG = PPModuleConfig(2, "layers", ("embedding",), ("head",))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Passing(torch.autograd.Function):
    """Takes time: in forward, for the gradient of what is passed, and for that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: tuple[float, float]) -> Tensor:
        ctx.seconds = seconds
        CLOCK.now += 1.0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        CLOCK.now += ctx.seconds[0]
        weights = ctx.needs_input_grad[1]
        CLOCK.now += ctx.seconds[1] if weights else 0.0
        return gradients[0], gradients[0].sum() if weights else None, None


class Weight(torch.autograd.Function):
    """Its backward takes time, and gives a gradient to a weight alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        CLOCK.now += ctx.seconds
        return gradients[0], None


class Slow(nn.Module):
    """A second forward, two for the gradient of its input, four for that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Passing.apply(x, self.weight.detach(), (2.0, 0.0))
        return y + Weight.apply(self.weight, 4.0)


class Timed(nn.Module):
    """A quarter of a second in each forward, whatever is left of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Slow() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        CLOCK.now += 0.25
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.layers[1].register_buffer("seen", torch.zeros(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ids() -> Tensor:
    return torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY


def loss_of(output: Tensor, part: nn.Module) -> Tensor:
    return output.square().sum()


def footprints(model: nn.Module, **options: Any) -> ModelPieceResults[Footprint]:
    return measure_footprints(model, CONFIG, (ids(),), {}, loss_of, **options)


def test_each_kind_of_work_is_timed_by_itself() -> None:
    found = measure_layer_times(Timed(), CONFIG, (ids(),), {}, loss_of, clock=CLOCK)
    assert found.layers == (LayerWork(1.25, 6.0, 2.0, 4.0),) * 2
    assert found.empty == LayerWork(0.25, 0.0, 0.0, 0.0)


def test_measuring_leaves_model_and_random_numbers_as_they_are() -> None:
    with parameters_on_meta():
        model = Plain()
    state = torch.get_rng_state()
    measure_layer_times(model, CONFIG, (ids(),), {}, loss_of)
    footprints(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(one.is_meta and one.grad is None for one in model.parameters())


def test_bytes_and_operations_can_be_counted_by_hand() -> None:
    found = footprints(Plain())
    layer = found.layers[0]
    size = 4 * (2 * WIDTH * 4 * WIDTH + 5 * WIDTH)
    assert (layer.parameters, layer.gradients, layer.buffers, layer.output) == (size, size, 0, HIDDEN)
    assert found.layers[1].buffers == 3 * 4
    # What goes into and comes out of GELU, and the output.
    assert layer.after_forward == (4 + 4 + 1) * HIDDEN
    products = 2 * 2 * ROWS * LENGTH * WIDTH * 4 * WIDTH
    assert layer.operations == LayerWork(products, 2 * products, products, products)
    assert found.empty.after_forward == 0


class Attention(nn.Linear):
    def __init__(self, causal: bool, narrow: int = 0) -> None:
        super().__init__(WIDTH, WIDTH)
        self.causal, self.narrow = causal, narrow

    def forward(self, x: Tensor) -> Tensor:
        one = super().forward(x)[:, None]
        values = one[..., self.narrow :]
        found = nn.functional.scaled_dot_product_attention(one, one, values, is_causal=self.causal)[:, 0]
        return nn.functional.pad(found, (0, self.narrow))


def test_half_of_causal_attention_is_counted() -> None:
    whole, half = Plain(), Plain()
    whole.layers = nn.ModuleList(Attention(causal=False) for _ in range(2))
    half.layers = nn.ModuleList(Attention(causal=True) for _ in range(2))
    linear = 2 * ROWS * LENGTH * WIDTH * WIDTH
    found, without = (footprints(model).layers[0].operations for model in (half, whole))
    assert without.forward == linear + 4 * ROWS * LENGTH**2 * WIDTH
    assert found.forward - linear == (without.forward - linear) / 2
    assert found.backward - 2 * linear == (without.backward - 2 * linear) / 2 > 0


def test_attention_with_narrow_values_is_padded_as_for_flash_attention() -> None:
    model = Plain()
    model.layers = nn.ModuleList(Attention(causal=True, narrow=WIDTH // 2) for _ in range(2))
    found = footprints(model).layers[0].operations
    assert found.forward == 2 * ROWS * LENGTH * WIDTH * WIDTH + 2 * ROWS * LENGTH**2 * WIDTH


class Grouped(nn.Module):
    """Two experts, with half of the tokens each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 3, dtype=torch.int32) * (ROWS * LENGTH // 2)
        return nn.functional.grouped_mm(x.flatten(0, 1), self.experts, offs=ends).view_as(x)


def test_products_of_experts_are_counted_without_their_values() -> None:
    model = Plain()
    model.layers = nn.ModuleList(Grouped() for _ in range(2))
    with parameters_on_meta():
        bare = Plain()
        bare.layers = nn.ModuleList(Grouped() for _ in range(2))
    found = footprints(bare).layers[0]
    products = 2 * ROWS * LENGTH * WIDTH * WIDTH
    assert found.operations == LayerWork(products, 2 * products, products, products)
    x = torch.zeros(ROWS, LENGTH, WIDTH, requires_grad=True)
    with LiveBytes() as live:
        output = model.layers[0](x)
        assert found.after_forward == live.current
    assert found.output == output.nbytes


class Measured:
    """A real stage of one layer, and what a real micro-batch leaves."""

    def __init__(self, mode: Literal["full", "selective"] | None) -> None:
        self.stage = make_stage_module(copy_model_sharing_tensors(Plain()), CONFIG, ["layers.0"], 1, 3).train()
        if mode is not None:
            apply_activation_checkpoint(self.stage, CONFIG.layer_fqns, mode)
        for one in self.stage.parameters():
            one.grad = torch.zeros_like(one)

    def whole(self) -> tuple[int, int, int]:
        x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
        gc.collect()
        with LiveBytes() as live:
            output = self.stage(x)
            kept, forward, live.peak = live.current, live.peak, live.current
            output.backward(torch.ones_like(output))
            return kept, forward, live.peak - kept

    def held(self) -> int:
        x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
        gc.collect()
        with LiveBytes() as live:
            output = self.stage(x).clone()
            gradient = torch.ones_like(output)
            groups = stage_backward_input([output], [gradient], [x], self.stage.parameters())[1]
            x.grad = None
            del output, gradient
            found = live.current
            stage_backward_weight(self.stage.parameters(), groups)
            return found


@pytest.mark.parametrize("mode", [None, "full", "selective"])
def test_bytes_without_memory_are_those_of_a_real_run(mode: Literal["full", "selective"] | None) -> None:
    def prepare(stage: StageModule) -> None:
        if mode is not None:
            apply_activation_checkpoint(stage, CONFIG.layer_fqns, mode)

    (found, _) = footprints(Plain(), prepare=prepare).layers
    real = Measured(mode)
    assert (found.after_forward, found.in_forward, found.in_backward) == real.whole()
    assert found.after_input_backward == real.held()


def test_layers_that_are_computed_again_keep_less_and_differ_from_those_that_are_not() -> None:
    model = Plain()
    model.layers[1]._buffers.clear()  # so that they are alike in all else
    found = footprints(
        model,
        prepare=lambda stage: apply_activation_checkpoint(stage, CONFIG.layer_fqns, "full", 2),
        varies=lambda index: index % 2,
    )
    again, not_again = found.layers
    assert again.after_forward < not_again.after_forward
    assert again.operations.backward > not_again.operations.backward


class Chooses(nn.Linear):
    """Asks how many rows there are of a kind."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chosen = rows.detach().abs().sum(-1).gt(0).nonzero()[:, 0]
        return x + super().forward(rows[chosen]).view_as(x)


def test_a_model_that_asks_for_values_gets_some() -> None:
    def loss_of_chosen(output: Tensor, part: nn.Module) -> Tensor:
        return output[output == output].square().sum()

    model = Plain()
    model.layers = nn.ModuleList(Chooses(WIDTH, WIDTH) for _ in range(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measure_footprints(model, CONFIG, (ids(),), {}, loss_of_chosen)
    assert found.layers[0].after_forward > found.layers[0].output == HIDDEN
    assert found.output.after_forward > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (
        measure_layer_costs(model, CONFIG, (ids(),), {}, loss_of_chosen, unit="memory").layers[0]
        > found.layers[0].after_forward
    )
    with pytest.raises(Exception, match="nonzero"):
        measure_footprints(model, CONFIG, (ids().to("meta"),), {}, loss_of_chosen)


# ---------------------------------------------------------------------- one number a layer


def costs(model: nn.Module, **options: Any) -> ModelPieceResults[float]:
    return measure_layer_costs(model, CONFIG, (ids(),), {}, loss_of, clock=CLOCK, **options)


def test_time_is_of_forward_and_backward_without_what_every_stage_takes() -> None:
    found = costs(Timed())
    assert (found.empty, found.layers) == (0.0, (7.0, 7.0))


def test_layers_that_are_alike_are_measured_once() -> None:
    before = CLOCK.now
    costs(Timed())
    alike, before = CLOCK.now - before, CLOCK.now
    other = Timed()
    other.layers[1].name = "other"  # type: ignore[assignment]
    costs(other)
    assert CLOCK.now - before > alike


def test_memory_is_of_parameters_gradients_states_buffers_and_what_is_kept_for_backward() -> None:
    found, of_footprints = costs(Plain(), unit="memory"), footprints(Plain())
    trained, frozen = Plain(), Plain()
    frozen.layers[0].requires_grad_(False)
    size = of_footprints.layers[0].parameters
    assert found.input == 4 * VOCABULARY * WIDTH * 4 + HIDDEN
    assert found.layers == (4 * size + 9 * HIDDEN, 4 * size + 9 * HIDDEN + 3 * 4)
    assert costs(trained, unit="memory").layers[0] - costs(frozen, unit="memory").layers[0] >= 3 * size


def fails(output: Tensor, part: nn.Module) -> Tensor:
    raise KeyError("labels")


def two_ranks(rank: int, world: int) -> tuple[ModelPieceResults[float], str]:
    model = Timed()
    if rank == 1:
        model.layers.append(Slow())  # what the other ranks would measure does not matter
    found = costs(model, group=dist.group.WORLD)
    with pytest.raises(SetupError) as caught:
        measure_layer_costs(Timed(), CONFIG, (ids(),), {}, fails, group=dist.group.WORLD)
    return found, str(caught.value)


def test_all_ranks_get_what_the_first_has_measured_or_its_failure() -> None:
    for found, says in run_ranks(two_ranks, 2):
        assert found.layers == (7.0, 7.0)
        assert "could not measure what layers cost: KeyError: 'labels'" in says
