"""What a pipe cannot do is refused in words; what looks alike and can be done is right."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe.engine import InputError, PlanError, SetupError
from lightning_pipe.pipe import Pipe, pop, skippable, stash
from tests.patience import HANG
from tests.pipe.models import different, gradients, whole_forward, whole_gradients

CPUS = ["cpu", "cpu"]


@pytest.fixture
def make() -> Iterator[Callable[..., Pipe]]:
    """Makes pipes, and closes them."""
    made: list[Pipe] = []

    def new(layers: Any, chunks: int = 2, mode: Any = "never", devices: Any = CPUS, **options: Any) -> Pipe:
        layers = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
        made.append(Pipe(layers, chunks, mode, devices, **options))
        return made[-1]

    yield new
    for pipe in made:
        pipe.close()


def linear() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]


Make = Callable[..., Pipe]

# ---------------------------------------------------------------------- the user's settings stay


def test_hooks_of_every_kind_that_the_sequential_has_are_the_pipes(make: Make) -> None:
    layers, seen = nn.Sequential(*linear()), []
    layers.register_forward_pre_hook(lambda *found: seen.append("pre"), with_kwargs=True)
    layers.register_forward_hook(lambda *found: seen.append("post"), with_kwargs=True, always_call=True)
    layers.register_full_backward_hook(lambda *found: seen.append("backward"))
    make(layers)(torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert seen == ["pre", "post", "backward"]


@pytest.mark.parametrize("through", ["forward", "loss"])
def test_hooks_of_parameters_run_once_on_the_sum_of_gradients(make: Make, through: str) -> None:
    pipe = make(linear(), 4)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 3)
    calls: list[Tensor] = []

    def clamped(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient.clamp(-0.01, 0.01)

    def two_steps(plain: nn.Module) -> None:
        next(plain.parameters()).register_hook(clamped)
        for _ in range(2):
            nn.functional.mse_loss(plain(inputs), targets).backward()

    expected = whole_gradients(nn.Sequential(*linear()), two_steps)
    calls.clear()
    next(pipe.parameters()).register_hook(clamped)
    for _ in range(2):  # and they are there for the next step
        if through == "forward":
            nn.functional.mse_loss(pipe(inputs), targets).backward()
        else:
            pipe.loss(inputs, targets, nn.MSELoss()).backward()
    assert len(calls) == 2
    assert expected.differences(gradients(pipe)) == []


# ---------------------------------------------------------------------- what would be wrong without a word


@pytest.mark.parametrize("through", ["loss", "targets", "layer"])
def test_what_requires_a_gradient_and_would_get_none_is_refused(make: Make, through: str) -> None:
    outside = torch.ones(3, requires_grad=True)

    class Uses(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input * outside

    layers = [*linear(), Uses()] if through == "layer" else linear()
    pipe = make(layers)
    targets = torch.ones(4, 3, requires_grad=through == "targets")

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output * outside if through == "loss" else output, target)

    with pytest.raises(SetupError, match="requires a gradient but is not a parameter of a layer"):
        pipe.loss(torch.randn(4, 4), targets, loss_fn)


def test_a_second_derivative_is_refused(make: Make) -> None:
    inputs = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(SetupError, match="create_graph=True"):
        torch.autograd.grad(make(linear())(inputs).sum(), inputs, create_graph=True)


def test_random_layers_inside_pytorchs_checkpoint_are_refused_and_others_are_right(make: Make) -> None:
    class Inner(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(dropout)

        def forward(self, input: Tensor) -> Tensor:
            found: Tensor = checkpoint(lambda x: self.dropout(self.layer(x).tanh()), input, use_reentrant=False)
            return found

    with pytest.raises(SetupError, match=r"inside torch\.utils\.checkpoint"):
        make([Inner(0.5), nn.Linear(4, 3)])(torch.randn(4, 4))
    layers = nn.Sequential(Inner(0.0).eval(), nn.Linear(4, 3))
    plain = copy.deepcopy(layers)
    inputs = torch.randn(4, 4)
    pipe = make(layers)
    pipe(inputs).sum().backward()
    whole_forward(plain, inputs, 2).sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_pipe_in_a_pipe_is_refused(make: Make) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(linear())

    for layer in (Holds(), make(linear())):
        with pytest.raises(SetupError, match="contains a Pipe"):
            make([layer, nn.Linear(3, 3)])


@pytest.mark.parametrize("change", ["add", "replace"])
def test_layers_that_partitions_do_not_know_are_refused(make: Make, change: str) -> None:
    pipe = make(linear())
    pipe.add_module("3" if change == "add" else "2", nn.Linear(4, 3))
    with pytest.raises(SetupError, match="added or replaced after its partitions were made"):
        pipe(torch.randn(4, 4))


def test_the_first_mini_batch_of_compiled_batch_normalizations_has_its_gradients(make: Make) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain = copy.deepcopy(layers)
    pipe = make(layers, 4).compile_partitions(backend="aot_eager")
    inputs = torch.randn(16, 4)
    pipe(inputs).square().sum().backward()
    whole_forward(plain, inputs, 4).square().sum().backward()
    assert different(pipe, plain) == []


@dataclass
class Hidden:
    tensor: Tensor


def test_tensors_in_objects_that_cannot_be_looked_into_are_refused(make: Make) -> None:
    class Wraps(nn.Module):
        def forward(self, input: Tensor) -> Hidden:
            return Hidden(input)

    class Unwraps(nn.Module):
        def forward(self, input: Hidden) -> Tensor:
            return input.tensor

    with pytest.raises(InputError, match="a Hidden that contains tensors"):
        make([nn.Linear(4, 4), Wraps(), Unwraps(), nn.Linear(4, 3)], balance=[2, 2])(torch.randn(4, 4))
    inside = make([nn.Linear(4, 4), Wraps(), Unwraps(), nn.Linear(4, 3)], balance=[1, 3])
    assert inside(torch.randn(4, 4)).shape == (4, 3)


@pytest.mark.parametrize("change", ["mode", "parameters"])
def test_what_is_to_run_again_must_not_have_changed(make: Make, change: str) -> None:
    pipe = make([nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)], mode="always")
    output = pipe(torch.randn(4, 4))
    if change == "mode":
        pipe.eval()
    else:
        with torch.no_grad():
            next(pipe.parameters()).add_(1)
    with pytest.raises(SetupError, match=r"before its recomputation|the recomputation needs"):
        output.sum().backward()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_buffers_that_a_layer_changes_are_changed_once(make: Make, mode: str) -> None:
    class Counts(nn.Module):
        sum: Tensor
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(()))
            self.register_buffer("last", torch.zeros(4))

        def forward(self, input: Tensor) -> Tensor:
            self.sum += input.detach().sum()
            self.last = input.detach().mean(0)
            return input * self.sum.clone()

    def layers() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), Counts(), nn.Linear(4, 3))

    pipe, plain = make(layers(), 3, mode), layers()
    batches = [torch.randn(6, 4) for _ in range(2)]

    def two_steps(plain: nn.Module) -> None:
        for inputs in batches:
            whole_forward(plain, inputs, 3).sum().backward()  # type: ignore[arg-type]

    # The weight is used twice in each micro-batch, which is added up in another order than over all of them.
    expected = whole_gradients(plain, two_steps)
    two_steps(plain)
    for inputs in batches:
        pipe(inputs).sum().backward()
    for one, other in zip(pipe.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)
    assert expected.differences(gradients(pipe)) == []


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_what_the_sequential_has_beside_its_layers_is_refused(make: Make, kind: str) -> None:
    layers = nn.Sequential(*linear())
    if kind == "parameter":
        layers.register_parameter("own", nn.Parameter(torch.ones(1)))
    else:
        layers.register_buffer("own", torch.ones(1))
    with pytest.raises(SetupError, match="the Sequential has 'own' in addition to its layers"):
        make(layers)


def test_batch_normalization_with_another_forward_cannot_be_deferred_and_the_module_is_as_it_was(make: Make) -> None:
    class Other(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    with pytest.raises(SetupError, match="a Other overrides forward"):
        make([nn.Linear(4, 4), Other(4)], deferred_batch_norm=True)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(PlanError, match="balance"):
        make(layers, deferred_batch_norm=True, balance=[1, 7])
    assert type(layers[1]) is nn.BatchNorm1d


def test_the_loss_inside_runs_backward_without_autocast_as_one_outside(make: Make) -> None:
    seen: list[bool] = []

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor) -> Tensor:
            return input.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    class Layer(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            found: Tensor = Custom.apply(input)
            return found

    with torch.autocast("cpu", torch.bfloat16):
        pipe = make([nn.Linear(4, 4), Layer(), nn.Linear(4, 3)])
        loss = pipe.loss(torch.randn(4, 4), torch.randn(4, 3), nn.MSELoss())
    loss.backward()
    assert seen == [False, False]


# ---------------------------------------------------------------------- random numbers


def test_a_pipe_in_which_others_draw_goes_on_after_one_refusal(make: Make) -> None:
    class Draws(nn.Module):
        """As another thread would."""

        def forward(self, input: Tensor) -> Tensor:
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
            return input

    pipe = make([nn.Linear(4, 4), Draws(), nn.Linear(4, 3)])
    with pytest.raises(SetupError, match="by another thread"):
        pipe(torch.randn(4, 4))
    pipe(torch.randn(4, 4)).sum().backward()


# ---------------------------------------------------------------------- threads and processes


def test_a_forked_process_starts_threads_of_its_own(make: Make) -> None:
    pipe, inputs = make(linear()), torch.randn(4, 4)
    expected = pipe(inputs)
    child = os.fork()
    if not child:  # nothing of pytest's may run here
        code = 1
        try:
            code = 0 if torch.equal(pipe(inputs), expected) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_several_threads_take_turns(make: Make) -> None:
    pipe, inputs = make(linear()), torch.randn(8, 4)
    expected = pipe(inputs)
    right: list[bool] = []

    def run() -> None:
        for _ in range(20):
            right.append(torch.equal(pipe(inputs), expected))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert right == [True] * 60


# ---------------------------------------------------------------------- one tensor in several places


def test_what_is_used_in_several_partitions_has_its_gradients_added_as_in_one(make: Make) -> None:
    @skippable(stash=["a", "b"])
    class Leaves(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield stash("a", input)
            yield stash("b", input)
            return input

    @skippable(pop=["a"])
    class TakesA(nn.Module):
        def forward(self, input: Tensor) -> Any:
            return input * 1.7 + (yield pop("a")) * 0.3

    @skippable(pop=["b"])
    class TakesB(nn.Module):
        def forward(self, input: Tensor) -> Any:
            return input * 1.1 + (yield pop("b")) * 0.7

    class Three(nn.Module):
        def forward(self, input: Tensor) -> dict[str, Tensor]:
            return {"x": input, "y": input, "z": input}

    class Sum(nn.Module):
        def forward(self, input: dict[str, Tensor]) -> Tensor:
            return input["x"].exp() + input["y"].sin() * 3.1 + input["z"] / 7

    for middle, partitions in (([Leaves(), TakesA(), nn.Tanh(), TakesB()], 4), ([Three(), Sum()], 2)):
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 3))
        plain, inputs = copy.deepcopy(layers), torch.randn(6, 4)
        pipe = make(
            layers, 2, "never", ["cpu"] * partitions, balance=[2] + [1] * (partitions - 2) + [len(layers) - partitions]
        )
        pipe(inputs).sum().backward()
        whole_forward(plain, inputs, 2).sum().backward()
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- refusals in words


def test_layers_without_a_shape_are_refused(make: Make) -> None:
    with pytest.raises(SetupError, match=r"'0\.weight' of the Sequential has no shape yet; .* on a batch before"):
        make([nn.LazyLinear(4), nn.Linear(4, 3)])


@pytest.mark.parametrize(("name", "value"), [("chunks", 0), ("checkpoint", "nvr")])
def test_what_is_set_later_is_looked_at_too(make: Make, name: str, value: Any) -> None:
    pipe = make(linear())
    setattr(pipe, name, value)
    with pytest.raises(PlanError, match=f"{name} is {value!r}"):
        pipe(torch.randn(4, 4))


def test_outputs_that_are_not_laid_out_by_rows_are_refused(make: Make) -> None:
    class Other(nn.Module):
        def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.change = change

        def forward(self, input: Tensor) -> Tensor:
            return self.change(input)

    for change in (lambda x: x.sum(0, keepdim=True), lambda x: x[:1], lambda x: x.t()):
        with pytest.raises(InputError, match="expected the micro-batch's rows, in order, in the first dimension"):
            make([nn.Linear(4, 5), Other(change)], 2)(torch.randn(7, 4))
    flat = make([nn.Linear(4, 6), Other(lambda x: x.reshape(-1, 2))], 2)
    assert flat(torch.randn(7, 4)).shape == (21, 2)  # three for each row


def test_a_forward_that_yields_without_being_skippable_is_named(make: Make) -> None:
    class Forgotten(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield stash("a", input)
            return input

    with pytest.raises(SetupError, match=r"forward of layer 1, a Forgotten, returns a generator. .* with @skippable"):
        make([nn.Linear(4, 4), Forgotten()])(torch.randn(4, 4))
