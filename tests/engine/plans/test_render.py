from __future__ import annotations

import re

import pytest

from lightning_pipe.engine import PipelinePlan, PipelineTask, State, TaskSchedule

TABLES = State("tables")
NAMES = [f"AnElevenTaskPlan{index}" for index in range(10)]


def plan() -> PipelinePlan:
    tasks = [
        (PipelineTask("Copy", lambda ctx: None, writes=["x"]), TaskSchedule(1, "memcpy", "io", globally_ordered=True)),
        *(
            (PipelineTask(name, lambda ctx: None, reads=["x", TABLES]), TaskSchedule(thread_group="main"))
            for name in NAMES[:-1]
        ),
        (PipelineTask(NAMES[-1], lambda ctx: None, reads=["x"], writes=[TABLES]), TaskSchedule()),
    ]
    return PipelinePlan(tasks, name="[bold]")


@pytest.mark.parametrize("name", ["$x^$", "[red]x[/red]", ":x:", "<b>&amp;", "中文 é"])
def test_a_name_is_printed_as_it_is(name: str) -> None:
    named = PipelinePlan([(PipelineTask(name, lambda ctx: None), TaskSchedule(0, name, name))], name=name)
    assert named.table().count(name) == 4
    assert named.timeline().count(name) == 4


@pytest.mark.parametrize("columns", [80, 160])
def test_the_table_fits_the_terminal_and_says_everything(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = plan().table()
    assert max(map(len, text.splitlines())) <= columns
    assert text.startswith("plan [bold]: 2 batches in flight at most")
    words = re.findall(r"[^\s,]+", text)
    # Whole words: nothing is cut off or broken in two.
    assert {*NAMES, "Copy", f"{NAMES[-1]}[i-1]", "memcpy", "io*"} <= set(words)
    assert "* globally ordered" in text
    assert "[i-n]: the run of that task n iterations earlier" in text


def test_the_timeline_shows_the_batch_of_each_task_from_filling_to_draining() -> None:
    rows = {
        task: cells.split()
        for task, cells in re.findall(r"(Copy|AnElevenTaskPlan0)((?:\s+(?:\d|·))+)$", plan().timeline(3), re.MULTILINE)
    }
    assert rows == {"Copy": ["0", "1", "2", "·"], "AnElevenTaskPlan0": ["·", "0", "1", "2"]}
