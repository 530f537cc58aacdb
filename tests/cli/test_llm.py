"""``lightning-pipe llm``: what it prints of a configuration, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pipe.cli.main import main
from tests.running_in import running_in

MODULE = """
import lightning.pytorch as pl
import torch
from lightning_pipe.strategies import PipelineModule


class Language(PipelineModule):
    def build_model(self):
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        return torch.nn.Sequential(torch.nn.Embedding(11, 64), *layers, torch.nn.Linear(64, 11))

    def train_dataloader(self):
        rows = [{"input_ids": torch.arange(32) % 11, "labels": torch.arange(32) % 11} for _ in range(64)]
        return torch.utils.data.DataLoader(rows, 16)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        raise AssertionError("the data were asked for")


class Loud(pl.Callback):
    def __init__(self):
        raise AssertionError("made")
"""

CONFIGURATION = """
model: {class_path: language.Language}
trainer:
  accelerator: gpu
  devices: 2
  num_nodes: 2
  strategy:
    class_path: lightning_pipe.strategies.LLMPipelineStrategy
    init_args: {schedule: gpipe, num_microbatches: 8, parallel: {dp_replicate: 2}}
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
  callbacks:
    - class_path: language.Loud
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "language.py").write_text(MODULE)
    (tmp_path / "stages.yaml").write_text(CONFIGURATION)
    with running_in(tmp_path):
        yield tmp_path


def estimate(*options: str) -> int:
    return main(["llm", "estimate", "--config", "stages.yaml", *options])


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert estimate(*options) == 1
    return capsys.readouterr().err


def test_it_says_of_each_rank_of_a_pipeline_what_it_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    assert estimate("--memory", "1MiB") == 0
    out = capsys.readouterr().out
    assert "gpipe, 1 stage per rank, 8 micro-batches, layers 3+3, each of 2 x 32 tokens: fits 1.0 MiB" in out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1"]  # of four ranks, two make a pipeline
    assert "by rank, counted once per stage: 8, 8" in out
    assert {path for path in folder.rglob("*") if "__pycache__" not in path.parts} == before


def test_it_says_by_how_much_something_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate("--memory", "200kB") == 0
    out = capsys.readouterr().out
    assert "does not fit 195.3 KiB: " in " ".join(out.split())  # wherever the line is wrapped
    assert "% !" in out


def test_it_compares_with_the_other_schedules(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate("--compare", "--trainer.strategy", "llm_1f1b_pipeline", "--trainer.num_nodes", "1") == 0
    out = capsys.readouterr().out
    for name in ("gpipe", "1f1b", "zbv_zero_bubble", "dualpipev"):
        assert f"\n{name} " in out
    assert "on the rank that needs most" in " ".join(out.split())


def test_a_schedule_with_more_stages_than_layers_is_shown_without_figures_and_with_the_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert estimate("--compare", "--trainer.strategy", "llm_1f1b_pipeline") == 0
    out = capsys.readouterr().out
    assert "\n1f1b " in out  # four stages of six layers; the others have eight
    assert [line.split() for line in out.splitlines() if line.startswith("dualpipev ")] == [["dualpipev", "-"]]
    reason = "zbv_zero_bubble, dualpipev: 6 layers cannot go to 8 stages; expected 1 to 6 stage(s)"
    assert " ".join(out.split()).count(reason) == 1


def test_rows_and_length_may_be_given_in_the_place_of_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate("--rows", "32", "--length", "128", "--data", "language.Data") == 0
    assert "each of 4 x 128 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--memory", "much"], "the size is 'much'; expected a number of bytes above 0"),
        (["--length", "9"], "--length needs --rows, got --length 9 alone. Give both"),
        (["--trainer.devices", "auto"], "trainer.devices must be a number, got 'auto'"),
        (["--trainer.strategy", "ddp"], "The strategy must be an LLMPipelineStrategy, got DDPStrategy"),
        (
            ["--trainer.strategy", "llm_auto_pipeline"],
            "llm_auto_pipeline cannot be estimated, because it chooses its schedule when",
        ),
        (["--trainer.precision", "16-true"], "The trainer's precision '16-true' has no estimate"),
        (["--model", "lightning.pytorch.demos.boring_classes.BoringModel"], "PipelineModule, got BoringModel"),
    ],
)
def test_what_cannot_be_estimated_is_refused(
    options: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, *options)


STRATEGY = "--trainer.strategy.init_args"


def test_fields_of_option_groups_are_options_of_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate(f"{STRATEGY}.parallel.pp", "2", f"{STRATEGY}.parallel.dp_replicate", "2") == 0
    assert "gpipe, 1 stage per rank" in capsys.readouterr().out
    assert "parallel.pp=3" in refusal(capsys, f"{STRATEGY}.parallel.pp", "3")


def test_an_option_group_that_is_wrong_is_refused_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "stages.yaml").write_text(CONFIGURATION.replace("{dp_replicate: 2}", "{ppp: 2}"))
    assert "lightning-pipe: parallel has 'ppp'; expected only pp, " in refusal(capsys)
