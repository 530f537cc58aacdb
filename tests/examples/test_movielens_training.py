"""Training the MovieLens example, its configurations and its report."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.cli import LightningCLI
from matplotlib.figure import Figure

from examples.recsys_movielens import files, report
from examples.recsys_movielens.baseline import CompareWithItemMean
from examples.recsys_movielens.data import MovieLensData
from examples.recsys_movielens.features import training_rows
from examples.recsys_movielens.model import MovieLensDLRM
from examples.recsys_movielens.report import TrainingReport
from tests.examples.conftest import HISTORY, RATINGS

CONFIGURATIONS = sorted((Path(__file__).parents[2] / "examples" / "recsys_movielens").glob("*.yaml"))


def trainer_of(folder: Path, max_epochs: int, callbacks: list[pl.Callback], strategy: str = "auto") -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=max_epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def test_the_model_learns_on_one_device_under_lightnings_own_strategy_and_is_compared_with_the_baseline(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pl.seed_everything(0)
    data = MovieLensData(batch_size=64, history_length=HISTORY, data_dir=str(folder))
    model = MovieLensDLRM(learning_rate=5e-3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = trainer_of(tmp_path, 6, [CompareWithItemMean(), TrainingReport()])
    trainer.fit(model, data)
    assert [name for name, value in model.named_parameters() if torch.equal(value, before[name])] == []
    # Odd items are liked more: a coin's log loss is 0.693.
    assert trainer.callback_metrics["val/loss"] < 0.5
    assert trainer.callback_metrics["val/auroc"] > 0.75
    out = capsys.readouterr().out
    assert f"item mean, add-5 smoothing    {data.baseline.auroc:.4f}    {data.baseline.log_loss:.4f}" in out
    assert f"MovieLensDLRM                 {trainer.callback_metrics['val/auroc']:.4f}" in out
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")

    trainer.test(model, data, verbose=False)
    assert trainer.callback_metrics["test/auroc"] > 0.75
    predicted = torch.cat(trainer.predict(model, data))  # type: ignore[arg-type]
    assert predicted.shape == (RATINGS - training_rows(files.read(folder).seconds),)


def test_the_report_shows_the_timeline_that_the_pipeline_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(report, "FigureCanvasAgg", lambda figure: drawn.append(figure))
    data = MovieLensData(batch_size=64, history_length=HISTORY, data_dir=str(folder))
    callback = TrainingReport(trace_from=5, iterations=3)
    try:
        trainer_of(tmp_path, 1, [callback], "recsys_prefetch_pipeline").fit(MovieLensDLRM(), data)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    losses, timeline = drawn[0].axes
    assert timeline.get_title() == "What ran when, while iterations 5 to 7 were trained"
    rows = [label.get_text() for label in timeline.get_yticklabels()]
    # The main thread's tasks in the order of one iteration, then the other thread's.
    assert rows == [
        *("H2DAndShuffle", "EmbInputDistStart", "EmbInputDistWait", "EmbForward", "DenseForward", "LossPostprocess"),
        *("DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep", "EmbPrefetch"),
    ]
    assert [text.get_text() for text in timeline.texts] == ["thread\nmain", "thread\nprefetch"]
    bars = [
        (bar.get_y() + bar.get_height() / 2, bar.get_facecolor())
        for container in timeline.containers
        for bar in container
    ]
    forward = [colour for y, colour in bars if rows[round(y)] == "EmbForward"]
    prefetch = [colour for y, colour in bars if rows[round(y)] == "EmbPrefetch"]
    assert len(forward) == 3
    assert prefetch[:2] == forward[1:], "the prefetch of an iteration runs while the one before it is trained"
    assert np.size(losses.lines[0].get_xdata()) == training_rows(files.read(folder).seconds) // 64


def test_the_four_configurations_differ_in_plan_processes_and_log_folder_alone() -> None:
    assert [path.stem for path in CONFIGURATIONS] == ["base", "prefetch", "serial", "two_nodes"]
    rest = []
    for path in CONFIGURATIONS:
        configuration = yaml.safe_load(path.read_text())
        trainer = configuration["trainer"]
        name = "prefetch" if path.stem == "two_nodes" else path.stem
        assert trainer["strategy"].pop("init_args") == {"plan": name}
        assert trainer.pop("num_nodes") * trainer.pop("devices") == 2
        assert {logger["init_args"].pop("name") for logger in trainer["logger"]} == {f"recsys_movielens_{path.stem}"}
        rest.append(configuration)
    assert all(configuration == rest[0] for configuration in rest)


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
