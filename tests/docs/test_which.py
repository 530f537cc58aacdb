"""The table of strategies has all of them, and says of each how many batches are in flight."""

from __future__ import annotations

import re

from lightning_pipe.llm.run.training_tasks import llm_plan
from lightning_pipe.recsys.plans.recsys_plans import recsys_plan
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from lightning_pipe.strategies.registry import STRATEGIES
from tests.docs.pages import DOCS

PAGE = (DOCS / "which.md").read_text(encoding="utf-8")


def test_the_table_has_every_name_and_its_plans_batches_in_flight() -> None:
    rows = dict(re.findall(r"^\| `(\w*pipeline)` \|.*\| (\d) \|$", PAGE, re.MULTILINE))
    assert list(rows) == [entry.name for entry in STRATEGIES]
    for entry in STRATEGIES:
        if entry.strategy == "LLMPipelineStrategy":
            assert int(rows[entry.name]) == llm_plan(id, lambda *_: None).pipeline_depth
        if entry.strategy == "RecsysPipelineStrategy" and entry.plan != "auto":
            assert int(rows[entry.name]) == recsys_plan(entry.plan, recsys_tasks()).pipeline_depth


def test_the_strategies_that_it_names_are_there() -> None:
    named = set(re.findall(r"`(\w*pipeline)`", PAGE))
    assert named == {entry.name for entry in STRATEGIES}
