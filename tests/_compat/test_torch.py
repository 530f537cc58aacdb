"""Contracts with PyTorch: its private names are there, and do what the wrappers say.

A failure means that PyTorch has changed: look for a public way first, then adapt ``lightning_pipe/_compat/torch.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_pipe._compat import torch as compat
from lightning_pipe._compat.torch import (
    get_found_inf_per_device,
)


def test_a_scaler_skips_the_step_where_its_flag_is_set() -> None:
    for overflow in (0.0, 1.0):
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        flags = get_found_inf_per_device(scaler, optimizer)
        assert flags, "GradScaler does not keep its flags in _per_optimizer_states after unscale_"
        for flag in flags.values():
            flag.fill_(overflow)
        scaler.step(optimizer)
        assert parameter.item() == overflow, "GradScaler does not read found_inf_per_device in step"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.SGD([], lr=0.1),
        lambda: torch.optim.AdamW(iter([])),
        lambda: torch.optim.Adagrad([], lr=0.1),
        lambda: torch.optim.Muon([]),
    ],
)
def test_optimizers_of_no_parameters_can_be_made_where_that_is_allowed(
    make: Callable[[], torch.optim.Optimizer],
) -> None:
    with compat.allow_empty_optimizers():
        made = make()
    assert [group["params"] for group in made.param_groups] == [[]]
    made.step()
    made.load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="empty parameter list"):
        make()


def test_fused_optimizers_say_that_they_look_for_overflow() -> None:
    own, fused = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=fused) for fused in (False, True))
    assert not compat.supports_amp_scaling(own)
    assert compat.supports_amp_scaling(fused), "GradScaler has another way to know fused optimizers now"


def test_changes_that_autograd_need_not_see_keep_a_tensors_version() -> None:
    tensor = torch.zeros(1)
    before = tensor._version
    with compat.version_counters_preserved((tensor,)):
        tensor.add_(1)
    assert tensor._version == before, "_unsafe_preserve_version_counter takes other arguments"


def test_optimizers_in_backward_are_found_at_their_parameters() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    assert compat.get_optimizers_in_backward(parameter) == []
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
    said = [(torch.optim.SGD, {"lr": 0.5})]
    words = "they are not kept in _optimizer_classes and _optimizer_kwargs"
    assert compat.get_optimizers_in_backward(parameter) == said, words
    compat.set_optimizer_in_backward(other, torch.optim.SGD, {"lr": 0.5})
    assert compat.get_optimizers_in_backward(other) == said


def test_a_writer_for_urls_takes_the_options_that_saves_need() -> None:
    writer = compat.fsspec_writer("memory://of-a-contract/a.ckpt", sync_files=False, use_listings_cache=False)
    assert isinstance(writer, dcp.StorageWriter)
    assert writer.sync_files is False  # type: ignore[attr-defined]


def test_a_tensor_that_is_kept_in_cpp_has_one_more_reference_and_is_never_deleted() -> None:
    tensor: Any = torch.ones(2)
    alive = weakref.ref(tensor)
    compat.leak_cpp_references([tensor, torch.nn.Parameter(tensor)])
    assert tensor._use_count() == 2
    del tensor
    assert alive() is not None
    compat.leak_cpp_references([])
