"""The HTML report of a profile."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from lightning_pipe.callbacks.report import write_profile_report
from lightning_pipe.engine import PipelinePlan, PipelineTask, ProfileResult, TaskSchedule
from lightning_pipe.engine.observe.timeline import Bar, Timeline
from lightning_pipe.engine.profiling.profile import TaskProfile

NASTY = "<b>a</b> & 'b' $x$ </script>"
TASKS = {
    "Copy": TaskProfile(0.004, 0.0001, -0.0002, 0.0004),
    "Send": TaskProfile(0.001, 0.001, 0.0008, 0.0012, included_tasks=("Train",)),
    "Train": TaskProfile(0.008, unmeasured_reason="not replayed: it cannot be"),
}


def written(
    folder: Path,
    tasks: Mapping[str, TaskProfile] = TASKS,
    name: str = "ahead",
    bars: bool = True,
    facts: Mapping[str, str] | None = None,
) -> str:
    schedule = [
        (PipelineTask(task, lambda _: None), TaskSchedule(stage, None, group))
        for task, stage, group in zip([*tasks, "Last"], (2, 1, 0, 0), ("copies", "main", "main", "main"), strict=False)
    ]
    plan = PipelinePlan(schedule, name=name)
    first = next(iter(tasks))
    work = [
        Bar(rank, "main", first, "task", 0.01 * index, 0.01 * index + 0.004, iteration=index)
        for rank in (0, 1)
        for index in range(6)
    ]
    path = folder / "made" / "report.html"
    timeline = Timeline(work, plan.dependencies) if bars else None
    write_profile_report(path, ProfileResult(name, 0.01, tasks, 7, 10), plan, timeline, facts or {})
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


def pictures(text: str, folder: Path) -> list[Any]:
    path, found = folder / "read.png", []
    for data in re.findall(r'src="data:image/png;base64,([^"]*)"', text):
        path.write_bytes(base64.b64decode(data))
        found.append(imread(path))
    return found


def rows(text: str) -> list[list[str]]:
    lines = re.findall(r"<tr>(.*?)</tr>", text)
    return [[unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", line)] for line in lines]


def test_a_report_has_the_costs_and_the_plan_in_one_table_and_two_pictures(tmp_path: Path) -> None:
    text = written(tmp_path, facts={"Ranks": "2 ranks on cpu", "Date": "2030-01-02"})
    assert "<title>Plan ahead: 10.00 ms per iteration</title>" in text
    assert "A step would be shorter without Send together with Train (8 to 12 %). The plan hides Copy." in text
    assert rows(text)[1:] == [
        ["Copy", "2", "copies", "current", "4.000", "0.100", "-0.200 to 0.400", "-", "98 %", ""],
        ["Send", "1", "main", "current", "1.000", "1.000", "0.800 to 1.200", "10.0 %", "0 %", "with Train"],
        ["Train", "0", "main", "current", "8.000", "", "", "", "", "not replayed: it cannot be"],
        ["Last", "0", "main", "current", "", "", "", "", "", "not profiled"],
        ["Ranks", "2 ranks on cpu"],
        ["Date", "2030-01-02"],
    ]
    assert [picture.std() > 0 for picture in pictures(text, tmp_path)] == [True, True]


def test_names_are_text_in_a_report_and_never_markup(tmp_path: Path) -> None:
    text = written(tmp_path, {NASTY: TASKS["Copy"]}, NASTY, facts={NASTY: NASTY})
    assert "<b>" not in text
    assert "script" not in text.replace("&lt;/script&gt;", "")
    assert rows(text)[1][0] == NASTY
    assert rows(text)[-1] == [NASTY, NASTY]


def test_without_matplotlib_the_page_says_what_draws_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = written(tmp_path)
    assert "pip install 'lightning-pipe[pictures]'" in text
    assert "<td>Copy</td>" in text
    assert pictures(text, tmp_path) == []


def test_a_report_names_what_is_sure_and_each_task_once(tmp_path: Path) -> None:
    tasks = {
        "Copy": TaskProfile(0.002, 0.004, -0.001, 0.009),  # the largest, and in the noise
        "Send": TaskProfile(0.003, 0.003, 0.002, 0.004, included_tasks=("Train",)),
        "Train": TaskProfile(0.003, 0.0035, 0.0025, 0.0045, included_tasks=("Send",)),
    }
    expected = "A step would be shorter without Train together with Send (25 to 45 %), Send (20 to 40 %)."
    assert expected in written(tmp_path, tasks)


def test_a_report_that_cannot_be_written_raises_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "made" / "report.html").mkdir(parents=True)
    with pytest.raises(OSError, match=r"report\.html"):
        written(tmp_path)
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["report.html"]
