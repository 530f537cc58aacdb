"""What the strategies have in common; missing ranks are in tests/scenarios/faults, random streams in test_pipeline."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
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
        strategy._warn_of_failing_restarts()  # type: ignore[attr-defined]
    said = [str(one.message) for one in caught]
    assert len(said) == warns
    assert all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in one for one in said)


class Ends(Net):
    """Raises in the second batch, if told to."""

    raises = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.raises and batch_idx == 1:
            raise ValueError("on purpose")


def leave(rank: int, world_size: int, raises: bool) -> bool:
    """Whether this process is still in its group after its exit handler has run, after a fit or an error in it."""
    module = Ends()
    module.raises = raises
    with pytest.raises(ValueError, match="on purpose") if raises else nullcontext():
        trainer("pipeline", devices=world_size, max_epochs=1).fit(module)
    assert base._ended_well == (not raises)
    base._destroy_process_group_at_exit()
    return dist.is_initialized()


@pytest.mark.parametrize("raises", [False, True])
def test_a_process_leaves_its_group_before_it_exits_unless_other_ranks_may_wait_for_its_exit(raises: bool) -> None:
    assert run_ranks(leave, 2, raises) == [raises, raises]


@pytest.mark.parametrize("name", ["pipeline", "recsys_prefetch_pipeline", "llm_1f1b_pipeline", "llm_auto_pipeline"])
def test_an_unknown_argument_is_refused_under_the_name_of_the_class_with_the_nearest(name: str) -> None:
    strategy: Any = type(trainer(name, devices=2).strategy)
    said = rf"^{strategy.__name__}\(\) got an unexpected keyword argument 'time_out'\. Did you mean 'timeout'\?"
    with pytest.raises(TypeError, match=said):
        strategy(time_out=3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'qq'$"):
        strategy(qq=3)
