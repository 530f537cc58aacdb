"""Optimizers of no parameters can be made, and keep nothing of how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.run.optimizer_setup import empty_optimizers_allowed, refuse_fused


class Stages(nn.Module):
    """A stage that is trained, one that is frozen, and one that another rank has."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.first.requires_grad_(trained)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.elsewhere = nn.Sequential()


def group(stage: nn.Module, **options: float) -> dict[str, Any]:
    return {"params": stage.parameters(), **options}


MADE: dict[str, Callable[[Stages], Optimizer]] = {
    "all that is trained": lambda one: SGD([each for each in one.parameters() if each.requires_grad], lr=0.1),
    "state that is made at once": lambda one: Adagrad(each for each in one.parameters() if each.requires_grad),
    "a stage": lambda one: AdamW(one.first.parameters()),
    "a stage that another rank has": lambda one: AdamW(one.elsewhere.parameters()),
    "groups": lambda one: AdamW([group(one.first), group(one.elsewhere, lr=1.0)]),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("how", MADE)
def test_an_optimizer_holds_the_modules_own_parameters_alone(how: str, trained: bool) -> None:
    module = Stages(trained)
    before = dict(module.named_parameters())
    made: list[Optimizer] = []
    with empty_optimizers_allowed(module, lambda: made):
        made.append(MADE[how](module))
    assert dict(module.named_parameters()) == before
    held = [one for group in made[0].param_groups for one in group["params"]]
    assert all(any(one is own for own in before.values()) for one in held)
    # Those of a stage that is named are held though they are frozen.
    assert len(held) == (2 if how in ("a stage", "groups") or (trained and "another" not in how) else 0)
    assert len(made[0].param_groups) == (2 if how == "groups" else 1)
    made[0].step()
    made[0].load_state_dict(made[0].state_dict())


def test_parameters_are_the_modules_own_again_after_an_error() -> None:
    module = Stages(False)
    before = dict(module.named_parameters())
    with pytest.raises(KeyError), empty_optimizers_allowed(module, list):
        raise KeyError
    assert dict(module.named_parameters()) == before


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_is_refused(fused: bool) -> None:
    options: dict[str, Any] = {"fused": fused}
    made = [SGD([nn.Parameter(torch.ones(1))], lr=0.1), AdamW([nn.Parameter(torch.ones(1))], **options)]
    if fused:
        with pytest.raises(SetupError, match="AdamW is fused"):
            refuse_fused(made)
    else:
        refuse_fused(made)
