"""The names that ``Trainer(strategy=...)`` takes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipe.llm.schedules.specs import SCHEDULES
from lightning_pipe.recsys.plans.recsys_plans import PLANS
from lightning_pipe.strategies.registry import STRATEGIES, register_strategies
from tests.patience import HANG

RECSYS = [entry for entry in STRATEGIES if entry.strategy == "RecsysPipelineStrategy"]
LLM = [entry for entry in STRATEGIES if entry.strategy == "LLMPipelineStrategy"]


def test_a_name_that_someone_else_has_taken_is_left_to_them() -> None:
    ours = StrategyRegistry["pipeline"]
    theirs = {"strategy": object, "description": "theirs", "init_params": {}, "strategy_name": "pipeline"}
    try:
        StrategyRegistry["pipeline"] = theirs
        register_strategies()
        assert StrategyRegistry["pipeline"] is theirs
    finally:
        StrategyRegistry["pipeline"] = ours


def test_every_recsys_plan_has_a_name() -> None:
    assert {entry.plan for entry in RECSYS} == {*PLANS, "auto"}
    assert [entry.init_args for entry in RECSYS] == [{"plan": entry.plan} for entry in RECSYS]


def test_every_schedule_has_a_name() -> None:
    assert {entry.init_args["schedule"] for entry in LLM} == set(SCHEDULES)
    assert {entry.name for entry in LLM} == {f"llm_{name}_pipeline" for name in SCHEDULES}


@pytest.mark.exhaustive
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
