"""Layers compiled in place: gradients of the uncompiled ones under schedules, lengths and sharding; names unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode

from lightning_pipe._compat.pipelining import stage_backward_input, stage_backward_weight
from lightning_pipe.llm.model.activation_checkpoint import apply_activation_checkpoint
from lightning_pipe.llm.model.compiled_layers import compile_layers, disable_donated_buffers
from lightning_pipe.llm.model.stage_module import StageModule, make_stage_module
from tests.distributed import run_ranks
from tests.llm.stage_cases import CONFIG, inputs, loss_of, make_model, train_stages, unequal, whole_stage
from tests.tiers import sampled, wanted

# Lowers what inductor would, to eager kernels: no compiler of C++ is needed, and it takes no time.
OPTIONS: Any = {"backend": "aot_eager", "fullgraph": True}
# Inductor, with backwards in two parts.
SPLIT: Any = {"split_backward": True, "fullgraph": True}
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def run(stage: StageModule, length: int = 6) -> dict[str, torch.Tensor]:
    (one, *_) = inputs(length)
    stage.zero_grad()
    torch.manual_seed(5)
    loss_of(stage(*one.args, **one.kwargs), one.target).backward()
    return {name: value.grad.clone() for name, value in stage.module.named_parameters() if value.grad is not None}


# ---------------------------------------------------------------------- one rank


def test_names_and_layers_are_those_without() -> None:
    plain, stage = whole_stage(), whole_stage()
    compile_layers(stage, CONFIG.layer_fqns, **OPTIONS)
    run(stage)
    assert list(stage.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in stage.named_modules()] == [name for name, _ in plain.named_modules()]
    assert type(stage.module.get_submodule("layers.3")) is type(plain.module.get_submodule("layers.3"))


def test_only_layers_that_the_stage_has_are_compiled_and_they_share_their_graphs() -> None:
    stage = make_stage_module(make_model(), CONFIG, ["embedding", "layers.0", "layers.1"], 0, 2)
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(stage, CONFIG.layer_fqns, backend=counter)
    stage(*inputs()[0].args, **inputs()[0].kwargs)
    assert counter.frame_count == 1
    assert counter.op_count > 1  # more than what passes through has


def test_the_second_length_is_compiled_for_any_length() -> None:
    stage, plain = whole_stage(), whole_stage()
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(stage, CONFIG.layer_fqns, backend=counter)
    counts = []
    for length in (6, 7, 5, 9):
        assert not unequal(run(stage, length), run(plain, length), TOLERANCE)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.scaled_dot_product_attention else result


@pytest.mark.parametrize("mode", sampled(["full", "selective"], lambda mode: mode == "full"))
def test_activation_checkpointing_is_the_compilers_business_then(mode: Any) -> None:
    stage = whole_stage()
    apply_activation_checkpoint(stage, CONFIG.layer_fqns, mode)
    compile_layers(stage, CONFIG.layer_fqns, **OPTIONS)
    assert not unequal(run(stage), run(whole_stage()), TOLERANCE)


@pytest.mark.parametrize("mode", sampled([None, "full", "selective"], lambda mode: mode != "full"))
def test_function_modes_act_in_compiled_layers_too(mode: Any) -> None:
    stage, plain = whole_stage(), whole_stage()
    if mode:
        apply_activation_checkpoint(stage, CONFIG.layer_fqns, mode)
    compile_layers(stage, CONFIG.layer_fqns, backend="aot_eager")
    without = run(plain)
    with Doubled():
        expected = run(plain)
        assert not unequal(run(stage), expected, TOLERANCE)
    assert unequal(without, expected, TOLERANCE)


def test_keeping_backwards_buffers_is_undone() -> None:
    config = torch._functorch.config
    assert config.donated_buffer
    restore = disable_donated_buffers()
    inner = disable_donated_buffers()
    inner()
    assert not config.donated_buffer
    restore()
    assert config.donated_buffer


@pytest.mark.parametrize("first", [False, True])
def test_a_layers_backward_runs_twice_also_where_one_was_compiled_before_that_could_not(first: bool) -> None:
    if first:
        earlier = whole_stage()
        compile_layers(earlier, CONFIG.layer_fqns, **OPTIONS)
        run(earlier)
    restore = disable_donated_buffers()
    try:
        stage = whole_stage()
        compile_layers(stage, CONFIG.layer_fqns, **OPTIONS)
        (one, *_) = inputs()
        loss = loss_of(stage(*one.args, **one.kwargs), one.target)
    finally:
        restore()
    loss.backward(retain_graph=True)  # raises for a graph with donated buffers, now that the setting is back
    loss.backward()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.down(nn.functional.gelu(self.up(value))))
        return output


def count_products(work: Callable[[], Any]) -> tuple[Any, int]:
    """What the work returns, and the number of its matrix products."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        value = work()
    return value, sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))


def run_parts(model: nn.Module, value: torch.Tensor) -> list[int]:
    """Runs the model and its backward in two parts; returns each part's number of matrix products."""
    loss = model(value).square().sum()
    (_, groups), first = count_products(lambda: stage_backward_input([loss], None, [value], model.parameters()))
    _, second = count_products(lambda: stage_backward_weight(model.parameters(), groups))
    return [first, second]


@pytest.mark.parametrize("dynamic", sampled([False, True], lambda dynamic: not dynamic))
@inductor_config.patch(compile_threads=1)
def test_each_part_of_a_layers_backward_computes_its_own_gradients_only(dynamic: bool) -> None:
    model = Layer()
    plain, value = copy.deepcopy(model), torch.randn(3, 4, requires_grad=True)
    compile_layers(StageModule(nn.ModuleDict({"layer": model}), 0, 1), ["layer"], **SPLIT, dynamic=dynamic)
    restore = disable_donated_buffers()
    try:
        run_parts(model, torch.randn(3, 4, requires_grad=True))  # compiles
        model.zero_grad()
        assert run_parts(model, value) == [2, 2]
    finally:
        restore()
    expected = torch.autograd.grad(plain(value).square().sum(), [value, *plain.parameters()])
    for mine, other in zip([value.grad, *(one.grad for one in model.parameters())], expected, strict=True):
        torch.testing.assert_close(mine, other)


class CountedProduct(torch.autograd.Function):
    """Counts its backwards in a tensor, and divides the gradient of its weight by the count of those before."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        ctx.count = count
        return value * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (value, weight) = gradients, ctx.saved_tensors
        of_weight = (gradient * value).sum(0) / ctx.count
        ctx.count.add_(1)
        return gradient * weight, of_weight, None


class Counted(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = CountedProduct.apply(value, self.weight, self.count)
        return output


@inductor_config.patch(compile_threads=1)
def test_a_backward_that_writes_to_a_buffer_writes_once_and_reads_the_value_of_before() -> None:
    model, value = Counted(), torch.randn(3, 4)
    compile_layers(StageModule(nn.ModuleDict({"layer": model}), 0, 1), ["layer"], **SPLIT)
    restore = disable_donated_buffers()
    try:
        run_parts(model, value.clone().requires_grad_())
    finally:
        restore()
    assert int(model.count) == 2
    torch.testing.assert_close(model.weight.grad, (2 * value * value * model.weight.detach()).sum(0))


@inductor_config.patch(compile_threads=1)
def test_graphs_for_any_length_are_found_in_the_cache_of_an_earlier_run() -> None:
    restore = disable_donated_buffers()
    try:
        for _ in range(2):
            torch.compiler.reset()
            model = Layer()
            compile_layers(StageModule(nn.ModuleDict({"layer": model}), 0, 1), ["layer"], **SPLIT, dynamic=True)
            run_parts(model, torch.randn(2, 3, 4, requires_grad=True))
    finally:
        restore()


# ---------------------------------------------------------------------- schedules, on two ranks

CASES: dict[str, tuple[str, Any, Any, bool, tuple[int, ...]]] = {
    "1f1b, two lengths": ("1f1b", OPTIONS, None, False, (6, 7)),
    "zero bubble, two lengths": ("zbv_zero_bubble", SPLIT, None, False, (6, 7)),
    "zero bubble, whole backwards": ("zbv_zero_bubble", OPTIONS, None, False, (6,)),
    "1f1b, sharded": ("1f1b", OPTIONS, None, True, (6,)),
    "zero bubble, sharded": ("zbv_zero_bubble", SPLIT, None, True, (6,)),
    "both ways, sharded": ("dualpipev", SPLIT, None, True, (6,)),
    "1f1b, selective": ("1f1b", OPTIONS, "selective", False, (6,)),
    "zero bubble, sharded, full": ("zbv_zero_bubble", SPLIT, "full", True, (6,)),
    "zero bubble, sharded, selective": ("zbv_zero_bubble", SPLIT, "selective", True, (6,)),
}


OFTEN = ("1f1b, two lengths", "zero bubble, sharded, selective")


@inductor_config.patch(compile_threads=1, fallback_random=True)
def run_schedules(rank: int, world_size: int, cases: list[str]) -> dict[str, list[str]]:
    wrong: dict[str, list[str]] = {}
    restore = disable_donated_buffers()
    for case in cases:
        schedule, options, mode, sharded, lengths = CASES[case]

        def prepare(stage: StageModule, mode: Any = mode, options: Any = options) -> None:
            if mode is not None:
                apply_activation_checkpoint(stage, CONFIG.layer_fqns, mode)
            compile_layers(stage, CONFIG.layer_fqns, **options)

        expected, _ = train_stages(rank, schedule, lengths=lengths)
        mine, _ = train_stages(rank, schedule, prepare, sharded=sharded, lengths=lengths)
        wrong[case] = unequal(mine, expected, TOLERANCE)
    restore()
    return wrong


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, list[str]]]:
    return run_ranks(run_schedules, 2, wanted(request.config, CASES, OFTEN.__contains__))


@pytest.mark.parametrize("case", sampled(CASES, OFTEN.__contains__))
def test_gradients_are_those_of_layers_that_are_not_compiled(case: str, ranks: list[dict[str, list[str]]]) -> None:
    assert [rank[case] for rank in ranks] == [[], []]
