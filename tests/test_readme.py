"""What the README shows runs as it is written, and prints what it says."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pipe.cli import main
from lightning_pipe.llm.tasks import llm_plan
from lightning_pipe.recsys.plans import recsys_plan
from lightning_pipe.recsys.tasks import recsys_tasks
from lightning_pipe.strategies.registry import STRATEGIES
from tests.running_in import running_in

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def the_one_with(language: str, part: str) -> str:
    found = [snippet for snippet in snippets(language) if part in snippet]
    assert len(found) == 1, f"the README has {len(found)} {language} snippets with {part!r}"
    return found[0]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with running_in(tmp_path):
        (tmp_path / "recommender.py").write_text(the_one_with("python", "class Recommender"))
        (tmp_path / "recommender.yaml").write_text(the_one_with("yaml", "recommender.Recommender"))
        yield tmp_path


def test_every_snippet_of_code_is_run_by_a_test_here() -> None:
    assert {language: len(snippets(language)) for language in ("python", "yaml", "text")} == {
        "python": 4,
        "yaml": 2,
        "text": 1,
    }


def test_the_recommender_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("recommender.py", run_name="__main__")
    assert "100/100" in capsys.readouterr().out


def test_the_recommender_trains_from_its_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "recommender.yaml", "--trainer.devices", "1"]) == 0
    assert "100/100" in capsys.readouterr().out


def test_the_language_model_trains_in_two_stages(folder: Path) -> None:
    Path("language.py").write_text(the_one_with("python", "HFCausalLM"))
    command = [sys.executable, "language.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "4/4" in result.stdout


def test_a_language_model_of_ones_own_trains_in_a_pipeline_of_one_and_without(folder: Path) -> None:
    Path("mine.py").write_text(the_one_with("python", "class Decoder"))
    names = runpy.run_path("mine.py")
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in torch.randint(256, (8, 17), generator=generator)]
    weights = []
    for strategy in ("llm_gpipe_pipeline", "auto"):
        torch.manual_seed(1)
        module = names["Language"]()
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **quiet)
        trainer.fit(module, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
        weights.append(module.model.head.weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


def test_the_train_pipeline_runs_to_its_end(folder: Path) -> None:
    # What torchrun tells the only process of a run.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(address)
    (folder / "train.py").write_text(the_one_with("python", "TrainPipeline"))
    names = runpy.run_path("train.py", run_name="__main__")
    assert names["scores"].shape == (64,)
    assert list(names["batches"]) == []


def test_the_plan_can_be_run_and_does_what_is_said_of_it(folder: Path) -> None:
    Path("mine.yaml").write_text(the_one_with("yaml", "name: mine"))
    plan = recsys_plan("mine.yaml", recsys_tasks())
    assert plan.pipeline_depth == 2
    ahead = {name for name, where in plan.schedule.items() if where.stage}
    assert ahead == {"H2DAndShuffle", "EmbInputDistStart", "EmbInputDistWait"}
    assert plan.stale == ()


def test_the_timeline_is_the_one_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "show", "recsys_prefetch_pipeline"]) == 0
    assert the_one_with("text", "timeline") in capsys.readouterr().out


def test_the_table_of_strategies_has_every_name_and_its_plans_batches_in_flight() -> None:
    rows = dict(re.findall(r"^\| `(\w*pipeline)` \|.*\| (\d) \|$", README, re.MULTILINE))
    assert list(rows) == [entry.name for entry in STRATEGIES]
    for entry in STRATEGIES:
        if entry.strategy == "LLMPipelineStrategy":
            assert int(rows[entry.name]) == llm_plan(id, id).pipeline_depth
        if entry.strategy == "RecsysPipelineStrategy" and entry.plan != "auto":
            assert int(rows[entry.name]) == recsys_plan(entry.plan, recsys_tasks()).pipeline_depth


def test_the_files_and_make_targets_that_it_names_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (train-llm|train|test|setup)\b", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    named = re.findall(r"examples/[\w/.]+\w", README) + re.findall(r"\]\(([\w/.]+)\)", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_versions_it_names_are_the_pinned_ones() -> None:
    pinned = {
        name: version.rsplit(".", 1)[0]
        for file in ("torch.txt", "torchrec-cpu.txt")
        for name, version in re.findall(
            r"^([\w-]+)==([\d.]+)", (ROOT / "requirements" / file).read_text(), re.MULTILINE
        )
    }
    assert dict(re.findall(r'"(torch|torchrec|fbgemm-gpu-cpu)==([\d.]+)\.\*"', README)) == pinned
