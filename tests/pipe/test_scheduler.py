"""Who may call a pipe while it runs, and what an interrupt leaves of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe import Pipe
from tests.patience import HANG


def _made() -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), 2, "never", devices=["cpu"] * 2)


def _ended(call: Callable[[], Any]) -> Any:
    """What a call returns or raises; fails where it hangs."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG)
    assert found, "the call does not end"
    return found[0]


def _in_forward(made: Pipe, other: Pipe) -> Any:
    def call(*_: Any) -> None:
        other(torch.ones(2, 2))

    hook = made[1].register_forward_pre_hook(call)
    try:
        return made(torch.ones(4, 2))
    finally:
        hook.remove()


def _in_backward(made: Pipe, other: Pipe) -> Any:
    total = other(torch.ones(4, 2)).sum()

    def hook(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda _: total.backward())

    handle = made[0].register_forward_hook(hook)
    try:
        return made(torch.ones(4, 2)).sum().backward()
    finally:
        handle.remove()


def _in_loss(made: Pipe, other: Pipe) -> Any:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return other.loss(torch.ones(2, 2), torch.ones(2, 1), nn.functional.mse_loss).detach() + output.mean()

    return made.loss(torch.ones(4, 2), torch.ones(4, 1), loss_fn, reduction="mean")


def _closed(made: Pipe, other: Pipe) -> Any:
    hook = made[1].register_forward_pre_hook(lambda *_: other.close())
    try:
        return made(torch.ones(4, 2))
    finally:
        hook.remove()


@pytest.mark.parametrize("call", [_in_forward, _in_backward, _in_loss, _closed])
def test_a_pipe_called_from_within_itself_says_what_to_do_and_works_afterwards(call: Callable[..., Any]) -> None:
    made = _made()
    error = _ended(lambda: call(made, made))
    assert isinstance(error, SetupError)
    assert "use another Pipe" in str(error)
    assert "micro-batch" in error.__notes__[0]
    assert _ended(lambda: made(torch.ones(4, 2))).shape == (4, 1)
    made.close()


@pytest.mark.parametrize("call", [_in_forward, _in_loss])
def test_a_pipe_may_be_called_from_within_another(call: Callable[..., Any]) -> None:
    made, other = _made(), _made()
    assert isinstance(_ended(lambda: call(made, other)), Tensor)
    made.close()
    other.close()
