"""The profiler of a fit: when it measures, what it leaves behind, and that training does not notice."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipe.callbacks.monitor import PipelineMonitor
from lightning_pipe.callbacks.profiler import PipelineProfiler
from lightning_pipe.callbacks.report import cost_figure
from lightning_pipe.callbacks.verdict import diagnose_bottleneck
from lightning_pipe.engine import ProfileResult, SetupError
from lightning_pipe.engine.profiling.profile import TaskProfile
from lightning_pipe.engine.ranks import object_collectives
from tests.distributed import run_ranks
from tests.strategies.cases import Clicks, Memory, difference, fit, loader, recsys, state_of

TASK = ["DenseForward"]


@dataclass
class Seen:
    """What one rank saw of a fit."""

    state: dict[str, torch.Tensor]
    losses: list[float]
    profiles: dict[int, ProfileResult] = field(default_factory=dict)
    printed: str = ""
    logged: list[tuple[int | None, dict[str, float]]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def run(profiler: PipelineProfiler | None, *others: pl.Callback, rows: int = 64, **options: Any) -> Seen:
    """Eight batches of four rows on each of two ranks."""
    module, logger, out = Clicks(), Memory(), io.StringIO()
    callbacks = [*others, *([profiler] if profiler else [])]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(out):
        used = fit(
            module,
            recsys("prefetch"),
            loader(rows),
            callbacks=callbacks,
            logger=logger,
            max_epochs=1,
            default_root_dir=folder,
            **options,
        )
        files = {one.name: one.read_text(encoding="utf-8") for one in Path(folder).rglob("*.*") if one.is_file()}
        state = state_of(used)
    logged = [line for line in logger.lines if any(name.startswith(("own/", "exposed/")) for name in line[1])]
    seen = Seen(state, module.losses, printed=out.getvalue(), logged=logged, files=files)
    if profiler is not None:
        seen.profiles = profiler.profiles
    return seen


class Records(pl.Callback):
    """Records a trace while batches 2 to 4 train, as another callback might."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if batch_idx == 2:
            strategy.start_trace()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if batch_idx == 4:
            self.spans = strategy.stop_trace()


def fits(rank: int, world_size: int) -> dict[str, Any]:
    few: dict[str, Any] = {"rounds": 1, "iterations": 1, "tasks": TASK}
    monitor, records = PipelineMonitor(every_n_steps=1), Records()
    with mock.patch("lightning_pipe.callbacks.monitor.diagnose_bottleneck", wraps=diagnose_bottleneck) as asked:
        everything = run(PipelineProfiler(at_steps=[5], rounds=1, iterations=1), monitor)
        with mock.patch.object(object_collectives, "host_id", return_value=(f"machine {rank}", 0)):
            run(None, PipelineMonitor())
    found: dict[str, Any] = {
        "plain": run(None),
        "all": everything,
        "one host": [call.kwargs["one_host"] for call in asked.call_args_list],
        "begin": run(PipelineProfiler(at_steps=[1, 7], report=None, show=False, **few)),
        "accumulated": run(PipelineProfiler(at_steps=[1, 3], report=None, **few), accumulate_grad_batches=2),
        "plain accumulated": run(None, accumulate_grad_batches=2),
        "beside a trace": run(
            PipelineProfiler(at_steps=[2], path=None, report=None, **few), records, accumulate_grad_batches=2
        ),
    }
    try:
        run(PipelineProfiler(at_steps=[3 + rank], path=None, report=None, **few))
    except SetupError as error:
        found["disagree"] = str(error)
    return {
        **found,
        "use": monitor.step_breakdown_by_rank,
        "traced": sorted({span.iteration for span in records.spans}),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(fits, 2)


def test_training_does_not_notice(found: list[dict[str, Any]]) -> None:
    for one in found:
        for name, plain in (("all", "plain"), ("begin", "plain"), ("accumulated", "plain accumulated")):
            # Its own calls of training_step note losses of their own, between those of training.
            assert [loss for loss in one[plain].losses if loss not in one[name].losses] == []
            assert difference(one[name].state, one[plain].state) == []


def test_every_rank_profiles_after_the_steps_asked_for(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert list(one["all"].profiles) == [5]
        assert len(one["all"].profiles[5].tasks) == 11
        assert list(one["accumulated"].profiles) == [1, 3]
        assert list(one["accumulated"].profiles[3].tasks) == TASK


def test_a_profile_waits_for_the_first_batch_that_it_can_have(found: list[dict[str, Any]]) -> None:
    # The first batch trains alone, and was not held.
    for one in found:
        assert list(one["begin"].profiles) == [2, 7]


def test_a_profile_waits_until_nobody_else_records(found: list[dict[str, Any]]) -> None:
    for one in found:
        # The other trace ends in the middle of step 3, where gradients are accumulated.
        assert list(one["beside a trace"].profiles) == [3]
        # The tasks of batches 2 to 4, and of those that ran ahead meanwhile.
        assert one["traced"] == [2, 3, 4, 5, 6]


def test_the_first_rank_prints_logs_and_writes(found: list[dict[str, Any]]) -> None:
    first, second = found[0]["all"], found[1]["all"]
    assert "under the plan prefetch; longest of the measured tasks: " in " ".join(first.printed.split())
    assert "plan prefetch" not in second.printed + found[0]["begin"].printed
    ((step, values),) = first.logged
    assert step == 4  # as others count, from 0
    assert values == {
        **{f"own/{name}": seconds for name, seconds in first.profiles[5].task_seconds.items()},
        **{f"exposed/{name}": seconds for name, seconds in first.profiles[5].exposed.items()},
    }
    assert second.logged == []
    assert set(first.files) == {"profile.json", "report.html"}
    assert ProfileResult.from_json(first.files["profile.json"]) == first.profiles[5]


def test_the_report_shows_pictures_the_costs_and_the_plan(found: list[dict[str, Any]]) -> None:
    text = found[0]["all"].files["report.html"]
    for shown in ("2 ranks on cpu", "after optimizer step 5, in 1 rounds of 1 iterations", "<td>EmbPrefetch</td>"):
        assert shown in text, shown
    assert text.count('src="data:image/png;base64,') == 2


def test_ranks_that_would_profile_at_other_steps_are_told_so(found: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert "differs between ranks: rank 0 has 'at_steps' = '[3]', but rank 1" in found[rank]["disagree"]


def test_a_monitor_leaves_the_profile_out(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert [use.steps for use in one["use"]] == [6, 6]  # of eight: the first one, and the one behind the profile


# ---------------------------------------------------------------------- one process


def fit_alone(profiler: PipelineProfiler, strategy: Any = None, **options: Any) -> None:
    fit(Clicks(), strategy or recsys("serial"), loader(8), callbacks=[profiler], max_epochs=1, **options)


def test_files_that_cannot_be_written_cost_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = PipelineProfiler([2], tasks=TASK, rounds=1, iterations=1, path="file/a.json", report="file/b.html")
    with pytest.warns(UserWarning, match="could not write.*Training continues") as warned:
        fit_alone(profiler, default_root_dir=tmp_path)
    assert len([one for one in warned if "could not write" in str(one.message)]) == 1
    assert list(profiler.profiles) == [2]


def test_a_fit_that_ends_before_the_step_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"took no profile in 2 optimizer steps, with at_steps=\(7,\)"):
        fit_alone(PipelineProfiler([7], report=None))


def test_a_strategy_without_profiles_is_refused_and_those_that_have_them_named() -> None:
    with pytest.raises(SetupError, match=r"got PipelineStrategy.*recsys_prefetch_pipeline"):
        fit_alone(PipelineProfiler([1]), strategy="pipeline")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "needs the optimizer steps to profile after"),
        ({"at_steps": [0, 4]}, r"1 or later, got at_steps=\(0, 4\)"),
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"at_steps": [1], "rounds": 0}, "rounds is 0; expected a whole number, 1 or more"),
        ({"at_steps": [1], "iterations": 1.5}, "iterations is 1.5"),
        ({"at_steps": ["3"]}, r"at_steps=\('3',\)"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        PipelineProfiler(**arguments)


# ---------------------------------------------------------------------- figures

PROFILE = ProfileResult("p", 0.01, {"A": TaskProfile(0.004, 0.001, 0.0, 0.002), "B": TaskProfile(0.002)}, 3, 4)


def test_a_figure_has_a_bar_for_each_time_that_is_known() -> None:
    (axes,) = cost_figure(PROFILE).axes
    bars: list[Any] = list(axes.patches)
    assert sorted(round(bar.get_width(), 3) for bar in bars) == [0.0, 1.0, 2.0, 4.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["A", "B"]
