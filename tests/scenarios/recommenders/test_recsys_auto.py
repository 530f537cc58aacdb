"""``recsys_auto_pipeline`` trains what every plan trains, says what it chose, and writes it down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.engine import PlanError, SetupError
from tests.distributed import run_ranks
from tests.strategies.cases import Clicks, Mixed, fit, loader, recsys, state_of

QUICK = {"iterations": 1, "rounds": 1, "max_generated": 2, "extra_rounds": 0}


def trained(plan: Any, rows: int = 256, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    module = Clicks(Mixed)
    used = fit(module, recsys(plan, **options), loader(rows), loader(12), val_check_interval=17)
    return module.losses, state_of(used), used.strategy


def test_it_trains_to_the_bits_of_the_serial_plan_and_says_and_writes_what_it_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plans" / "mine.yaml"
    losses, state, strategy = trained("auto", exploration=QUICK, save_plan=path)
    expected, its, _ = trained("serial")
    assert losses == expected
    assert all(torch.equal(state[name], its[name]) for name in its)
    chosen = strategy.plan_choice.plan
    assert f"plan {chosen.name} is the fastest" in capsys.readouterr().out
    assert set(strategy.plan_choice.measured) >= {"serial", "base", "prefetch"}
    again, _, _ = trained(path)
    assert again == expected


def run_case(rank: int, world_size: int) -> Any:
    # With fewer rounds, plans of the planner are not tried.
    losses, state, strategy = trained("auto", 900, exploration={**QUICK, "rounds": 5}, max_in_flight=2)
    expected, its, _ = trained("serial", 900)
    same = losses == expected and all(torch.equal(state[name], its[name]) for name in its)
    return same, strategy.plan_choice.plan.name, strategy.plan_choice.measured


def test_two_ranks_choose_the_same_plan() -> None:
    first, second = run_ranks(run_case, 2)
    assert first == second
    same, _, measured = first
    assert same
    assert "auto_1" in measured


def test_a_plan_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written"):
        trained("auto", exploration=QUICK, save_plan=tmp_path / "file" / "plan.yaml")


def test_arguments_without_a_plan_to_find_are_refused() -> None:
    with pytest.raises(SetupError, match="plan='auto', which searches for"):
        recsys("prefetch", save_plan="plan.yaml")
    with pytest.raises(SetupError, match="has 'steps'; expected only iterations, rounds, max_generated, replan_above"):
        recsys("auto", exploration={"steps": 3})
    with pytest.raises(PlanError, match="expected a whole number"):
        recsys("auto", exploration={"rounds": 0})
