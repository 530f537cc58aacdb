"""The check of the loss: all ranks raise, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.engine import InputError
from lightning_pipe.engine.ranks.loss_check import check_finite_loss
from tests.distributed import run_ranks

NAN, INFINITE = float("nan"), float("inf")

# The loss of each rank, and the ranks that are to blame.
LOSSES: dict[str, tuple[tuple[Any, Any], list[int]]] = {
    "finite": ((1.0, -2.0), []),
    "nan on one": ((1.0, NAN), [1]),
    "on both": ((NAN, -INFINITE), [0, 1]),
    "none on one, nan on the other": ((None, NAN), [1]),
    "none on both": ((None, None), []),
    "of several samples": (([1.0, NAN], [1.0, 2.0]), [0]),
}


def error_of(loss: Any, group: dist.ProcessGroup | None) -> str:
    try:
        check_finite_loss(None if loss is None else torch.tensor(loss, requires_grad=True), group)
    except InputError as error:
        return str(error)
    return "no error"


def check_all(rank: int, world_size: int) -> dict[str, str]:
    return {name: error_of(losses[rank], dist.group.WORLD) for name, (losses, _) in LOSSES.items()}


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str]]:
    return run_ranks(check_all, 2)


@pytest.mark.parametrize("name", LOSSES)
def test_every_rank_names_the_ranks_whose_loss_is_not_finite(errors: list[dict[str, str]], name: str) -> None:
    losses, blamed = LOSSES[name]
    for own, error in zip(losses, errors, strict=True):
        if blamed:
            assert f"not finite on rank(s) {blamed} (this rank has {own})" in error[name]
        else:
            assert error[name] == "no error"


def test_without_a_group_the_rank_checks_for_itself() -> None:
    assert "not finite on rank(s) [0]" in error_of([1.0, NAN], None)
    assert [error_of(loss, None) for loss in (1e30, None)] == ["no error"] * 2
