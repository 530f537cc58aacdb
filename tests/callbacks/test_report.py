"""The HTML report: what it says, and what a browser makes of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.callbacks.report import write_report
from lightning_pipe.callbacks.what_if import WhatIf, ask_what_if
from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, ProfileResult, SetupError, TaskSchedule
from lightning_pipe.engine.observe.timeline import Timeline
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.network import Message, NetworkModel
from lightning_pipe.engine.planning.simulation import simulate
from lightning_pipe.engine.profiling.profile import TaskProfile
from tests.patience import HANG

pytest.importorskip("plotly", reason="Plotly, which draws the report, is not installed")

NASTY = "<b>a</b> & 'b' </script>"


def nothing(_: Any) -> None:
    """Nothing."""


def a_plan(copy: str = "Copy", ahead: bool = True, name: str = "ahead") -> PipelinePlan:
    """A copy ahead, in a thread of its own, and an exchange beside the training."""
    tasks = [
        (PipelineTask(copy, nothing, reads=("batch",), writes=("there",)), TaskSchedule(2 * ahead, None, "copies")),
        (PipelineTask("Send", nothing, reads=("there",), writes=("sent",)), TaskSchedule(1 * ahead)),
        (PipelineTask("Train", nothing, reads=("sent",), writes=("done",)), TaskSchedule()),
    ]
    return PipelinePlan(tasks, name=name)


def costs_of(copy: str = "Copy") -> dict[str, TaskCost]:
    sends = TaskCost(0.001, background=Message("all_to_all", 4e6), waited_by="Train")
    return {copy: TaskCost(0.004), "Send": sends, "Train": TaskCost(0.008)}


MACHINE = Machine(cores=2, network=NetworkModel(1e-5, 1e9, 2), between_periods=0.001)


def a_profile(copy: str = "Copy", plan: str = "ahead") -> ProfileResult:
    tasks = {
        copy: TaskProfile(0.004, 0.0001, -0.0002, 0.0004),
        "Send": TaskProfile(0.001, 0.001, 0.0008, 0.0012, with_it=("Train",)),
        "Train": TaskProfile(0.008, not_measured="not replayed: it cannot be"),
    }
    return ProfileResult(plan, 0.01, tasks, 7, 10)


def a_timeline(plan: PipelinePlan, copy: str = "Copy") -> Timeline:
    work = simulate(plan, costs_of(copy), MACHINE, at_least=6).work
    return Timeline([bar._replace(rank=rank) for rank in (0, 1) for bar in work], plan.dependencies)


# ---------------------------------------------------------------------- what would be otherwise


@pytest.fixture(scope="module")
def predicted() -> WhatIf:
    return ask_what_if(a_plan(), costs_of(), MACHINE, other_plans=[a_plan(), a_plan(ahead=False, name="serial")])


def test_predictions_follow_what_is_asked(predicted: WhatIf) -> None:
    now = predicted.seconds
    assert now == pytest.approx(0.010)  # hooks, Send and Train one after the other, and the copy beside
    half = predicted.otherwise["a task takes half its time"]
    assert half["Train"] == pytest.approx(0.006)
    assert half["Copy"] == pytest.approx(now)
    assert predicted.otherwise["a task takes no time"]["Train"] < half["Train"]
    assert predicted.otherwise["another plan"] == {"serial": pytest.approx(0.016, abs=1e-3)}
    assert predicted.otherwise["hooks and the data loader take no time"]["no hooks, no loader"] == pytest.approx(0.009)


def test_a_network_is_asked_about_where_there_is_one(predicted: WhatIf) -> None:
    network, ranks = predicted.otherwise["another network"], predicted.otherwise["another number of ranks"]
    assert list(network) == ["0.5 times as fast", "2 times as fast", "4 times as fast", "10 times as fast"]
    # A tenth of the bandwidth's time, and of the latency's, which is a minute of its own here.
    slow = Machine(network=NetworkModel(60.0, 1e5, 2))
    waits = ask_what_if(a_plan(ahead=False), costs_of(), slow)
    assert waits.seconds == pytest.approx(0.013 + 80)
    assert waits.otherwise["another network"]["10 times as fast"] == pytest.approx(0.013 + 8)
    assert list(ranks)[:2] == ["2 ranks", "4 ranks"]
    assert ranks["4096 ranks"] > ranks["2 ranks"] == pytest.approx(predicted.seconds)
    alone = {"Copy": TaskCost(0.004), "Send": TaskCost(0.001), "Train": TaskCost(0.008)}
    assert set(ask_what_if(a_plan(), alone, Machine()).otherwise) == {
        "a task takes half its time",
        "a task takes no time",
    }


def test_of_ranks_on_one_host_no_other_network_is_asked_about(predicted: WhatIf) -> None:
    found = ask_what_if(a_plan(), costs_of(), MACHINE, other_plans=[a_plan(ahead=False, name="serial")], one_host=True)
    assert set(predicted.otherwise) - set(found.otherwise) == {"another network"}
    assert found.otherwise["another plan"] == predicted.otherwise["another plan"]


def test_background_work_on_the_network_gets_faster_with_it() -> None:
    waits = {**costs_of(), "Send": TaskCost(0.001, background=0.02, waited_by="Train")}
    otherwise = ask_what_if(a_plan(ahead=False), waits, Machine()).otherwise["another network"]
    assert otherwise["10 times as fast"] < otherwise["2 times as fast"] < otherwise["0.5 times as fast"]


def test_costs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="no cost is given for Train"):
        ask_what_if(a_plan(), {"Copy": TaskCost(0.1), "Send": TaskCost(0.1)}, Machine())


# ---------------------------------------------------------------------- the file


def written(folder: Path, copy: str = "Copy", name: str = "ahead", **more: Any) -> Path:
    plan = a_plan(copy, name=name)
    found: dict[str, Any] = {
        "profile": a_profile(copy, name),
        "plan": plan,
        "timeline": a_timeline(plan, copy),
        "what_if": ask_what_if(plan, costs_of(copy), MACHINE),
        "facts": {"Ranks": "2 ranks on cpu", "Date": "2030-01-02"},
    }
    path = folder / "made" / "report.html"
    write_report(path, **{**found, **more})
    return path


def test_a_report_says_what_was_profiled_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert "<title>Pipeline report: plan ahead</title>" in text
    assert "Largest shares of an iteration: Send with Train (8 to 12 %). The plan hides Copy." in text
    assert "2 ranks on cpu" in text
    assert "not replayed: it cannot be" in text
    assert [one.name for one in path.parent.iterdir()] == ["report.html"]


def test_names_are_text_in_a_report_and_never_markup(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain").read_text(encoding="utf-8")
    nasty = written(tmp_path / "nasty", copy=NASTY, name=NASTY, facts={NASTY: NASTY}).read_text(encoding="utf-8")
    assert NASTY not in nasty
    assert "<b>a</b>" not in nasty
    assert nasty.count("</script") == plain.count("</script")


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    profile = ProfileResult("ahead", 0.01, {"Train": TaskProfile(0.008, not_measured="not replayed")}, 1, 1)
    text = written(tmp_path, timeline=None, what_if=None, profile=profile, facts=None).read_text(encoding="utf-8")
    assert "No task was replayed" in text
    assert "not profiled" in text
    for section, there in (("costs", True), ("plan", True), ("timeline", False), ("what-if", False)):
        assert (f'<section id="{section}">' in text) is there, section


def test_a_report_says_nothing_of_what_noise_hides(tmp_path: Path) -> None:
    profile = ProfileResult("ahead", 0.01, {"Train": TaskProfile(0.008, 0.005, -0.001, 0.009)}, 1, 1)
    text = written(tmp_path, timeline=None, what_if=None, profile=profile).read_text(encoding="utf-8")
    assert "1 of 1 intervals contain 0 and are wide: too noisy to rank these tasks" in text


def test_a_report_names_what_is_sure_and_each_task_once(tmp_path: Path) -> None:
    tasks = {
        "Copy": TaskProfile(0.002, 0.004, -0.001, 0.009),  # the largest, and in the noise
        "Send": TaskProfile(0.003, 0.003, 0.002, 0.004, with_it=("Train",)),
        "Train": TaskProfile(0.003, 0.0035, 0.0025, 0.0045, with_it=("Send",)),
    }
    text = written(tmp_path, profile=ProfileResult("ahead", 0.01, tasks, 7, 10)).read_text(encoding="utf-8")
    assert "Largest shares of an iteration: Train with Send (25 to 45 %) and Send (20 to 40 %)." in text


def test_a_simulation_that_misses_what_was_measured_is_marked(tmp_path: Path) -> None:
    assert "do not rely on these predictions" not in written(tmp_path).read_text(encoding="utf-8")
    off = replace(a_profile(), seconds=0.0125)
    assert "is off by 20 %: do not rely on these predictions." in written(tmp_path, profile=off).read_text("utf-8")


def test_a_report_that_cannot_be_written_raises_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        written(tmp_path)
    assert [one.name for one in (tmp_path / "made").iterdir()] == ["report.html"]


def test_a_missing_plotly_is_named_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(SetupError, match=r"pip install 'lightning-pipe\[report\]'"):
        written(tmp_path)


# ---------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, of the system or of Playwright's own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright, which drives a browser, is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        try:
            launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium to open the report in: {str(error).splitlines()[0]}")
        yield launched
        launched.close()


class Opened:
    """A report in a browser that has no network, and what came of it.

    Attributes:
        page: Playwright's.
        trouble: what was written to the console, raised, or asked for over the network.
    """

    def __init__(self, browser: Any, path: Path) -> None:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        context.set_default_timeout(1e3 * HANG)  # ms
        self.page = context.new_page()
        self.trouble: list[str] = []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", self._note)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("#what-if-chart .bars .point path")

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.trouble.append(request.url)

    def bars(self, chart: str) -> int:
        """How many are drawn."""
        return int(self.page.locator(f"#{chart} .plot .bars .point path, #{chart} .barlayer .point path").count())

    def hover(self, chart: str, bar: int) -> str:
        """What is shown while the mouse is over a bar: which of those in sight, since a chart opens with a part."""
        plot = self.page.locator(f"#{chart} .nsewdrag").bounding_box()
        bars = [
            one
            for one in self.page.locator(f"#{chart} .cartesianlayer .bars .point path").all()
            if 0 <= one.bounding_box()["x"] + one.bounding_box()["width"] / 2 - plot["x"] < plot["width"]
        ]
        path = bars[bar]
        shown = self.page.locator(f"#{chart} .hoverlayer .hovertext")
        deadline = time.monotonic() + HANG
        # Again and again: a chart that is being drawn, or moves while others are, does not hear of the mouse.
        while time.monotonic() < deadline:
            path.scroll_into_view_if_needed()
            box = path.bounding_box()
            for away in (2, 0):
                self.page.mouse.move(box["x"] + box["width"] / 2 - away, box["y"] + box["height"] / 2)
            self.page.wait_for_timeout(200)
            if shown.count():
                break
        return " ".join(shown.all_text_contents())


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Opened:
    return Opened(browser, written(tmp_path))


@pytest.mark.exhaustive
def test_charts_are_drawn_without_an_error_and_without_a_network(opened: Opened) -> None:
    assert opened.bars("cost-chart") == 6  # own and exposed of three tasks; one of them has no length
    assert opened.page.locator("#cost-chart .xerror").count() == 2
    assert opened.bars("timeline-chart") > 2 * 3 * 6
    assert opened.bars("what-if-chart") == 3
    assert opened.trouble == []


@pytest.mark.exhaustive
def test_a_bar_says_what_it_is_under_the_mouse(opened: Opened) -> None:
    assert "exposed 0.100 ms, 1.0 % of an iteration" in opened.hover("cost-chart", 0)
    told = opened.hover("timeline-chart", -1)
    assert "on the critical path" in told
    assert "rank 1, main" in told


@pytest.mark.exhaustive
def test_the_timeline_names_lanes_and_batches_and_zooms(opened: Opened) -> None:
    chart = opened.page.locator("#timeline-chart")
    ticks = sorted(chart.locator(".ytick text").all(), key=lambda one: one.bounding_box()["y"])
    lanes = [one.text_content().strip() for one in ticks]
    assert lanes == [f"rank {rank} · {lane}" for rank in (0, 1) for lane in ("main", "copies", "network")]
    legend = chart.locator(".legendtext").all_text_contents()
    assert legend[0] == "batch 0"
    assert legend[-1] == "critical path"
    before = opened.page.evaluate("document.getElementById('timeline-chart').layout.xaxis.range.slice()")
    chart.scroll_into_view_if_needed()  # the mouse moves within the window
    plot = chart.locator(".nsewdrag").first.bounding_box()
    y = plot["y"] + plot["height"] / 2
    opened.page.mouse.move(plot["x"] + plot["width"] * 0.4, y)
    opened.page.mouse.down()
    opened.page.mouse.move(plot["x"] + plot["width"] * 0.6, y, steps=4)
    opened.page.mouse.up()
    after = opened.page.evaluate("document.getElementById('timeline-chart').layout.xaxis.range.slice()")
    assert after[1] - after[0] == pytest.approx(0.2 * (before[1] - before[0]), rel=0.1)


@pytest.mark.exhaustive
def test_the_menu_picks_the_question(opened: Opened) -> None:
    chart = opened.page.locator("#what-if-chart")
    chart.locator(".updatemenu-header").click()
    chart.locator(".updatemenu-dropdown-button", has_text="another number of ranks").click()
    chart.locator(".ytick text", has_text="4096 ranks").wait_for()
    assert opened.bars("what-if-chart") == 12
    assert opened.trouble == []


@pytest.mark.exhaustive
def test_no_button_sends_a_chart_away(opened: Opened) -> None:
    buttons = opened.page.locator(".modebar-btn").all()
    titles = {one.get_attribute("data-title") for one in buttons}
    assert "Zoom" in titles
    assert not [title for title in titles if "hare" in title or "loud" in title or "Edit" in title]


@pytest.mark.exhaustive
def test_names_are_shown_as_they_are_and_never_run(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, written(tmp_path, copy=NASTY, name=NASTY, facts={NASTY: NASTY}))
    assert opened.page.locator("h1").inner_text() == f"Pipeline report: plan {NASTY}"
    assert opened.page.locator("td.task").first.inner_text() == NASTY
    ticks = opened.page.locator("#cost-chart .ytick text").all_text_contents()
    assert NASTY in [tick.strip() for tick in ticks]
    assert NASTY in opened.hover("cost-chart", 0)
    assert opened.trouble == []
