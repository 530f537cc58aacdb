from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipe.engine.runtime.thread_state import get_thread_state, use_thread_state
from tests.engine.within import within
from tests.patience import HANG


class CountFunctions(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        type(self).calls += 1
        return func(*args, **(kwargs or {}))


class CountOperators(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        type(self).calls += 1
        return func(*args, **(kwargs or {}))


def grad() -> object:
    return (torch.ones(1, requires_grad=True) * 2).requires_grad


def inference() -> object:
    return torch.ones(1).is_inference()


def autocast() -> object:
    return (torch.ones(1, 1) @ torch.ones(1, 1)).dtype, torch.is_autocast_cache_enabled()


def device() -> object:
    return torch.empty(1).device.type


def saved() -> object:
    packed: list[int] = []
    weight = torch.ones(1, requires_grad=True)
    y = weight * weight
    node = y.grad_fn
    assert node is not None
    packed.append(int(node._saved_self.item()))  # type: ignore[attr-defined]
    return packed


def functions() -> object:
    CountFunctions.calls = 0
    torch.ones(1)
    return CountFunctions.calls


def operators() -> object:
    CountOperators.calls = 0
    torch.ones(1)
    return CountOperators.calls


def in_a_worker(body: Callable[[], object], state: Any) -> tuple[object, bool]:
    """What *body* sees in a thread under *state*, and whether the thread is itself again afterwards."""
    results: list[Any] = []

    def run() -> None:
        before = get_thread_state()
        with use_thread_state(state):
            results.append(body())
        results.append(get_thread_state() == before)

    thread = threading.Thread(target=run)
    thread.start()
    within(HANG, thread.join)
    return results[0], results[1]


@pytest.mark.parametrize(
    ("make", "probe"),
    [
        (nullcontext, grad),
        (torch.no_grad, grad),
        (torch.no_grad, inference),
        (torch.inference_mode, grad),
        (torch.inference_mode, inference),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), autocast),
        (lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False), autocast),
        (lambda: torch.device("meta"), device),
        (lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 10, lambda t: t + 1), saved),
        (CountFunctions, functions),
        (CountOperators, operators),
    ],
)
def test_a_worker_sees_what_the_submitting_thread_has_and_is_itself_again_afterwards(
    make: Callable[[], AbstractContextManager[Any]], probe: Callable[[], object]
) -> None:
    with make():
        state = get_thread_state()
        here = probe()
    plain, _ = in_a_worker(probe, get_thread_state())
    assert make is nullcontext or probe is inference or here != plain, "the probe sees no difference"
    assert in_a_worker(probe, state) == (here, True)


def test_several_settings_are_carried_together() -> None:
    with ExitStack() as stack:
        for manager in (torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), CountFunctions()):
            stack.enter_context(manager)
        state = get_thread_state()
        here = grad(), autocast(), device(), functions()
    assert in_a_worker(lambda: (grad(), autocast(), device(), functions()), state) == (here, True)


def test_a_grad_mode_inside_inference_mode_is_kept() -> None:
    with torch.inference_mode(), torch.set_grad_enabled(True):
        state = get_thread_state()
    assert in_a_worker(lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()), state)[0] == (True, True)
