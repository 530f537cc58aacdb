"""The page that says TorchRec's pipelines as plans: its table is whole, and each plan is built from its very text."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml
from torchrec.distributed.train_pipeline import train_pipelines

from lightning_pipe.recsys import recsys_plan, recsys_tasks
from tests.recsys.pipeline_cases import CASES, outcome

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text(encoding="utf-8")
TEXTS = {yaml.safe_load(text)["name"]: text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)}
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


def test_the_table_has_every_pipeline_of_torchrec() -> None:
    classes = {
        name
        for name, found in inspect.getmembers(train_pipelines, inspect.isclass)
        if issubclass(found, train_pipelines.TrainPipeline)
        and found.__module__ == train_pipelines.__name__
        and not inspect.isabstract(found)
    }
    assert [row[0].strip("`") for row in ROWS] == sorted(classes, key=list(vars(train_pipelines)).index)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", TEXTS)
def test_a_plan_of_the_page_is_built_from_its_text_and_trains_as_the_serial_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(TEXTS[name], encoding="utf-8")
    case = CASES["everything"]
    assert recsys_plan(path, recsys_tasks()).name == name
    assert outcome(case, path).same(outcome(case, "serial"))
