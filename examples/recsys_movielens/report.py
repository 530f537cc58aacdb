"""One picture of a run: how the loss fell, and what ran when over a few real iterations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_pipe.engine import TaskSpan
from lightning_pipe.strategies.recsys import RecsysPipelineStrategy

# Okabe and Ito's colours, told apart by everyone; neighbouring iterations never share one.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY = "#555555"


@dataclass(frozen=True)
class LossCurves:
    """What the upper half of the picture shows.

    Args:
        training: the loss of every step, on this process's batches.
        validation: step and loss of every validation, on the test part.
        item_mean: the item mean's loss on the test part.
    """

    training: list[float]
    validation: list[tuple[int, float]]
    item_mean: float


class TrainingReport(pl.Callback):
    """Writes ``report.png`` into the run's log folder when training ends.

    Args:
        trace_from: step at which recording the timeline begins, late enough for the pipeline to have settled.
        iterations: how many iterations to show.
    """

    def __init__(self, trace_from: int = 50, iterations: int = 4) -> None:
        self._trace_from = trace_from
        self._iterations = iterations
        self._losses: list[torch.Tensor] = []
        self._validation: list[tuple[int, float]] = []
        self._spans: list[TaskSpan] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if len(self._losses) == self._trace_from and isinstance(trainer.strategy, RecsysPipelineStrategy):
            trainer.strategy.start_trace()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Read when training is over: a read waits for the device.
        self._losses.append(outputs["loss"].detach())
        traced = len(self._losses) - self._trace_from
        # One iteration more than is shown: the callback runs inside the last period, before that is over.
        if traced == self._iterations + 1 and isinstance(trainer.strategy, RecsysPipelineStrategy):
            self._spans = trainer.strategy.stop_trace()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validation.append((trainer.global_step, trainer.callback_metrics["val/loss"].item()))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # every rank takes part in asking for it
        if not trainer.is_global_zero:
            return
        item_mean = trainer.datamodule.baseline.log_loss  # type: ignore[attr-defined]
        curves = LossCurves([loss.item() for loss in self._losses], self._validation, item_mean)
        folder.mkdir(parents=True, exist_ok=True)
        draw_report(folder / "report.png", curves, self._spans, self._iterations)
        print(f"Loss curves and the pipeline's timeline: {folder / 'report.png'}")


def draw_report(path: Path, curves: LossCurves, spans: Sequence[TaskSpan], iterations: int) -> None:
    """Draw the picture.

    Args:
        path: the file to write, a PNG.
        curves: the upper half.
        spans: the lower half, left out where there are none.
        iterations: how many of the iterations trained in *spans* to show.
    """
    figure = Figure(figsize=(12, 9.5 if spans else 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if spans:
        upper, lower = figure.subplots(2, 1, height_ratios=(1, 1.25))
        _draw_timeline(lower, spans, iterations)
    else:
        upper = figure.subplots()
    _draw_losses(upper, curves)
    figure.savefig(path)


def _draw_losses(axes: Axes, curves: LossCurves) -> None:
    steps = np.arange(1, len(curves.training) + 1)
    axes.plot(steps, curves.training, color=_COLOURS[4], linewidth=0.8, alpha=0.6, label="training, each step")
    width = max(1, len(steps) // 20)
    if len(steps) > width > 1:
        mean = np.convolve(curves.training, np.full(width, 1 / width), mode="valid")
        axes.plot(steps[width - 1 :], mean, color=_COLOURS[0], linewidth=2, label=f"training, mean of {width} steps")
    if curves.validation:
        axes.plot(*zip(*curves.validation, strict=True), "o-", color=_COLOURS[5], label="later ratings (test part)")
        step, loss = curves.validation[-1]
        axes.annotate(
            f"{loss:.4f}",
            xy=(step, loss),
            xytext=(0, 10),
            textcoords="offset points",
            ha="center",
            color=_COLOURS[5],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    label = f"item mean on these, {curves.item_mean:.4f}"
    axes.axhline(curves.item_mean, color=_GREY, linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="log loss (nats)", title="Loss")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_timeline(axes: Axes, spans: Sequence[TaskSpan], iterations: int) -> None:
    """A row for every task, grouped by thread; a colour for every iteration."""
    rows = _rows(spans)
    position = {row: index for index, row in enumerate(rows)}
    trained = _trained(spans)[:iterations]
    origin = min(span.start for span in spans if span.iteration == trained[0] and span.task == "EmbForward")
    end = max(span.end for span in spans if span.iteration == trained[-1] and span.task == "OptimStep")
    shown = [span for span in spans if span.end > origin and span.start < end]
    for span in shown:
        colour = _COLOURS[span.iteration % len(_COLOURS)]
        start, stop = max(span.start, origin), min(span.end, end)
        axes.barh(
            position[span.thread, span.task],
            (stop - start) * 1e3,
            left=(start - origin) * 1e3,
            height=0.72,
            color=colour,
            edgecolor=colour,
            linewidth=1,  # so that the shortest task can be seen
        )
    _mark_threads(axes, rows)
    axes.set_yticks(range(len(rows)), [task for _, task in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, (end - origin) * 1e3)
    axes.set(xlabel="milliseconds", title=f"What ran when, while iterations {trained[0]} to {trained[-1]} were trained")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    seen = sorted({span.iteration for span in shown})
    patches = [Patch(color=_COLOURS[iteration % len(_COLOURS)], label=str(iteration)) for iteration in seen]
    axes.legend(handles=patches, title="iteration", loc="upper left", bbox_to_anchor=(1.06, 1), frameon=False)


def _rows(spans: Sequence[TaskSpan]) -> list[tuple[str, str]]:
    """Threads, the one with most tasks first, and in each its tasks in the order of one iteration."""
    by_iteration: dict[int, list[TaskSpan]] = {}
    for span in spans:
        by_iteration.setdefault(span.iteration, []).append(span)
    whole = max(by_iteration.values(), key=len)
    # No iteration is whole where few were recorded: the others' tasks follow.
    in_order = [*sorted(whole, key=lambda span: span.start_order), *spans]
    rows = list(dict.fromkeys((span.thread, span.task) for span in in_order))
    tasks = Counter(thread for thread, _ in rows)
    return sorted(rows, key=lambda row: -tasks[row[0]])


def _trained(spans: Sequence[TaskSpan]) -> list[int]:
    """Iterations whose step, from the lookup to the optimiser, was recorded whole."""
    tasks: dict[int, set[str]] = {}
    for span in spans:
        tasks.setdefault(span.iteration, set()).add(span.task)
    return sorted(iteration for iteration, names in tasks.items() if {"EmbForward", "OptimStep"} <= names)


def _mark_threads(axes: Axes, rows: Sequence[tuple[str, str]]) -> None:
    threads = [thread for thread, _ in rows]
    for index, thread in enumerate(dict.fromkeys(threads)):
        first, last = threads.index(thread), len(threads) - 1 - threads[::-1].index(thread)
        if index % 2:
            axes.axhspan(first - 0.5, last + 0.5, color="black", alpha=0.06, zorder=0)
        axes.text(
            x=1.01,
            y=(first + last) / 2,
            s=f"thread\n{thread}",
            transform=axes.get_yaxis_transform(),
            va="center",
            ha="left",
            color=_GREY,
        )
