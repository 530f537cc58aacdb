"""What a pipe is made of, what it takes and gives, and how it ends."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import InputError, PlanError, SetupError
from lightning_pipe.pipe import Pipe, is_recomputing
from tests.patience import HANG
from tests.pipe.models import (
    MODELS,
    batch,
    different,
    gradients,
    same,
    whole_forward,
    whole_gradients,
)


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "partition" in thread.name]


# ---------------------------------------------------------------------- what it is


def test_keys_of_the_state_dict_are_the_sequentials() -> None:
    for make in MODELS.values():
        pipe, whole = Pipe(make(), 2, devices=["cpu"] * 2), make()
        assert [*pipe.state_dict()] == [*whole.state_dict()]
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in whole.named_parameters()]
        whole.load_state_dict(pipe.state_dict())


def test_it_has_the_sequentials_layers_and_says_where_they_are() -> None:
    layers = MODELS["plain"]()
    pipe = Pipe(layers, 4, "never", ["cpu", "cpu"], [3, 2])
    assert len(pipe) == 5
    assert pipe[0] is layers[0]
    assert [*pipe] == [*layers]
    assert pipe.balance == [3, 2]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert "chunks=4, checkpoint='never', balance=[3, 2]" in repr(pipe)
    assert set(pipe.plans) == {"gpipe_forward", "gpipe_backward", "1f1b"}


def test_it_is_copied_and_pickled_without_its_threads() -> None:
    pipe = Pipe(MODELS["plain"](), 3, devices=["cpu"] * 2)
    inputs = batch(8)[0]
    expected = pipe(inputs).detach()
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(other(inputs), expected)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in pipe.parameters()}
        with torch.no_grad():
            next(other.parameters()).zero_()  # its own layers run, not those it was copied from
        assert not torch.equal(other(inputs), expected)
        other.close()
    pipe.close()


def test_its_type_may_be_changed_and_its_place_may_not() -> None:
    pipe = Pipe(MODELS["plain"](), 2, devices=["cpu"] * 2)
    assert pipe.to(torch.float64)(batch(8)[0].double()).dtype == torch.float64
    assert pipe.cpu() is pipe
    for move in (lambda: pipe.to("meta"), lambda: pipe.to(device="meta"), pipe.cuda):
        with pytest.raises(SetupError, match="would move all partitions"):
            move()
    pipe.close()


def test_partitions_may_be_compiled() -> None:
    pipe, whole = Pipe(MODELS["plain"](), 2, devices=["cpu"] * 2), MODELS["plain"]()
    pipe.compile_partitions(backend="aot_eager")
    for _ in range(2):
        inputs, targets = batch(8)
        nn.functional.mse_loss(pipe(inputs), targets).backward()
        nn.functional.mse_loss(whole_forward(whole, inputs, 2), targets).backward()
    assert different(pipe, whole) == []
    assert [*pipe.state_dict()] == [*whole.state_dict()]
    pipe.close()


def test_compiled_layers_that_draw_run_as_they_are_with_a_warning() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), 2, devices=["cpu"] * 2)
    pipe.compile_partitions(backend="aot_eager")
    with pytest.warns(UserWarning, match="partition 1 .* draws random numbers"):
        pipe(batch(8)[0])
    pipe.close()


def test_autocast_holds_in_forward_and_recomputation() -> None:
    found: list[tuple[bool, torch.dtype]] = []

    class Notes(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            found.append((is_recomputing(), input.dtype))
            return input

    pipe = Pipe(nn.Sequential(nn.Linear(6, 6), Notes(), nn.Linear(6, 3)), 2, "always", ["cpu"] * 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = pipe(batch(8)[0])
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert found == [(False, torch.bfloat16)] * 2 + [(True, torch.bfloat16)] * 2
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in pipe.parameters())
    pipe.close()


# ---------------------------------------------------------------------- what it takes and gives


def test_it_takes_several_inputs_and_gives_any_nesting() -> None:
    class First(nn.Module):
        def forward(self, one: Tensor, other: dict[str, Any], times: int) -> dict[str, Any]:
            return {"sum": one + other["two"] * times, "rows": [other["numbers"]], "times": times}

    class Last(nn.Module):
        def forward(self, parts: dict[str, Any]) -> tuple[Any, ...]:
            return parts["sum"] * 2, {"rows": parts["rows"][0]}, parts["times"]

    one, two = torch.ones(5, 2, requires_grad=True), torch.full((5, 2), 3.0)
    pipe = Pipe(nn.Sequential(First(), nn.Identity(), Last()), 2, devices=["cpu"] * 3)
    doubled, rows, times = pipe(one, {"two": two, "numbers": torch.arange(5)}, 4)
    assert torch.equal(doubled, torch.full((5, 2), 26.0))
    assert torch.equal(rows["rows"], torch.arange(5))
    assert times == 4
    assert not rows["rows"].requires_grad
    doubled.sum().backward()
    assert one.grad is not None
    assert torch.equal(one.grad, torch.full((5, 2), 2.0))
    pipe.close()


def test_fewer_rows_than_micro_batches_run_as_fewer_with_a_warning() -> None:
    found: list[int] = []

    class Counts(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            found.append(is_recomputing())
            return input

    pipe, whole = Pipe(nn.Sequential(nn.Linear(6, 3), Counts()), 8, "except_last", ["cpu"] * 2), None
    with pytest.warns(UserWarning, match="a mini-batch has 3 rows, fewer than chunks=8"):
        output = pipe(batch(3)[0])
    output.sum().backward()
    assert whole is None
    assert found == [False] * 3 + [True] * 2  # the last one of those there are runs once
    pipe.close()


@pytest.mark.parametrize(("checkpoint", "again"), [("always", 4), ("except_last", 3), ("never", 0)])
def test_micro_batches_run_again_as_the_mode_says(checkpoint: Any, again: int) -> None:
    found: list[bool] = []

    class Notes(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            found.append(is_recomputing())
            return input

    pipe = Pipe(nn.Sequential(Notes(), nn.Linear(6, 3)), 4, checkpoint, ["cpu"] * 2)
    output = pipe(batch(8)[0])
    assert found == [False] * 4
    output.sum().backward()
    assert found == [False] * 4 + [True] * again
    with torch.no_grad():
        pipe(batch(8)[0])
    assert found[4 + again :] == [False] * 4
    pipe.close()


def test_a_first_layer_may_change_its_input_in_place() -> None:
    for checkpoint in ("always", "never"):
        layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
        whole = copy.deepcopy(layers)
        pipe = Pipe(layers, 2, checkpoint, ["cpu"] * 2, [1, 2])
        inputs, targets = batch(8)
        for _ in range(2):
            nn.functional.mse_loss(pipe(inputs), targets).backward()
            nn.functional.mse_loss(whole_forward(whole, inputs, 2), targets).backward()
        assert different(pipe, whole) == []
        pipe.close()
    first = Pipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)), 2, devices=["cpu"] * 2)
    inputs = batch(8)[0].requires_grad_()
    first(inputs).sum().backward()  # which the Sequential alone refuses, of a leaf
    assert (inputs < 0).any()
    first.close()


def test_an_embedding_that_renormalizes_rows_trains_without_recomputation_as_its_refusal_says() -> None:
    whole = nn.Sequential(nn.Embedding(20, 8, max_norm=0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 20))
    recomputed, pipe = (Pipe(copy.deepcopy(whole), 2, mode, ["cpu"] * 2) for mode in ("always", "never"))
    inputs = torch.arange(16).view(4, 4)
    with pytest.raises(SetupError, match=r"a parameter of partition 0 .* use checkpoint='never' if a layer changes it"):
        recomputed(inputs).sum().backward()
    for model in (pipe, whole):
        model(inputs).square().sum().backward()
    for parameter, expected in zip(pipe.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    recomputed.close()
    pipe.close()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(4, 6), torch.ones(3, 6)), "shapes \\(4, 6\\), \\(3, 6\\)"),
        ((torch.tensor(1.0),), "shapes \\(\\)"),
        ((3,), "shapes none; expected at least one"),
    ],
)
def test_inputs_that_cannot_be_cut_are_refused(inputs: tuple[Any, ...], message: str) -> None:
    pipe = Pipe(MODELS["plain"](), 2, devices=["cpu"] * 2)
    with pytest.raises(InputError, match=message):
        pipe(*inputs)


def test_outputs_that_cannot_be_put_together_are_refused() -> None:
    class Mean(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input.mean()

    class Forms(nn.Module):
        def forward(self, input: Tensor) -> Any:
            return input if len(input) == 2 else (input,)

    class Sizes(nn.Module):
        def forward(self, input: Tensor) -> Any:
            return input, len(input)

    for layer, message in (
        (Mean(), "without dimensions"),
        (Forms(), "different structures"),
        (Sizes(), "returns 2 for"),
    ):
        pipe = Pipe(nn.Sequential(nn.Linear(6, 6), layer), 2, devices=["cpu"] * 2)
        with pytest.raises(InputError, match=message):
            pipe(torch.ones(3, 6))
        pipe.close()


def test_a_loss_is_a_scalar_of_as_many_rows() -> None:
    pipe = Pipe(MODELS["plain"](), 2, devices=["cpu"] * 2)
    inputs, targets = batch(8)
    with pytest.raises(InputError, match="the inputs have 8 rows and the targets have 4"):
        pipe.loss(inputs, targets[:4], nn.MSELoss())
    with pytest.raises(InputError, match="reduction 'none'"):
        pipe.loss(inputs, targets, nn.MSELoss(reduction="none"))
    with pytest.raises(InputError, match=r"loss_fn returned \(4, 3\)"):
        pipe.loss(inputs, targets, lambda output, target: output - target)
    with pytest.raises(InputError, match="loss_fn returned float"):
        pipe.loss(inputs, targets, lambda output, target: 1.0)  # type: ignore[arg-type, return-value]
    pipe.loss(inputs, targets, nn.MSELoss()).backward()
    pipe.close()


# ---------------------------------------------------------------------- what it refuses


def test_what_is_no_sequential_is_refused() -> None:
    class Own(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return input

    with pytest.raises(SetupError, match="the module is a Linear"):
        Pipe(nn.Linear(2, 2), 2)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="Own overrides forward"):
        Pipe(Own(nn.Linear(2, 2)), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunks": 0}, "chunks is 0"),
        ({"chunks": 2.0}, "chunks is 2.0"),
        ({"chunks": True}, "chunks is True"),
        ({"checkpoint": "sometimes"}, "checkpoint is 'sometimes'"),
        ({"balance": [2, 2]}, r"balance is \[2, 2\]; expected .* 2 whole numbers, 1 or more, that add up to 5"),
        ({"balance": [5, 0]}, r"balance is \[5, 0\]"),
        ({"balance": [2, 2, 1]}, r"balance is \[2, 2, 1\]"),
        ({"balance": "23"}, "balance is '23'"),
        ({"devices": ["cpu"] * 6}, "5 layers cannot be split into 6 partitions"),
        ({"devices": []}, "devices is empty"),
        ({"devices": "cpu"}, "devices is the single device 'cpu'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Pipe(MODELS["plain"](), **{"chunks": 2, "devices": ["cpu"] * 2, **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(SetupError, match="PyTorch finds no GPU"):
        Pipe(MODELS["plain"](), 2, devices=["cpu", 0])


def test_a_parameter_in_two_partitions_is_refused() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    with pytest.raises(SetupError, match="parameter 'weight' of a Linear is shared by partitions 0 and 1"):
        Pipe(nn.Sequential(one, other), 2, devices=["cpu"] * 2)
    together = Pipe(nn.Sequential(one, other, nn.Linear(4, 4)), 2, devices=["cpu"] * 2, balance=[2, 1])
    together(torch.ones(4, 4)).sum().backward()
    assert one.weight.grad is not None
    together.close()


def test_a_second_backward_is_refused() -> None:
    pipe = Pipe(MODELS["plain"](), 2, devices=["cpu"] * 2)
    output = pipe(batch(8)[0]).sum()
    output.backward(retain_graph=True)
    with pytest.raises(SetupError, match="second time"):
        output.backward()
    pipe.close()


# ---------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize("through", ["forward", "loss"])
def test_an_error_in_a_layer_is_raised_as_it_is_with_its_place_and_the_pipe_goes_on(through: str, phase: str) -> None:
    class Fails(nn.Module):
        armed = False
        seen = 0

        def forward(self, input: Tensor) -> Tensor:
            if self.armed and phase == "backward":
                input.register_hook(self.fail) if input.requires_grad else None
            elif self.armed and (phase == "recomputation") == is_recomputing():
                self.fail(input)
            return input * 1

        def fail(self, _: Tensor) -> None:
            self.seen += 1
            if self.seen == 2:
                raise KeyError("on purpose")

    fails = Fails()
    layers = nn.Sequential(nn.Linear(6, 6), fails, nn.Linear(6, 3))
    checkpoint: Any = "always" if phase == "recomputation" else "never"
    pipe, whole = Pipe(layers, 4, checkpoint, ["cpu"] * 3), nn.Sequential(nn.Linear(6, 6), Fails(), nn.Linear(6, 3))
    whole.load_state_dict(pipe.state_dict())

    def step() -> None:
        inputs, targets = batch(8)
        if through == "forward":
            nn.functional.mse_loss(pipe(inputs), targets).backward()
        else:
            pipe.loss(inputs, targets, nn.MSELoss()).backward()

    step()
    fails.armed = True
    with pytest.raises(KeyError, match="on purpose") as raised:
        step()
    micro_batch = 2 if phase != "forward" and through == "forward" else 1  # those of backward come the last one first
    assert raised.value.__notes__[0] == (
        f"In the {phase} of partition 1 (layer 1, on cpu), micro-batch {micro_batch} of 4 (2 rows)."
    )
    fails.armed = False
    pipe.zero_grad()
    step()
    inputs, targets = batch(8)
    expected = whole_gradients(whole, lambda whole: nn.functional.mse_loss(whole(inputs), targets).backward())
    assert expected.differences(gradients(pipe)) == []
    pipe.close()
    assert not workers()


# ---------------------------------------------------------------------- what it shows


def test_the_trace_shows_every_task_of_every_micro_batch() -> None:
    pipe = Pipe(MODELS["plain"](), 3, "always", ["cpu"] * 2)
    pipe.start_trace()
    pipe(batch(9)[0]).sum().backward()
    spans = pipe.stop_trace()
    counts = {name: sum(span.task == name for span in spans) for name in {span.task for span in spans}}
    assert counts == dict.fromkeys(("Forward0", "Forward1", "Recompute0", "Recompute1", "Backward0", "Backward1"), 3)
    assert {span.thread for span in spans} == {"partition0", "partition1"}
    pipe(batch(9)[0])
    assert pipe.stop_trace() == []
    pipe.close()


def test_partitions_work_on_different_micro_batches_at_the_same_time() -> None:
    # Each waits for the other to be at work too: one after the other they would wait for ever.
    meet = threading.Barrier(2, timeout=HANG)

    class Meets(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first, self.count = first, 0

        def forward(self, input: Tensor) -> Tensor:
            # The first partition's micro-batches 1 to 3 run beside the second one's 0 to 2.
            if (self.count > 0) if self.first else (self.count < 3):
                meet.wait()
            self.count += 1
            output: Tensor = _Meets.apply(input, self.first, self.count)
            return output

    class _Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, first: bool, count: int) -> Tensor:
            ctx.first, ctx.count = first, count
            return input.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
            # Backward comes the last micro-batch first, and the second partition first.
            if (ctx.count > 1) if ctx.first else (ctx.count < 4):
                meet.wait()
            return gradient, None, None

    layers = nn.Sequential(nn.Sequential(nn.Linear(6, 6), Meets(True)), nn.Sequential(Meets(False), nn.Linear(6, 3)))
    pipe = Pipe(layers, 4, "never", ["cpu"] * 2)
    pipe(batch(8)[0]).sum().backward()
    assert same([p.grad is not None for p in pipe.parameters()], [True] * 4)
    pipe.close()


@pytest.mark.parametrize("use", ["called", "with its loss", "closed"])
def test_threads_and_weights_end_with_the_pipe_and_wait_for_no_garbage_collection(use: str) -> None:
    before = set(threading.enumerate())
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    pipe = Pipe(layers, balance=[2, 1], devices=["cpu", "cpu"], chunks=2)
    held: list[Any] = [weakref.ref(pipe), weakref.ref(layers[0].weight)]
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, 4)
        if use == "with its loss":
            pipe.loss(x, torch.randn(4, 4), nn.functional.mse_loss)
        else:
            pipe(x).sum().backward()
        if use == "closed":
            pipe.close()
        threads = set(threading.enumerate()) - before
        del pipe, layers
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
