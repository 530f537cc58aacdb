"""Optimizers that look for overflow by themselves are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.run.optimizer_refusals import refuse_fused


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_is_refused(fused: bool) -> None:
    options: dict[str, Any] = {"fused": fused}
    made = [SGD([nn.Parameter(torch.ones(1))], lr=0.1), AdamW([nn.Parameter(torch.ones(1))], **options)]
    if fused:
        with pytest.raises(SetupError, match="AdamW is fused"):
            refuse_fused(made)
    else:
        refuse_fused(made)


def test_an_optimizer_that_says_so_itself_is_refused() -> None:
    class Own(SGD):
        _step_supports_amp_scaling = True

    with pytest.raises(SetupError, match="Own is fused"):
        refuse_fused([Own([nn.Parameter(torch.ones(1))], lr=0.1)])
