"""Two calls take turns: one at a time, in an order that depends on the calls alone."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_pipe.llm.parallel.overlap import (
    ForwardBackwardOverlap,
    exclude_other_call_time,
    yield_to_overlapped_pass,
)

CPU = torch.device("cpu")


def noting(done: list[str], name: str, turns: int) -> None:
    for turn in range(turns):
        done.append(f"{name}{turn}")
        if turn < turns - 1:
            yield_to_overlapped_pass()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(3, 3, "a0 b0 a1 b1 a2 b2"), (1, 3, "a0 b0 b1 b2"), (4, 2, "a0 b0 a1 b1 a2 a3"), (1, 1, "a0 b0")],
)
def test_calls_alternate_until_one_ends(first: int, second: int, expected: str) -> None:
    done: list[str] = []
    ForwardBackwardOverlap(CPU).run(lambda: noting(done, "a", first), lambda: noting(done, "b", second))
    assert " ".join(done) == expected


def test_turns_pass_inside_a_backward() -> None:
    done: list[str] = []

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            done.append("before")
            yield_to_overlapped_pass()
            done.append("after")
            return 2 * gradient

    x = torch.ones(3, requires_grad=True)
    output = Passing.apply(x).sum()
    ForwardBackwardOverlap(CPU).run(lambda: noting(done, "a", 2), output.backward)
    assert done == ["a0", "before", "a1", "after"]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_both_calls_compute_under_the_callers_autocast() -> None:
    found: list[torch.dtype] = []

    def multiply() -> None:
        found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        yield_to_overlapped_pass()
        found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    with torch.autocast("cpu", torch.bfloat16):
        ForwardBackwardOverlap(CPU).run(multiply, multiply)
    assert found == [torch.bfloat16] * 4
    ForwardBackwardOverlap(CPU).run(multiply, multiply)
    assert found[4:] == [torch.float32] * 4


def test_the_first_call_draws_the_random_numbers_that_it_draws_alone() -> None:
    def draw() -> list[float]:
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            yield_to_overlapped_pass()
        return drawn

    def recompute() -> None:
        # As in activation checkpointing, whose state of random numbers is another one while it runs.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            again.extend([float(torch.rand(()))])
            yield_to_overlapped_pass()
            again.extend([float(torch.rand(()))])

    torch.manual_seed(1)
    of_the_second = [float(torch.rand(())) for _ in range(2)]
    torch.manual_seed(0)
    alone, after = draw(), float(torch.rand(()))
    again: list[float] = []
    torch.manual_seed(0)
    found: list[float] = []
    ForwardBackwardOverlap(CPU).run(lambda: found.extend(draw()), recompute)
    assert (found, float(torch.rand(()))) == (alone, after)
    assert again == of_the_second


@pytest.mark.parametrize("failing", ["first", "second"])
@pytest.mark.parametrize("turn", range(3))
def test_an_error_of_one_call_stops_the_other(failing: str, turn: int) -> None:
    done: list[str] = []

    def fail() -> None:
        noting(done, "fails", turn + 1)
        raise ValueError("no")

    def endless() -> None:
        try:
            while True:
                yield_to_overlapped_pass()
        finally:
            done.append("stopped")

    calls = [fail, endless] if failing == "first" else [endless, fail]
    with pytest.raises(ValueError, match="no"):
        ForwardBackwardOverlap(CPU).run(*calls)
    started = failing == "second" or turn > 0
    assert ("stopped" in done) == started
    assert not [one for one in threading.enumerate() if one.name == "overlapped backward"]
    yield_to_overlapped_pass()


def test_spans_leave_out_the_turns_of_the_other_call() -> None:
    now = iter(range(100))
    spans: list[list[tuple[float, float]]] = []

    def call() -> None:
        start = float(next(now))
        yield_to_overlapped_pass()
        spans.append(exclude_other_call_time(start, float(next(now))))

    ForwardBackwardOverlap(CPU, lambda: float(next(now))).run(call, call)
    # 0 first starts, 1 passes; 2 second starts, 3 passes; 4 first goes on, 5 ends; 6 second goes on, 7 ends.
    assert spans == [[(0.0, 1.0), (4.0, 5.0)], [(2.0, 3.0), (6.0, 7.0)]]
