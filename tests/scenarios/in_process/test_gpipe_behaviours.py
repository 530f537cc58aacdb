"""What GPipe's users may rely on, as torchgpipe's tests state it, of this pipe: what test_pipe and others leave out."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import PlanError, SetupError
from lightning_pipe.pipe import Pipe, is_recomputing
from tests.patience import HANG

CHECKPOINT: tuple[Any, ...] = ("always", "except_last", "never")
Make = Callable[..., Pipe]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes pipes that are closed in the end."""
    torch.manual_seed(0)
    made: list[Pipe] = []

    def one(layers: list[nn.Module], *arguments: Any, **options: Any) -> Pipe:
        made.append(Pipe(nn.Sequential(*layers), *arguments, **options))
        return made[-1]

    yield one
    for pipe in made:
        pipe.close()


class Calls(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Any) -> Any:
        return self.function(input)


class Log(torch.autograd.Function):
    """Notes when it runs forward and backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, note: Callable[[str, Any], None]) -> Tensor:
        ctx.note = note
        note("forward", ctx)
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note("backward", ctx)
        return gradient, None


def logging(note: Callable[[str, Any], None]) -> nn.Module:
    return Calls(lambda input: Log.apply(input, note))


# ---------------------------------------------------------------------- what it is


@pytest.mark.parametrize("balance", [(2,), (1, 1)])
def test_layers_are_counted_from_both_ends_and_balance_and_devices_may_be_tuples(
    make: Make, balance: tuple[int, ...]
) -> None:
    layers: list[nn.Module] = [nn.Linear(1, 1), nn.Linear(1, 1)]
    pipe = make(layers, 1, devices=("cpu",) * len(balance), balance=balance)
    assert (pipe[-1], pipe[-2]) == (layers[1], layers[0])
    with pytest.raises(IndexError):
        pipe[2]
    assert pipe.balance == [*balance]
    assert pipe.devices == [torch.device("cpu")] * len(balance)


def test_numbers_below_one_are_refused(make: Make) -> None:
    wrong: list[dict[str, Any]] = [{"chunks": -1}, {"balance": [-1, 3]}, {"balance": [0, 2]}, {"balance": []}]
    for options in wrong:
        with pytest.raises(PlanError, match="expected"):
            make([nn.Linear(1, 1), nn.Linear(1, 1)], **{"chunks": 1, **options})


def test_types_are_changed_in_every_way_and_a_tensors_device_is_a_place_too(make: Make) -> None:
    pipe = make([nn.Linear(1, 1), nn.Linear(1, 1)], 1, devices=["cpu"] * 2)
    for cast, expected in (
        (lambda: pipe.half(), torch.float16),
        (lambda: pipe.to(torch.double), torch.float64),
        (lambda: pipe.to(dtype=torch.float), torch.float32),
    ):
        cast()
        assert {p.dtype for p in pipe.parameters()} == {expected}
    elsewhere = torch.rand(1, device="meta")
    for arguments, options in (((elsewhere,), {}), ((), {"tensor": elsewhere}), ((torch.device("cuda"),), {})):
        with pytest.raises(SetupError, match="would move all partitions"):
            pipe.to(*arguments, **options)
    assert pipe.to(torch.rand(1)) is pipe  # where they all are


def test_a_layer_in_two_partitions_is_refused_however_deep_it_is(make: Make) -> None:
    shared = nn.Linear(2, 2)
    for layers in ([shared, shared], [nn.Sequential(shared), nn.Sequential(nn.Sequential(shared))]):
        with pytest.raises(SetupError, match="shared by partitions 0 and 1"):
            make(layers, 1, devices=["cpu"] * 2)


# ---------------------------------------------------------------------- what it takes and gives


def test_rows_that_do_not_divide_by_the_micro_batches_are_no_reason_for_a_warning(make: Make) -> None:
    pipe = make([nn.Linear(1, 1), nn.Linear(1, 1)], 4, devices=["cpu"] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe(torch.rand(7, 1)).shape == (7, 1)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_every_tensor_of_a_tuple_has_its_gradient(make: Make, checkpoint: Any) -> None:
    def spread(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return pair[0] * 1, pair[1] * 2, pair[1] * 3

    pipe = make([Calls(spread), Calls(sum)], 8, checkpoint, ["cpu"] * 2)
    one, other = torch.rand(32, 3, requires_grad=True), torch.rand(32, 3, requires_grad=True)
    output = pipe((one, other))
    assert torch.equal(output, one + other * 2 + other * 3)
    output.sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    assert torch.equal(one.grad, torch.ones(32, 3))
    assert torch.equal(other.grad, torch.full((32, 3), 5.0))


def test_a_tuple_of_one_stays_a_tuple(make: Make) -> None:
    pipe = make([Calls(lambda only: (only[0] * 2,)), Calls(lambda only: (only[0] * 3,))], 2, devices=["cpu"] * 2)
    input = torch.rand(4, 1, requires_grad=True)
    given = pipe((input,))
    assert isinstance(given, tuple)
    given[0].sum().backward()
    assert input.grad is not None
    assert torch.equal(input.grad, torch.full((4, 1), 6.0))


def test_more_inputs_than_the_first_layer_takes_are_its_error(make: Make) -> None:
    pipe = make([nn.Linear(1, 1), nn.Linear(1, 1)], 1, devices=["cpu"] * 2)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given") as raised:
        pipe(torch.rand(1, 1), torch.rand(1, 1))
    assert raised.value.__notes__ == ["In the forward of partition 0 (layer 0, on cpu), micro-batch 0 of 1 (1 row)."]


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_outputs_may_have_other_numbers_of_rows_than_inputs_and_each_other(make: Make, checkpoint: Any) -> None:
    pipe = make([Calls(lambda x: (x * 2, x.repeat(2, 1)))], 2, checkpoint, ["cpu"])
    input = torch.arange(3.0).unsqueeze(1).requires_grad_()
    doubled, repeated = pipe(input)
    assert doubled.flatten().tolist() == [0, 2, 4]
    assert repeated.flatten().tolist() == [0, 1, 0, 1, 2, 2]  # two rows in the first micro-batch, one in the other
    (doubled.sum() + (repeated * torch.arange(6.0).unsqueeze(1)).sum()).backward()
    assert input.grad is not None
    assert input.grad.flatten().tolist() == [2 + 0 + 2, 2 + 1 + 3, 2 + 4 + 5]


# ---------------------------------------------------------------------- running again, and gradients


@pytest.mark.parametrize(("checkpoint", "again"), [("always", [True]), ("except_last", []), ("never", [])])
def test_a_single_micro_batch_is_the_last_one(make: Make, checkpoint: Any, again: list[bool]) -> None:
    found: list[bool] = []
    layer = nn.Linear(1, 1)
    layer.register_forward_pre_hook(lambda layer, inputs: found.append(is_recomputing()))
    pipe = make([layer], 1, checkpoint, ["cpu"])
    pipe(torch.rand(2, 1)).sum().backward()
    assert found == [False, *again]
    assert not is_recomputing()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_micro_batches_go_backward_the_last_first_each_behind_its_recomputation(make: Make, checkpoint: Any) -> None:
    found: dict[int, list[tuple[str, int]]] = {0: [], 1: []}

    def layer(partition: int) -> nn.Module:
        def call(input: Tensor) -> Tensor:
            number = int(input[0])
            output: Tensor = Log.apply(input, lambda what, _: found[partition].append((what, number)))
            return output

        return Calls(call)

    pipe = make([layer(0), layer(1)], 4, checkpoint, ["cpu"] * 2)
    pipe(torch.arange(4.0).unsqueeze(1).requires_grad_()).sum().backward()
    for notes in found.values():
        assert notes[:4] == [("forward", number) for number in range(4)]
        then = notes[4:]
        assert [number for what, number in then if what == "backward"] == [3, 2, 1, 0]
        again = [number for what, number in then if what == "forward"]
        assert again == ([3, 2, 1, 0] if checkpoint == "always" else [])
        assert all(then.index(("forward", number)) < then.index(("backward", number)) for number in again)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_layers_make_no_graph_where_none_is_wanted(make: Make, checkpoint: Any, without: Callable[[], Any]) -> None:
    pipe = make([nn.Linear(1, 1), nn.Linear(1, 1)], 2, checkpoint, ["cpu"] * 2)
    found: list[bool] = []
    for layer in pipe:
        layer.register_forward_hook(lambda layer, inputs, output: found.append(output.requires_grad))
    with without():
        pipe(torch.rand(4, 1))
    assert found == [False] * 4


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_outputs_require_grad_if_there_is_what_to_train(make: Make, checkpoint: Any) -> None:
    nothing = make([nn.Tanh(), nn.Linear(1, 1).requires_grad_(False)], 2, checkpoint, ["cpu"] * 2)
    assert not nothing(torch.rand(4, 1)).requires_grad
    pipe = make([nn.Tanh(), nn.Linear(1, 1), nn.Tanh()], 2, checkpoint, ["cpu"] * 3)
    pipe(input := torch.rand(4, 1)).sum().backward()
    assert all(p.grad is not None for p in pipe.parameters())
    assert input.grad is None


class Same(torch.autograd.Function):
    """Returns what it is given, the very tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_a_function_may_return_its_input(make: Make, checkpoint: Any) -> None:
    pipe = make([Calls(Same.apply), Calls(Same.apply)], 2, checkpoint, ["cpu"] * 2)
    input = torch.rand(4, 1, requires_grad=True)
    output = pipe(input)
    assert torch.equal(output, input)
    (output * 2).sum().backward()
    assert input.grad is not None
    assert torch.equal(input.grad, torch.full((4, 1), 2.0))


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_what_is_changed_in_place_and_has_no_gradient_is_changed_once(make: Make, checkpoint: Any) -> None:
    def call(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1].add_(1)

    pipe = make([nn.Identity(), Calls(call)], 2, checkpoint, ["cpu"] * 2)
    for _ in range(2):
        input = torch.ones(4, 1, requires_grad=True)
        pipe((input, torch.ones(4, 1))).sum().backward()
        assert input.grad is not None
        assert torch.equal(input.grad, torch.full((4, 1), 2.0))


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_graphs_are_freed_with_backward_or_with_the_outputs(make: Make, checkpoint: Any) -> None:
    graphs: list[weakref.ref[Any]] = []
    layers = [logging(lambda what, ctx: graphs.append(weakref.ref(ctx))), nn.Linear(1, 1)]
    pipe = make(layers, 4, checkpoint, ["cpu"] * 2)
    output = pipe(torch.rand(8, 1, requires_grad=True))
    assert checkpoint == "always" or any(graph() is not None for graph in graphs)
    output.sum().backward()
    assert all(graph() is None for graph in graphs)
    del output
    pipe(torch.rand(8, 1, requires_grad=True))
    assert all(graph() is None for graph in graphs)


# ---------------------------------------------------------------------- who runs what, and when


def test_a_partition_takes_micro_batches_in_order_each_behind_its_neighbour(make: Make) -> None:
    pipe = make([nn.Linear(1, 1) for _ in range(3)], 5, "never", ["cpu"] * 3)
    pipe.start_trace()
    pipe(torch.rand(5, 1)).sum().backward()
    spans = {(span.task, span.iteration): span for span in pipe.stop_trace()}
    for what, partitions, numbers in (
        ("Forward", [0, 1, 2], [0, 1, 2, 3, 4]),
        ("Backward", [2, 1, 0], [4, 3, 2, 1, 0]),
    ):
        for place, partition in enumerate(partitions):
            for turn, number in enumerate(numbers):
                begin = spans[f"{what}{partition}", number].start_order
                if turn:
                    assert begin > spans[f"{what}{partition}", numbers[turn - 1]].end_order
                if place:
                    assert begin > spans[f"{what}{partitions[place - 1]}", number].end_order


def test_partitions_before_one_that_fails_are_few_micro_batches_ahead(make: Make) -> None:
    partitions, ran, far = 3, [0, 0], threading.Event()

    def counts(partition: int) -> nn.Module:
        def call(input: Tensor) -> Tensor:
            ran[partition] += 1
            if ran[0] == partitions + 1:
                far.set()
            return input

        return Calls(call)

    def fails(input: Tensor) -> Tensor:
        assert far.wait(HANG)  # until the first one is as far as it may be
        raise KeyError("on purpose")

    pipe = make([counts(0), counts(1), Calls(fails)], 64, "never", ["cpu"] * partitions)
    with pytest.raises(KeyError, match="on purpose"):
        pipe(torch.rand(64, 1))
    assert ran[0] == partitions + 1
    assert ran[1] <= ran[0]


def test_every_partition_has_a_thread_of_its_own_forward_and_backward(make: Make) -> None:
    found: list[set[tuple[str, int]]] = [set(), set(), set()]
    layers = [logging(lambda what, ctx, own=own: own.add((what, threading.get_ident()))) for own in found]  # type: ignore[misc]
    make(layers, 4, "never", ["cpu"] * 3)(torch.rand(8, 1, requires_grad=True)).sum().backward()
    for phase in ("forward", "backward"):
        threads = [{thread for what, thread in own if what == phase} for own in found]
        assert [len(own) for own in threads] == [1, 1, 1]
        assert len(set.union(*threads, {threading.get_ident()})) == 4


def test_values_between_partitions_on_one_device_are_not_copied(make: Make) -> None:
    places: list[list[int]] = [[], []]
    layers: list[nn.Module] = [nn.Linear(1, 1), nn.Linear(1, 1)]
    layers[0].register_forward_hook(lambda layer, inputs, output: places[0].append(output.data_ptr()))
    layers[1].register_forward_pre_hook(lambda layer, inputs: places[1].append(inputs[0].data_ptr()))
    pipe = make(layers, 2, "never", ["cpu"] * 2)
    pipe(torch.rand(4, 1))  # the first finds out whether layers change their input
    pipe(torch.rand(4, 1))
    assert len(places[0]) == 4
    assert places[0][2:] == places[1][2:]
