"""Which optimizers a table can have, with which hyper-parameters, and what is said about the others."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import optim as torchrec_optim

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.kernels.table_optimizer import (
    SparseOptimizerConfig,
    TableOptimizerSpec,
    resolve_table_optimizer,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def table() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4, 4))


def resolve(optimizer_class: Any, device: torch.device = CPU, **arguments: Any) -> TableOptimizerSpec:
    default = SparseOptimizerConfig.from_config({"class_path": optimizer_class, "init_args": arguments})
    found = resolve_table_optimizer("ebc.users", table(), default, device)
    assert found is not None
    return found


def refusal(optimizer_class: Any, device: torch.device = CPU, **arguments: Any) -> str:
    with pytest.raises(SetupError, match=r"ebc\.users") as caught:
        resolve(optimizer_class, device, **arguments)
    return str(caught.value)


def test_hyper_parameters_not_given_are_the_class_s_own_and_are_passed_to_the_kernel() -> None:
    assert resolve("torch.optim.SGD").optimizer_kwargs() == {"learning_rate": 0.001}
    assert resolve("torch.optim.Adagrad").optimizer_kwargs() == {"learning_rate": 0.01, "eps": 1e-10}
    assert resolve(torchrec_optim.RowWiseAdagrad, lr=1).optimizer_kwargs() == {"learning_rate": 1, "eps": 1e-10}


def in_backward(optimizer_class: Any, device: torch.device = CPU, **arguments: Any) -> TableOptimizerSpec:
    """As given by ``apply_optimizer_in_backward``."""
    parameter = table()
    parameter._optimizer_classes, parameter._optimizer_kwargs = [optimizer_class], [arguments]  # type: ignore[attr-defined]
    found = resolve_table_optimizer("ebc.users", parameter, None, device)
    assert found is not None
    return found


KERNELS = {
    name: argument.default
    for name, argument in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters.items()
}


@pytest.mark.parametrize(
    ("optimizer_class", "names", "left_out"),
    [
        (torch.optim.SGD, {"learning_rate"}, {"lr": (0.01, 0.001)}),
        (torch.optim.Adagrad, {"learning_rate", "eps"}, {"eps": (1e-8, 1e-10)}),
        (torchrec_optim.RowWiseAdagrad, {"learning_rate", "eps"}, {"eps": (1e-8, 1e-10)}),
        (torch.optim.Adam, {"learning_rate", "beta1", "beta2", "eps"}, {"lr": (0.01, 0.001)}),
        (torchrec_optim.LAMB, {"learning_rate", "beta1", "beta2", "eps", "weight_decay"}, {}),
        (torchrec_optim.LarsSGD, {"learning_rate", "eta", "momentum", "weight_decay"}, {}),
    ],
)
def test_in_torchrec_s_way_those_not_given_are_the_kernel_s_and_named_where_the_class_has_others(
    optimizer_class: Any, names: set[str], left_out: dict[str, Any]
) -> None:
    found = in_backward(optimizer_class, CUDA)
    assert found.optimizer_kwargs() == {name: KERNELS[name] for name in names}
    assert found.left_out == left_out
    assert in_backward(optimizer_class, CUDA, lr=0.3).learning_rate == 0.3
    assert "lr" not in in_backward(optimizer_class, CUDA, lr=0.3).left_out


def test_in_torchrec_s_way_arguments_may_have_the_kernel_s_names() -> None:
    found = in_backward(torch.optim.Adam, CUDA, learning_rate=0.2, beta1=0.7, eps=1e-6)
    assert found.optimizer_kwargs() == {"learning_rate": 0.2, "beta1": 0.7, "beta2": KERNELS["beta2"], "eps": 1e-6}
    assert found.left_out == {}
    with pytest.raises(SetupError, match=r"got lr and learning_rate, which have the same meaning"):
        in_backward(torch.optim.SGD, lr=0.1, learning_rate=0.2)
    with pytest.raises(SetupError, match="no argument beta1"):
        in_backward(torch.optim.SGD, lr=0.1, beta1=0.2)


def test_arguments_at_their_defaults_and_choices_of_implementation_are_accepted() -> None:
    found = resolve("torch.optim.SGD", lr=0.1, momentum=0, nesterov=False, foreach=False, weight_decay=0.0)
    assert found.optimizer_kwargs() == {"learning_rate": 0.1}


@pytest.mark.parametrize(
    ("optimizer_class", "arguments"),
    [
        ("torch.optim.SGD", {"momentum": 0.9}),
        ("torch.optim.SGD", {"weight_decay": 0.1}),
        ("torch.optim.Adagrad", {"lr_decay": 0.1}),
        ("torchrec.optim.RowWiseAdagrad", {"weight_decay": 0.1}),
        ("torchrec.optim.RowWiseAdagrad", {"initial_accumulator_value": 0.1}),
    ],
)
def test_a_hyper_parameter_that_the_kernel_would_ignore_or_die_on_is_named(
    optimizer_class: str, arguments: dict[str, Any]
) -> None:
    message = refusal(optimizer_class, **arguments)
    (key,) = arguments
    assert f"{key}={arguments[key]!r}" in message
    assert optimizer_class in message
    assert "Leave it at" in message


def test_an_argument_that_the_class_does_not_have_is_named_even_where_the_class_would_swallow_it() -> None:
    message = refusal("torchrec.optim.RowWiseAdagrad", momentum=0.9)
    assert "no argument momentum" in message
    assert "eps" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "1e-3", None])
def test_a_hyper_parameter_that_is_no_finite_number_from_0_on_is_refused(value: Any) -> None:
    for key in ("lr", "eps"):
        assert refusal("torch.optim.Adagrad", **{key: value}).endswith(
            f" got {key}={value!r}, expected a finite number of at least 0. Set {key} to another value."
        )


@pytest.mark.parametrize("betas", [(0.9, 1.0), (math.nan, 0.9), (0.9,), ("0.9", "0.99")])
def test_betas_that_are_no_pair_of_rates_are_refused(betas: Any) -> None:
    said = refusal("torch.optim.Adam", CUDA, lr=0.1, eps=1e-8, betas=betas)
    assert f"got betas={betas!r}, expected a pair of numbers from 0 to below 1" in said


def test_a_rate_may_be_zero_and_a_tensor_and_come_from_numpy() -> None:
    for rate in (0, 0.0, torch.tensor(0.1), np.float32(0.1)):
        assert resolve("torch.optim.SGD", lr=rate).learning_rate == pytest.approx(float(rate))
    assert resolve("torch.optim.Adam", CUDA, lr=0.1, eps=0.0, betas=[0.0, 0.999]).hyper_parameters["betas"]


def test_adam_has_no_kernel_on_cpu_and_the_message_says_what_has() -> None:
    message = refusal("torch.optim.Adam", lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    assert "torch.optim.Adam, for which FBGEMM has no CPU kernel" in message
    assert "torch.optim.SGD" in message
    assert "torchrec.optim.LAMB" not in message


def test_adam_on_cuda_is_accepted_once_all_of_it_is_said() -> None:
    assert "betas, eps" in refusal("torch.optim.Adam", CUDA, lr=0.1)
    found = resolve("torch.optim.Adam", CUDA, lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    assert found.optimizer_kwargs() == {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    assert found.unfused_class is None  # stepping a whole table would be another optimizer
    assert "weight_decay=0.1" in refusal("torch.optim.Adam", CUDA, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)


def test_torchrec_s_placeholders_stand_for_torch_s_classes_and_have_no_defaults() -> None:
    found = resolve(torchrec_optim.SGD, lr=0.1)
    assert found.unfused_class is torch.optim.SGD
    assert "requires lr, eps" in refusal(torchrec_optim.Adagrad)


def test_an_optimizer_without_a_fused_kernel_is_refused() -> None:
    assert "torch.optim.RMSprop, which has no fused kernel" in refusal(torch.optim.RMSprop)


def test_an_optimizer_of_its_own_comes_before_the_default() -> None:
    parameter = table()
    arguments = {"lr": 0.3}
    _apply_optimizer_in_backward(torch.optim.Adagrad, [parameter], arguments)
    default = SparseOptimizerConfig(torch.optim.SGD, {"lr": 0.1})
    found = resolve_table_optimizer("users", parameter, default, CPU)
    assert found is not None
    assert (found.name, found.learning_rate) == ("torch.optim.Adagrad", 0.3)
    assert arguments == {"lr": 0.3}  # the user's own object
    assert resolve_table_optimizer("users", table(), None, CPU) is None


def test_two_optimizers_on_one_table_are_refused() -> None:
    parameter = table()
    for optimizer_class in (torch.optim.SGD, torch.optim.Adagrad):
        _apply_optimizer_in_backward(optimizer_class, [parameter], {"lr": 0.1})
    with pytest.raises(SetupError, match=r"users must have one .* got 2 \(torch.optim.SGD, torch.optim.Adagrad"):
        resolve_table_optimizer("users", parameter, None, CPU)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"class_path": "torch.optim.SGD", "lr": 0.1}, "got .*'lr': 0.1.* Set these keys only"),
        ({"class_path": "torch.optim.Sgd"}, "cannot be imported"),
        ({"class_path": "torch.nn.Linear"}, "must be a subclass of Optimizer"),
        ("torch.optim.SGD", "must be a mapping"),
        ({"class_path": "torch.optim.SGD", "init_args": "lr"}, "a mapping init_args, got"),
    ],
)
def test_a_configuration_that_says_no_optimizer_is_refused(config: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        SparseOptimizerConfig.from_config(config)
