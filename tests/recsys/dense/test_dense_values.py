"""Dense parameters and buffers before training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dense.dense_values import check_dense_initializable, materialize_dense

CPU = torch.device("cpu")


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        check_dense_initializable(module, set())
        materialize_dense(module, set(), CPU)
    return module


def test_modules_on_the_meta_device_get_the_values_of_their_reset_parameters() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    filled(module)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    assert parameters["0.weight"].abs().max() <= 3**-0.5
    assert parameters["0.weight"].std() > 0.1
    assert buffers["1.running_var"].tolist() == [1.0, 1.0]
    again = filled(nn.Sequential(nn.Linear(3, 2, device="meta")))
    assert torch.equal(parameters["0.weight"], again.get_parameter("0.weight"))


def test_a_shared_parameter_stays_shared_and_a_frozen_one_frozen() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    first, second = module[0], module[1]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    filled(module)
    assert first.weight is second.weight
    assert not first.weight.is_meta
    assert not second.bias.requires_grad


def test_modules_of_tables_are_left_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    materialize_dense(module, {module[1]}, CPU)
    assert [parameter.is_meta for parameter in module.parameters()] == [False, False, True, True]


def test_tensors_on_the_meta_device_that_nothing_fills_are_named() -> None:
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.register_buffer("scale", torch.empty(2, device="meta"))
    with pytest.raises(SetupError, match=r"inner\.scale is on the meta device, and Module has no reset_parameters"):
        check_dense_initializable(module, set())
