"""The monitor of a pipeline's bubble: which steps it measures, what it logs, prints and leaves behind."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import Logger
from rich.console import Console

from lightning_pipe.callbacks import BubbleMonitor
from lightning_pipe.callbacks.bubble import bubble_table
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.schedules.bubble import BubbleReport, RankTimes, StepBubble
from tests.distributed import run_ranks
from tests.strategies.llm_cases import Tiny, fit, llm, packed_batches, row_batches, trainer

# ---------------------------------------------------------------------- fits on two ranks


@dataclass
class Seen:
    """What one rank saw of a fit."""

    report: BubbleReport | None = None
    printed: str = ""
    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    recorded: list[int] = field(default_factory=list)
    left: int = 0
    losses: list[float] = field(default_factory=list)


class Look(pl.Callback):
    """Notes what a step logs and what its stages note, before the monitor behind it takes that away."""

    def __init__(self, seen: Seen, record: bool) -> None:
        self.seen = seen
        self.record = record

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        strategy.runner.record_events = self.record

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        self.seen.recorded.append(len([e for e in strategy.runner.events if e.kind in ("forward", "backward")]))


class Collect(Logger):
    """A logger that notes the bubbles it is given, by the number of steps done."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    name = version = "bubbles"

    def log_hyperparams(self, *args: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        found = {name: value for name, value in metrics.items() if name.startswith("bubble")}
        if found:
            self.seen.logged[step + 1] = found


def run(schedule: str, batches: list[Any], monitor: BubbleMonitor | None, record: bool = False, **options: Any) -> Seen:
    seen, module, strategy = Seen(), Tiny(), llm(schedule)
    callbacks = [Look(seen, record), *([monitor] if monitor else [])]
    out = io.StringIO()
    with redirect_stdout(out):
        fit(module, strategy, batches, callbacks=callbacks, logger=Collect(seen), **options)
    seen.printed, seen.losses = out.getvalue(), module.losses
    seen.report = None if monitor is None else monitor.report
    seen.left = len(strategy.runner.events)
    return seen


def fits(rank: int, world_size: int) -> dict[str, Seen]:
    rows = row_batches(6)
    return {
        "plain": run("1f1b", rows, None),
        "each second": run("1f1b", rows, BubbleMonitor(every_n_steps=2, warmup=2)),
        "accumulated": run("gpipe", rows, BubbleMonitor(every_n_steps=2, warmup=0), accumulate_grad_batches=2),
        "recorded": run("1f1b", rows, BubbleMonitor(every_n_steps=1, warmup=1), record=True),
        "packed": run("zbv_zero_bubble", packed_batches(4, 3), BubbleMonitor(every_n_steps=1, warmup=0)),
        "too few": run("1f1b", rows, BubbleMonitor(every_n_steps=50)),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Seen]]:
    return run_ranks(fits, 2)


def test_every_rank_has_the_same_report_of_the_measured_steps(found: list[dict[str, Seen]]) -> None:
    for name, steps, schedule in (
        ("each second", 2, "1f1b"),
        ("recorded", 5, "1f1b"),
        ("packed", 3, "zbv_zero_bubble"),
    ):
        report = found[0][name].report
        assert report is not None
        assert report == found[1][name].report
        assert (report.schedule, report.num_microbatches, report.steps) == (schedule, 4, steps)
        assert len(report.medians.ranks) == 2
        assert report.medians.simulated is not None
        assert 0 < report.medians.simulated < 1
        assert 0 < report.medians.measured < 1
        assert all(one.busy > 0 for one in report.medians.ranks)
    assert found[0]["packed"].report.textbook is None  # type: ignore[union-attr]
    assert found[0]["each second"].report.textbook == pytest.approx(1 / 5)  # type: ignore[union-attr]


def test_only_the_first_rank_prints(found: list[dict[str, Seen]]) -> None:
    assert found[0]["each second"].printed.startswith("schedule 1f1b: 2 ranks, 4 micro-batches; medians of 2 steps")
    assert "measured" in found[0]["each second"].printed
    assert found[1]["each second"].printed == ""


def test_events_are_noted_in_measured_steps_only_and_let_go_of(found: list[dict[str, Seen]]) -> None:
    for one in found:
        assert one["each second"].recorded == [0, 0, 0, 8, 0, 8]
        assert one["each second"].left == 0
        assert one["accumulated"].recorded == [0, 0, 8, 8, 0, 0]


def test_measured_steps_log_the_bubble_and_what_is_simulated(found: list[dict[str, Seen]]) -> None:
    for one in found:
        assert list(one["each second"].logged) == [4, 6]
        assert one["each second"].logged == found[0]["each second"].logged
        for values in one["each second"].logged.values():
            assert set(values) == {"bubble", "bubble_simulated"}


def test_measuring_changes_nothing_in_training(found: list[dict[str, Seen]]) -> None:
    for one in found:
        assert one["each second"].losses == one["plain"].losses
        assert len(one["plain"].losses) == 6


def test_a_fit_too_short_to_be_measured_prints_nothing(found: list[dict[str, Seen]]) -> None:
    assert [(one["too few"].report, one["too few"].printed) for one in found] == [(None, "")] * 2


# ---------------------------------------------------------------------- one process


def test_another_strategy_is_refused_when_fit_begins() -> None:
    with pytest.raises(SetupError, match="only a pipeline of stages has a bubble"):
        trainer("auto", callbacks=[BubbleMonitor()]).fit(Tiny())


@pytest.mark.parametrize("numbers", [{"every_n_steps": 0}, {"warmup": -1}])
def test_numbers_that_are_too_small_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(SetupError, match="expected a whole number"):
        BubbleMonitor(**numbers)


def table(report: BubbleReport) -> list[str]:
    console = Console(file=io.StringIO(), width=80, markup=False)
    console.print(bubble_table(report))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines() if line.split()]


def test_the_table_fits_a_narrow_terminal_and_shows_milliseconds_and_shares() -> None:
    ranks = (RankTimes(6.0, 0.0, 1.5, 0.25, 0.25), RankTimes(7.0, 1.0, 0.0, 0.0, 0.0))
    report = BubbleReport("1f1b", 8, 20, StepBubble(ranks, 0.1875, 8.0, 0.15, 7.5), 1 / 9)
    lines = table(report)
    assert lines[0] == "schedule 1f1b: 2 ranks, 8 micro-batches; medians of 20 steps, in ms"
    assert "rank busy waits forward waits backward other done idle" in lines
    assert "0 6000.00 0.00 1500.00 250.00 250.00 25.0 %" in lines
    assert "1 7000.00 1000.00 0.00 0.00 0.00 12.5 %" in lines
    assert lines[-3:] == [
        "measured 18.8 % 8000.00",
        "simulated, median durations 15.0 % 7500.00",
        "(P - 1) / (m + P - 1) 11.1 %",
    ]
