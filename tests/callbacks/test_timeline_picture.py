"""The picture of a timeline: what is in it, and what a caller gets wrong. How it looks, only a person can tell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from matplotlib.figure import Figure

from lightning_pipe.callbacks.report import cost_figure
from lightning_pipe.callbacks.timeline_picture import draw_timeline, require_matplotlib
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.observe.timeline import TASK, Bar, Timeline
from lightning_pipe.engine.plans.dependencies import Dependency
from lightning_pipe.engine.profiling.profile import ProfileResult, TaskProfile


def task(name: str, iteration: int, start: float, end: float, lane: str = "main", rank: int = 0) -> Bar:
    return Bar(rank, lane, name, TASK, start, end, iteration)


def part(kind: str, rank: int, start: float, end: float, microbatch: int = 0, stage: int | None = None) -> Bar:
    return Bar(rank, "main", kind, kind, start, end, 0, microbatch, rank if stage is None else stage)


def batches() -> Timeline:
    """Batches, each copied by a thread beside the training of the one before; the last copy is waited for."""
    bars = [task("copy", i, 9.0 + i, 9.8 + i, "copier") for i in range(1, 4)]
    bars += [task("train", i, *when) for i, when in enumerate([(10.1, 11.0), (11.0, 12.0), (12.0, 12.3), (12.8, 14.0)])]
    return Timeline(bars, [Dependency("copy", "train"), Dependency("train", "copy", 2)])


def micro_batches() -> Timeline:
    bars = [
        task("ScheduleStep", 0, 0.0, 0.9),
        part("forward", 0, 0.0, 0.2),
        part("wait_backward", 0, 0.2, 0.6),
        part("input_backward", 0, 0.6, 0.7),
        part("weight_backward", 0, 0.7, 0.9),
        part("forward", 1, 0.2, 0.4),
        part("backward", 1, 0.4, 0.6),
        task("OptimStep", 0, 0.9, 1.0),
    ]
    return Timeline(bars)


def drawn(timeline: Timeline, folder: Path, ends: Any = ()) -> Figure:
    """The figure that is written to a file."""
    figures: list[Figure] = []

    def keep(figure: Figure, path: Path) -> None:
        figures.append(figure)
        path.write_bytes(b"a picture")

    with mock.patch.object(Figure, "savefig", keep):
        draw_timeline(timeline, folder / "timeline.png", "a title", ends)
    return figures[0]


def labels(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.axes[0].texts}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def rows(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_rows_are_threads_and_bars_bear_task_and_batch(tmp_path: Path) -> None:
    figure = drawn(batches(), tmp_path)
    assert rows(figure) == ["rank 0 · main", "rank 0 · copier"]
    assert {"train 0", "copy 1", "train 3"} <= labels(figure)
    assert legend(figure) == ["batch 0", "batch 1", "batch 2", "batch 3", "critical path"]
    assert figure.axes[0].get_xlabel() == "time, ms"
    assert figure.axes[0].get_title("left") == "a title"


def figure_bars(figure: Figure) -> list[Any]:
    return [bar for container in figure.axes[0].containers for bar in container]


def test_the_critical_path_has_a_strip_below_and_an_arrow_where_it_changes_rows(tmp_path: Path) -> None:
    figure = drawn(batches(), tmp_path)
    axes, bars = figure.axes[0], figure_bars(figure)
    strips: list[Any] = [patch for patch in axes.patches if patch not in bars]
    assert [round(strip.get_x()) for strip in strips] == [100, 1000, 2800, 2000]  # train 0, 1 and 3, and copy 3
    arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 2


def test_waits_on_the_critical_path_are_thin_lines_with_their_reason_in_the_legend(tmp_path: Path) -> None:
    bars = [task("a", 0, 0.0, 1.0), task("copy", 1, 1.2, 1.6, "copier")._replace(submitted=1.0)]
    bars += [task("train", 1, 1.6, 2.0), task("step", 1, 2.5, 3.0)]
    figure = drawn(Timeline(bars, [Dependency("copy", "train")]), tmp_path)
    lines = cast(Any, figure.axes[0].lines)
    found = sorted([round(float(x)) for x in line.get_xdata()] for line in lines)
    assert found == [[1000, 1200], [2000, 2500]]
    assert legend(figure)[-3:] == ["critical path", "wait: between tasks", "wait: hand-off"]


def test_kinds_of_work_on_a_micro_batch_are_told_apart_and_waits_are_marked(tmp_path: Path) -> None:
    figure = drawn(micro_batches(), tmp_path)
    assert {"F0", "B0", "I0", "W0", "OptimStep"} <= labels(figure)
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in figure_bars(figure)}
    assert len(looks) == 7  # forward, three kinds of backward, wait, other task, and the step around them
    assert legend(figure) == [
        "F: forward",
        "B: backward",
        "I: backward for inputs",
        "W: backward for weights",
        "waiting for a neighbor",
        "other tasks",
        "in ScheduleStep",
        "micro-batch 0",
        "critical path",
    ]


def test_only_the_time_between_the_ends_of_batches_is_drawn(tmp_path: Path) -> None:
    figure = drawn(batches(), tmp_path, ends=[11.0, 12.0, 13.0])
    axes, lines = figure.axes[0], cast(Any, figure.axes[0].lines)
    assert axes.get_xlim() == pytest.approx((0, 2000))
    assert all(bar.get_x() >= 0 and bar.get_x() + bar.get_width() <= 2000.001 for bar in figure_bars(figure))
    assert [line.get_xdata()[0] for line in lines] == pytest.approx([1000])


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("new/a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_files_name_says_what_it_is(tmp_path: Path, name: str, begins: bytes) -> None:
    draw_timeline(batches(), tmp_path / name, "a title")
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_timeline_without_bars_can_be_drawn(tmp_path: Path) -> None:
    draw_timeline(Timeline([]), tmp_path / "a.png", "nothing")
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize("name", ["$x^$", "100 $"])
def test_a_name_is_drawn_as_it_is_and_not_as_a_formula(name: str, tmp_path: Path) -> None:
    ahead = task(name, 0, 0.0, 1.0, lane=name)
    figure = drawn(Timeline([task(name, 0, 0.0, 1.0), ahead]), tmp_path)
    assert name.replace("$", r"\$") in " ".join((*labels(figure), *rows(figure)))
    draw_timeline(Timeline([ahead]), tmp_path / "titled.png", name)
    profile = ProfileResult(name, 1.0, {name: TaskProfile(0.5, 0.1, 0.0, 0.2)})
    cost_figure(profile).savefig(tmp_path / "costs.png")


def test_another_kind_of_file_is_refused_with_those_there_are() -> None:
    with pytest.raises(SetupError, match=r"timeline\.txt.*\.png.*\.svg"):
        require_matplotlib(Path("timeline.txt"))


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    missing = dict.fromkeys(("matplotlib", "matplotlib.backend_bases"))
    with mock.patch.dict(sys.modules, missing), pytest.raises(SetupError, match=r"pip install.*pictures.*picture=None"):
        require_matplotlib(Path("timeline.png"))
