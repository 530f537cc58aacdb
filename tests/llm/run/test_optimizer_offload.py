"""State that rests on the host: steps to the bit those without, little of it on the device at a time, same keys."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.run.optimizer_offload import OptimizerStateOffload
from tests.llm.second_device import DEVICE, SecondDevice, TensorThere

STEPS = 3
SHAPES = ((4, 6), (6, 4), (3, 4), (5, 5), (4, 4), (7, 3))
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "plain SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.1),
    "Adafactor": lambda given: torch.optim.Adafactor(given, lr=0.1),
    "Muon": lambda given: torch.optim.Muon(given, lr=0.1),
}


def values(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.05}]


def train(
    build: Callable[[Any], Optimizer],
    device: torch.device | str = "cpu",
    *,
    bucket_bytes: int | None = None,
    steps: range = range(1, STEPS + 1),
    loaded: Any = None,
) -> tuple[list[nn.Parameter], Optimizer, OptimizerStateOffload | None]:
    """Parameters, one of which never has a gradient, after some steps; the state is offloaded if buckets are given."""
    parameters = [nn.Parameter(value.to(device)) for value in (loaded[0] if loaded else values(0))]
    optimizer = build(groups(parameters))
    offloaded = None if bucket_bytes is None else OptimizerStateOffload(optimizer, bucket_bytes)
    if loaded:
        optimizer.load_state_dict(loaded[1])
    for step in steps:
        for parameter, gradient in list(zip(parameters, values(step), strict=True))[:-1]:
            parameter.grad = gradient.to(device)
        optimizer.step()
        optimizer.zero_grad()
    return parameters, optimizer, offloaded


def inner(tree: Any) -> Any:
    return tree_map_only(TensorThere, lambda value: value.values_there, tree)


def same(one: Any, other: Any) -> bool:
    first, second = tree_leaves(inner(one)), tree_leaves(inner(other))
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(first, second, strict=True)
    )


def state_bytes(optimizer: Optimizer) -> int:
    """That are not on the host."""
    leaves = tree_leaves(list(optimizer.state.values()))
    return sum(value.nbytes for value in leaves if isinstance(value, Tensor) and value.device.type != "cpu")


@pytest.fixture
def device() -> Iterator[SecondDevice]:
    with SecondDevice() as device:
        yield device


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_state_moved_to_a_device_and_back_results_are_equal_to_the_bit(name: str, device: SecondDevice) -> None:
    expected, plain, _ = train(OPTIMIZERS[name], DEVICE)
    found, optimizer, _ = train(OPTIMIZERS[name], DEVICE, bucket_bytes=200)
    assert same(found, expected)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()
    assert same(optimizer.state_dict(), plain.state_dict())
    assert state_bytes(optimizer) == 0
    assert state_bytes(plain) > 0 or name == "plain SGD"


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("bucket_bytes", [1, 200])
def test_no_more_state_than_a_buckets_is_on_the_device(bucket_bytes: int, device: SecondDevice) -> None:
    sizes = [4 * value.numel() for value in values(0)]
    trained = sum(sizes) + sum(sizes[:-1])  # parameters and gradients
    largest = max(max(sizes), bucket_bytes)
    workspace = 3 * largest  # of the step's own, for a parameter at a time
    train(OPTIMIZERS["AdamW"], DEVICE, bucket_bytes=bucket_bytes)
    assert trained < device.peak <= trained + 2 * largest + workspace
    whole = SecondDevice()
    with whole:
        train(OPTIMIZERS["AdamW"], DEVICE)
    assert whole.peak >= trained + 2 * sum(sizes[:-1])


# ---------------------------------------------------------------------- copies that take time


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondDevice]:
    with SecondDevice(delays_copies=True) as device:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        # PyTorch's optimizers ask the accelerator of a CUDA build for its stream, also without a driver.
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
        monkeypatch.setattr(torch.accelerator, "synchronize", device.synchronize)
        yield device


@pytest.mark.parametrize("bucket_bytes", [1, 200])
def test_the_state_is_on_the_host_whole_when_a_step_returns(bucket_bytes: int, slow_device: SecondDevice) -> None:
    for steps in range(1, STEPS + 1):
        _, plain, _ = train(OPTIMIZERS["AdamW"], DEVICE, steps=range(1, steps + 1))
        _, optimizer, _ = train(OPTIMIZERS["AdamW"], DEVICE, bucket_bytes=bucket_bytes, steps=range(1, steps + 1))
        assert same(optimizer.state_dict(), plain.state_dict())


def test_state_that_is_moved_off_the_device_is_on_the_host_whole(slow_device: SecondDevice) -> None:
    _, optimizer, _ = train(OPTIMIZERS["AdamW"], DEVICE)
    expected = copy.deepcopy(inner(optimizer.state_dict()))
    offloaded = OptimizerStateOffload(optimizer)
    assert same(optimizer.state_dict(), expected)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(DEVICE)
    offloaded.move_to_host()
    assert same(optimizer.state_dict(), expected)


def test_after_a_step_that_fails_the_state_is_on_the_host_whole(slow_device: SecondDevice) -> None:
    _, plain, _ = train(OPTIMIZERS["AdamW"], DEVICE)
    parameters, optimizer, _ = train(OPTIMIZERS["AdamW"], DEVICE, bucket_bytes=1)
    parameters[0].grad = torch.ones(parameters[0].shape).to(DEVICE)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert same(optimizer.state_dict()["state"], plain.state_dict()["state"])
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]
    assert state_bytes(optimizer) == 0


# ---------------------------------------------------------------------- checkpoints and neighbors


@pytest.mark.parametrize("writes", [False, True])
def test_a_checkpoint_of_either_kind_is_read_by_the_other(writes: bool, device: SecondDevice) -> None:
    expected, _, _ = train(OPTIMIZERS["AdamW"], DEVICE)
    first, optimizer, _ = train(OPTIMIZERS["AdamW"], DEVICE, bucket_bytes=200 if writes else None, steps=range(1, 2))
    saved = inner([value.detach() for value in first]), copy.deepcopy(inner(optimizer.state_dict()))
    found, optimizer, _ = train(
        OPTIMIZERS["AdamW"], DEVICE, bucket_bytes=None if writes else 200, steps=range(2, STEPS + 1), loaded=saved
    )
    assert same(found, expected)


def test_closing_puts_the_state_back_and_leaves_the_optimizer_as_it_was(device: SecondDevice) -> None:
    _, plain, _ = train(OPTIMIZERS["AdamW"], DEVICE)
    _, optimizer, offloaded = train(OPTIMIZERS["AdamW"], DEVICE, bucket_bytes=200)
    assert offloaded is not None
    offloaded.stop_offloading()
    assert state_bytes(optimizer) == state_bytes(plain)
    assert same(optimizer.state_dict(), plain.state_dict())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_closures_hooks_and_schedulers_see_one_step() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    other = nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.SGD([parameter, other], lr=0.1, momentum=0.9)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    OptimizerStateOffload(optimizer, bucket_bytes=1)
    optimizer.register_step_post_hook(lambda used, *_: calls.append(f"after {len(used.param_groups[0]['params'])}"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append("closure")
        (parameter * 2 + other).sum().backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert calls == ["before", "closure", "after 2"]
    assert torch.equal(parameter, torch.full((3, 3), 0.8))
    scheduler.step()
    assert optimizer.step(closure=closure) == 7.0
    assert optimizer.param_groups[0]["lr"] == 0.05


class Coupled(torch.optim.SGD):
    """Not of PyTorch: its step looks at all parameters."""

    seen: int = 0

    def step(self, closure: Any = None) -> Any:
        self.seen = max(self.seen, sum(len(group["params"]) for group in self.param_groups))
        return super().step(closure)


def test_an_optimizer_that_is_not_pytorchs_steps_all_of_its_parameters_at_once(device: SecondDevice) -> None:
    expected, _, _ = train(OPTIMIZERS["SGD"], DEVICE)
    found, optimizer, _ = train(lambda given: Coupled(given, lr=0.1, momentum=0.9), DEVICE, bucket_bytes=1)
    assert isinstance(optimizer, Coupled)
    assert optimizer.seen == len(SHAPES) - 1  # one has no gradient
    assert same(found, expected)
    assert state_bytes(optimizer) == 0


def test_an_optimizer_that_evaluates_its_closure_in_the_step_is_refused() -> None:
    with pytest.raises(SetupError, match="LBFGS"):
        OptimizerStateOffload(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]))


# ---------------------------------------------------------------------- DTensors


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_sharded_parameters_are_stepped_as_they_are_without(name: str) -> None:
    found = []
    for offload in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
        for part in (*model, model):
            fully_shard(part, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        optimizer = OPTIMIZERS[name](model.parameters())
        if offload:
            OptimizerStateOffload(optimizer, bucket_bytes=1)
        for step in range(STEPS):
            model(torch.full((2, 4), float(step + 1))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(isinstance(value, DTensor) for value in model.parameters())
        found.append([value.full_tensor() for value in model.parameters() if isinstance(value, DTensor)])
        found.append(
            [value.full_tensor() for value in tree_leaves(optimizer.state_dict()) if isinstance(value, DTensor)]
        )
    assert same(found[0], found[2])
    assert same(found[1], found[3])
    assert found[1]
