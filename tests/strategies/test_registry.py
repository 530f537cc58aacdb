"""The names that ``Trainer(strategy=...)`` takes."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor

import lightning_pipe
from lightning_pipe.llm.schedules.named import SCHEDULES
from lightning_pipe.recsys.plans.named import PLANS
from lightning_pipe.strategies import PipelineStrategy, RecsysPipelineStrategy
from lightning_pipe.strategies.registry import STRATEGIES, register
from tests.loops.models import Net
from tests.patience import HANG
from tests.rounding import Reference
from tests.strategies.cases import ADAGRAD, Clicks, difference, fit, loader, recsys, state_of, trainer

RECSYS = [entry for entry in STRATEGIES if entry.strategy == "RecsysPipelineStrategy"]
LLM = [entry for entry in STRATEGIES if entry.strategy == "LLMPipelineStrategy"]


def test_importing_the_package_registers_every_name() -> None:
    assert lightning_pipe.__version__
    names = [entry.name for entry in STRATEGIES]
    assert set(names) <= set(StrategyRegistry.available_strategies())


@pytest.mark.parametrize("entry", STRATEGIES, ids=lambda entry: entry.name)
def test_a_name_is_described_in_one_line(entry: Any) -> None:
    assert StrategyRegistry[entry.name]["description"] == entry.description
    assert entry.description
    assert "\n" not in entry.description


def test_registering_again_changes_nothing() -> None:
    before = dict(StrategyRegistry)
    register()
    assert dict(StrategyRegistry) == before


def test_a_name_that_someone_else_has_taken_is_left_to_them() -> None:
    ours = StrategyRegistry["pipeline"]
    theirs = {"strategy": object, "description": "theirs", "init_params": {}, "strategy_name": "pipeline"}
    try:
        StrategyRegistry["pipeline"] = theirs
        register()
        assert StrategyRegistry["pipeline"] is theirs
    finally:
        StrategyRegistry["pipeline"] = ours


def test_every_recsys_plan_has_a_name() -> None:
    assert {entry.plan for entry in RECSYS} == {*PLANS, "auto"}
    assert [entry.init_args for entry in RECSYS] == [{"plan": entry.plan} for entry in RECSYS]


def test_every_schedule_has_a_name() -> None:
    assert {entry.init_args["schedule"] for entry in LLM} == set(SCHEDULES)
    assert {entry.name for entry in LLM} == {f"llm_{name}_pipeline" for name in SCHEDULES}


def test_each_trainer_has_a_strategy_of_its_own() -> None:
    one, other = trainer("pipeline").strategy, trainer("pipeline").strategy
    assert type(one) is type(other) is PipelineStrategy
    assert one is not other
    assert isinstance(trainer("recsys_base_pipeline").strategy, RecsysPipelineStrategy)


@cache
def serial() -> dict[str, Tensor]:
    return state_of(fit(Clicks(), recsys("serial")))


@pytest.mark.parametrize("entry", RECSYS, ids=lambda entry: entry.name)
def test_a_name_trains_under_its_plan(entry: Any) -> None:
    class Named(Clicks):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            assert isinstance(self.trainer.strategy, RecsysPipelineStrategy)
            plans.add(self.trainer.strategy.pipeline.plan.name)

    plans: set[str] = set()
    module = Named(in_backward=ADAGRAD)
    state = state_of(fit(module, entry.name))
    assert plans == {"serial" if entry.plan == "auto" else entry.plan}  # of the latter the first one that is tried
    # The stale one trains something else, and says so.
    trains_the_same = difference(state, serial()) == []
    assert trains_the_same == (entry.plan != "semi_sync")


def test_the_plain_name_trains_any_module() -> None:
    module = Net()
    fit(module, "pipeline", module.train_dataloader(), module.val_dataloader())
    assert len(module.losses) == 12


def test_names_without_tables_need_no_torchrec() -> None:
    code = (
        "import sys; sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
        "import lightning.pytorch as pl, lightning_pipe\n"
        "pl.Trainer(accelerator='cpu', devices=1, strategy='pipeline', logger=False, enable_checkpointing=False)\n"
        "from lightning_pipe.engine import SetupError\n"
        "for one in ('llm_1f1b_pipeline', 'llm_auto_pipeline', 'in_process_pipeline'):\n"
        "    pl.Trainer(accelerator='cpu', devices=2, strategy=one, logger=False, enable_checkpointing=False)\n"
        "import lightning_pipe.cli.llm, lightning_pipe.cli.plan\n"
        "from lightning_pipe.callbacks import *\n"
        "try:\n"
        "    pl.Trainer(accelerator='cpu', devices=1, strategy='recsys_base_pipeline')\n"
        "except SetupError as error:\n"
        "    print('refused:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused: The recsys strategies need torchrec and fbgemm, which cannot be imported" in done.stdout


def test_evaluation_by_name_needs_no_more_than_the_module() -> None:
    (found,) = trainer("recsys_serial_pipeline").validate(Clicks(in_backward=ADAGRAD), loader(8), verbose=False)
    expected = Reference.of(lambda: trainer("auto").validate(Clicks(), loader(8), verbose=False)[0])
    assert expected.differences(found) == []
