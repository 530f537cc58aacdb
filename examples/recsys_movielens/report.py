"""Report at the end of a run: loss curves, costs of the tasks, and paths of the files with the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_pipe.callbacks import PipelineProfiler

# Colors from the palette of Okabe and Ito, which is safe for color-blind readers.
_STEP, _MEAN, _TEST, _GRAY = "#56B4E9", "#0072B2", "#D55E00", "#555555"
# Files that this callback and the other callbacks of the configurations write to the log folder.
_FILES = {
    "losses.png": "loss curves",
    "timeline.png": "timeline of the tasks, as a picture",
    "trace.json": "the same timeline, for https://ui.perfetto.dev",
    "report.html": "the last batches of the timeline, costs and plan, for a browser",
}


@dataclass(frozen=True)
class LossCurves:
    """Data of the plot.

    Args:
        training: loss of every step on this process's batches.
        validation: step and loss of every validation on the test part.
        item_mean: loss of the item mean on the test part.
    """

    training: list[float]
    validation: list[tuple[int, float]]
    item_mean: float


class TrainingReport(pl.Callback):
    """Writes ``losses.png`` to the run's log folder at the end of training, and prints a report.

    The report lists the cost of each task per iteration, if a PipelineProfiler has measured it, and the files in the
    log folder.
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._validation: list[tuple[int, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Read at the end of training, because a read waits for the device.
        self._losses.append(outputs["loss"].detach())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validation.append((trainer.global_step, trainer.callback_metrics["val/loss"].item()))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # a collective call, so every rank makes it
        if not trainer.is_global_zero:
            return
        item_mean = trainer.datamodule.baseline.log_loss  # type: ignore[attr-defined]
        curves = LossCurves([loss.item() for loss in self._losses], self._validation, item_mean)
        folder.mkdir(parents=True, exist_ok=True)
        draw_losses(folder / "losses.png", curves)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for profile in callback.profiles.values() if isinstance(callback, PipelineProfiler) else ():
                print()
                profile.print_report()
        print()
        for name, description in _FILES.items():
            if (folder / name).exists():
                print(f"{folder / name}: {description}")


def draw_losses(path: Path, curves: LossCurves) -> None:
    """Draw the loss curves to the PNG file *path*."""
    figure = Figure(figsize=(12, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    _draw_losses(figure.subplots(), curves)
    figure.savefig(path)


def _draw_losses(axes: Axes, curves: LossCurves) -> None:
    steps = np.arange(1, len(curves.training) + 1)
    axes.plot(steps, curves.training, color=_STEP, linewidth=0.8, alpha=0.6, label="training, each step")
    width = max(1, len(steps) // 20)
    if len(steps) > width > 1:
        mean = np.convolve(curves.training, np.full(width, 1 / width), mode="valid")
        axes.plot(
            steps[width - 1 :],
            mean,
            color=_MEAN,
            linewidth=2,
            label=f"training, mean of the last {width} steps (lags by {width // 2})",
        )
    if curves.validation:
        axes.plot(*zip(*curves.validation, strict=True), "o-", color=_TEST, label="later ratings (test part)")
        step, loss = curves.validation[-1]
        axes.annotate(
            f"{loss:.4f}",
            xy=(step, loss),
            xytext=(0, 10),
            textcoords="offset points",
            ha="center",
            color=_TEST,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    label = f"item mean on the test part, {curves.item_mean:.4f}"
    axes.axhline(curves.item_mean, color=_GRAY, linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="log loss (nats)", title="Loss")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
