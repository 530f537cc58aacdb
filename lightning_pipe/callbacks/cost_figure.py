"""Task costs as a Matplotlib figure, for the HTML report and for loggers that accept figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger

from lightning_pipe.callbacks.timeline_picture import without_mathtext
from lightning_pipe.engine import ProfileResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cost_figure(profile: ProfileResult) -> Figure:
    """Bar chart of each task's own and exposed time in ms, with confidence intervals for the exposed time."""
    from matplotlib.figure import Figure

    tasks = profile.tasks
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(tasks)), dpi=110, layout="constrained")
    axes = figure.subplots()
    for row, one in enumerate(tasks.values()):
        axes.barh(row - 0.2, 1e3 * one.own, 0.38, color="#B9CFE0", label=None if row else "own")
        if one.exposed is not None and one.low is not None and one.high is not None:
            around = [[1e3 * max(0.0, one.exposed - one.low)], [1e3 * max(0.0, one.high - one.exposed)]]
            axes.barh(row + 0.2, 1e3 * one.exposed, 0.38, color="#0072B2", xerr=around, capsize=2.5)
    axes.barh(0, 0, color="#0072B2", label="exposed, with 95 % interval")
    axes.set_yticks(range(len(tasks)), [without_mathtext(name) for name in tasks])
    axes.invert_yaxis()
    axes.set_xlabel("ms per iteration")
    title = f"plan {profile.plan}: {1e3 * profile.seconds:.2f} ms per iteration"
    axes.set_title(without_mathtext(title), loc="left")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.axvline(0, color="#888888", linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def log_figure(logger: Logger, name: str, profile: ProfileResult, step: int) -> bool:
    """Log the figure of *profile* with the method that *logger* provides for figures."""
    experiment: Any = getattr(logger, "experiment", None)
    add, image = getattr(experiment, "add_figure", None), getattr(logger, "log_image", None)
    log, run = getattr(experiment, "log_figure", None), getattr(logger, "run_id", None)
    if not (callable(add) or callable(image) or (callable(log) and run is not None)):
        return False
    try:
        figure = cost_figure(profile)
    except ImportError:
        return False
    if callable(add):
        add(name, figure, step)
    elif callable(image):
        image(name, [_pixels(figure)], step=step)
    else:
        assert callable(log)
        log(run, figure, f"{name}-{step}.png")
    return True


def _pixels(figure: Figure) -> Any:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
