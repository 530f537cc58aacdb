"""Training the MovieLens example, its configurations and its report."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from matplotlib.figure import Figure

from examples.recsys_movielens import files, report
from examples.recsys_movielens.baseline import CompareWithItemMean
from examples.recsys_movielens.data import MovieLensData
from examples.recsys_movielens.features import training_rows
from examples.recsys_movielens.model import MovieLensDLRM
from examples.recsys_movielens.report import TrainingReport
from lightning_pipe.cli.main import main
from lightning_pipe.recsys.plans.recsys_plans import PLANS, recsys_plan
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from tests.examples.conftest import HISTORY, RATINGS
from tests.loops.models import trainer as quiet_trainer
from tests.running_in import running_in

EXAMPLE = Path(__file__).parents[2] / "examples" / "recsys_movielens"
CONFIGURATIONS = sorted(path for path in EXAMPLE.glob("*.yaml") if "trainer" in yaml.safe_load(path.read_text()))
AUTO = EXAMPLE / "auto.yaml"


def test_the_model_learns_on_one_device_under_lightnings_own_strategy_and_is_compared_with_the_baseline(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pl.seed_everything(0)
    data = MovieLensData(batch_size=64, history_length=HISTORY, data_dir=str(folder))
    model = MovieLensDLRM(learning_rate=5e-3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    callbacks = [CompareWithItemMean(), TrainingReport()]
    trainer = quiet_trainer(strategy="auto", max_epochs=6, callbacks=callbacks, default_root_dir=tmp_path)
    trainer.fit(model, data)
    assert [name for name, value in model.named_parameters() if torch.equal(value, before[name])] == []
    # Odd items are liked more: a coin's log loss is 0.693.
    assert trainer.callback_metrics["val/loss"] < 0.5
    assert trainer.callback_metrics["val/auroc"] > 0.75
    out = capsys.readouterr().out
    assert f"item mean, add-5 smoothing    {data.baseline.auroc:.4f}    {data.baseline.log_loss:.4f}" in out
    assert f"MovieLensDLRM                 {trainer.callback_metrics['val/auroc']:.4f}" in out
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")

    trainer.test(model, data, verbose=False)
    assert trainer.callback_metrics["test/auroc"] > 0.75
    predicted = torch.cat(trainer.predict(model, data))  # type: ignore[arg-type]
    assert predicted.shape == (RATINGS - training_rows(files.read(folder).seconds),)


def test_a_run_of_plan_auto_ends_with_the_costs_and_the_files_to_look_at(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration as it is, but for one process and a plan that is found soon."""
    drawn: list[Figure] = []
    monkeypatch.setattr(report, "FigureCanvasAgg", lambda figure: drawn.append(figure))
    configuration = yaml.safe_load(AUTO.read_text())
    trainer = configuration["trainer"]
    trainer |= {"devices": 1, "max_epochs": 1, "enable_progress_bar": False}
    auto = trainer["strategy"]["init_args"]["auto"]
    auto["exploration"] = {"iterations": 1, "rounds": 1, "max_generated": 0, "extra_rounds": 0}
    options = {callback["class_path"].split(".")[-1]: callback.get("init_args") for callback in trainer["callbacks"]}
    options["PipelineTrace"]["steps"] = [30, 3]
    options["PipelineProfiler"] |= {"at_steps": [45], "rounds": 1, "iterations": 2}
    configuration["data"]["init_args"] |= {"batch_size": 16, "history_length": HISTORY, "data_dir": str(folder)}
    with running_in(tmp_path):
        Path("short.yaml").write_text(yaml.safe_dump(configuration))
        main(["fit", "--config", "short.yaml"])

    logs = tmp_path / "logs" / "recsys_movielens_auto"
    run = logs / "version_0"
    out = capsys.readouterr().out
    printed, listed = out[out.index("latest 20 % of the ratings") :].split("losses.png", 1)
    assert "The tasks of a step take" in printed
    page = (run / "report.html").read_text(encoding="utf-8")  # has the table also where its intervals are wide
    assert all(task in page for task in ("EmbPrefetch", "DenseBackward", "OptimStep"))
    assert listed.count(str(run.relative_to(tmp_path))) == 3
    for name in ("timeline.png", "trace.json", "report.html"):
        assert name in listed
        assert (run / name).stat().st_size > 10_000
    plan = recsys_plan(logs / "plan.yaml", recsys_tasks())
    assert f"plan {plan.name} is the fastest" in out
    assert plan.name in PLANS, "none was to be found"
    (losses,) = drawn[0].axes
    assert np.size(losses.lines[0].get_xdata()) == training_rows(files.read(folder).seconds) // 16


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_builds_model_data_and_trainer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-pipe"])  # LightningCLI warns of arguments beside its own
    cli = LightningCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=["--config", str(path)],
        seed_everything_default=1,
    )
    assert isinstance(cli.model, MovieLensDLRM)
    assert isinstance(cli.datamodule, MovieLensData)
    assert cli.trainer.world_size == 2
    assert {CompareWithItemMean, TrainingReport} <= {type(callback) for callback in cli.trainer.callbacks}  # type: ignore[attr-defined]
