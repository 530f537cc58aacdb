"""What the strategies have in common; missing ranks are in tests/scenarios/faults, random streams in test_pipeline."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipe.strategies import base
from tests.distributed import run_ranks
from tests.loops.models import Net
from tests.strategies.cases import trainer


@pytest.mark.parametrize(
    ("shared", "restarts", "warns"), [("True", "3", True), ("True", "0", False), ("False", "3", False)]
)
def test_restarts_that_would_not_find_each_other_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, shared: str, restarts: str, warns: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    strategy = trainer("pipeline").strategy
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy._warn_of_stale_addresses()  # type: ignore[attr-defined]
    said = [str(one.message) for one in caught]
    assert len(said) == warns
    assert all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in one for one in said)


class Ends(Net):
    """Raises in the second batch, if told to."""

    raises = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.raises and batch_idx == 1:
            raise ValueError("on purpose")


def leave(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether this process is in a group behind what it does at its exit: after an error, and after a fit."""
    found = []
    for raises in (True, False):
        module = Ends()
        module.raises = raises
        used = trainer("pipeline", devices=world_size, max_epochs=1)
        try:
            used.fit(module)
        except ValueError:
            assert raises
        base._leave_at_exit()
        found.append(dist.is_initialized())
    return found[0], found[1]


def test_a_process_leaves_its_group_before_it_exits_unless_others_may_be_gone() -> None:
    assert run_ranks(leave, 2) == [(True, False)] * 2
