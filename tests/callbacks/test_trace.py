"""The trace of a fit: which batches it has, what the files say, and that training does not notice."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.callbacks import BubbleMonitor, PipelineTrace
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.observe.clocks import ClockOffset, measure_offset
from lightning_pipe.strategies import InProcessPipelineStrategy, PipelineStrategy
from tests.distributed import run_ranks
from tests.engine.trace_event_rules import violations
from tests.loops.models import Net, Rows
from tests.strategies import cases, llm_cases

Trace = dict[str, Any]


def fit(trace: PipelineTrace, folder: Path, module: Any = None, **options: Any) -> pl.Trainer:
    """Eight batches on one process, whose files go to *folder*."""
    used = cases.trainer(PipelineStrategy(), callbacks=[trace], default_root_dir=folder, **{"max_epochs": 2, **options})
    used.fit(module or Net(), torch.utils.data.DataLoader(Rows(16), batch_size=4))
    return used


def read(path: Path) -> Trace:
    trace: Trace = json.loads(path.read_text())
    assert violations(trace) == []
    return trace


def slices(trace: Trace, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank + 1]


def iterations(trace: Trace, task: str, rank: int = 0) -> list[int]:
    return [event["args"]["iteration"] for event in slices(trace, rank) if event["name"] == task]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------------- one process


def test_the_chosen_batches_are_recorded_and_what_ran_ahead_beside_them(tmp_path: Path) -> None:
    fit(PipelineTrace(steps=(2, 3)), tmp_path)
    assert files(tmp_path) == {"trace.json", "timeline.png"}
    trace = read(tmp_path / "trace.json")
    assert iterations(trace, "TrainBatch") == [2, 3, 4]
    assert iterations(trace, "H2D") == [3, 4, 5]  # epochs have four batches, and the copy is one ahead
    assert trace["otherData"] == {
        "plan": "copy_ahead",
        "strategy": "PipelineStrategy",
        "batches": [2, 4],
        "clock_error_us": [0.0],
    }
    flows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(flows) == 2  # from the copies of 3 and 4 to their training


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_micro_batches_are_seen_on_their_way_through_the_partitions_of_a_pipe(tmp_path: Path, checkpoint: Any) -> None:
    class Layers(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(4, 400), torch.nn.Linear(400, 1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(batch).mean()
            return loss

        def train_dataloader(self) -> Any:
            rows: Any = torch.randn(28, 4)
            return torch.utils.data.DataLoader(rows, batch_size=8)  # the last one has four rows

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pipe = InProcessPipelineStrategy(4, checkpoint=checkpoint, parallel_devices=["cpu", "cpu"])
    trace = PipelineTrace(steps=(1, 3))
    cases.trainer(pipe, callbacks=[trace], default_root_dir=tmp_path, max_epochs=1).fit(Layers())
    assert files(tmp_path) == {"trace.json", "timeline.png"}
    found = read(tmp_path / "trace.json")
    for kind, order in (("forward", (0, 1, 2, 3)), ("backward", (3, 2, 1, 0))):
        for partition in (0, 1):
            parts = [one["args"] for one in slices(found) if one["cat"] == kind and one["args"]["stage"] == partition]
            assert [part["microbatch"] for part in parts] == [*order, *order, *order]
            assert [part["iteration"] for part in parts] == [1] * 4 + [2] * 4 + [3] * 4
    # From forward to forward, to both backwards, and from backward to backward.
    assert sum(event["ph"] == "s" and event["name"] != "plan" for event in found["traceEvents"]) >= 3 * 4 * 4
    if checkpoint == "never":
        assert "recompute" not in {one["cat"] for one in slices(found)}


def test_batches_are_recorded_again_and_again(tmp_path: Path) -> None:
    fit(PipelineTrace("t.json", steps=(1, 2), every=3, picture="p.svg"), tmp_path)
    assert files(tmp_path) == {"t-1.json", "t-4.json", "t-7.json", "p-1.svg", "p-4.svg", "p-7.svg"}
    # The last recording ends with training.
    trained = [iterations(read(tmp_path / f"t-{first}.json"), "TrainBatch") for first in (1, 4, 7)]
    assert trained == [[1, 2], [4, 5], [7]]


def test_a_whole_fit_is_recorded_as_far_back_as_is_kept(tmp_path: Path) -> None:
    fit(PipelineTrace(steps=None, max_spans=5, picture=None), tmp_path)
    trace = read(tmp_path / "trace.json")
    assert len([event for event in slices(trace) if event["cat"] == "task"]) == 5
    assert iterations(trace, "TrainBatch") == [5, 6, 7]
    assert trace["otherData"]["batches"] == [0, 7]


def test_outside_the_chosen_batches_nothing_is_recorded(tmp_path: Path) -> None:
    on: list[bool] = []

    class Look(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loop: Any = self.trainer.fit_loop.epoch_loop
            on.append(loop.program.pipeline._executor.trace is not None)
            return super().training_step(batch, batch_idx)

    fit(PipelineTrace(steps=(2, 3), picture=None), tmp_path, Look())
    assert on == [False, False, True, True, True, False, False, False]


def test_validation_is_a_bar_between_the_batches(tmp_path: Path) -> None:
    used = cases.trainer(
        PipelineStrategy(),
        callbacks=[PipelineTrace(steps=(1, 4), picture=None)],
        default_root_dir=tmp_path,
        num_sanity_val_steps=1,
    )
    data = torch.utils.data.DataLoader(Rows(16), batch_size=4)
    used.fit(Net(), data, data)
    found = [event for event in slices(read(tmp_path / "trace.json")) if event["cat"] == "evaluation"]
    assert [event["name"] for event in found] == ["validation"]
    assert found[0]["dur"] > 0


def test_an_exception_leaves_what_was_recorded_until_then(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise ZeroDivisionError("on purpose")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        fit(PipelineTrace(steps=(1, 8)), tmp_path, Fails())
    trace = read(tmp_path / "trace.json")
    assert iterations(trace, "TrainBatch") == [1, 2]
    assert "on purpose" in trace["otherData"]["ended by"]


def test_files_that_cannot_be_written_cost_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    module = Net()
    trace = PipelineTrace("file/trace.json", steps=(1, 1), every=2, picture="file/timeline.png")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(trace, tmp_path, module)
    found = [str(one.message) for one in caught if "PipelineTrace" in str(one.message)]
    assert len(found) == 1
    assert "Training continues" in found[0]
    assert len(module.losses) == 8


def test_a_fit_that_ends_before_the_first_chosen_batch_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="recorded no batch: 8 batches were trained"):
        fit(PipelineTrace(steps=(8, 1)), tmp_path)
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": (-1, 4)}, r"steps=\(-1, 4\)"),
        ({"steps": (3, 0)}, r"steps=\(3, 0\)"),
        ({"max_spans": 0}, "max_spans is 0"),
        ({"steps": None, "every": 5}, "every=5 and steps=None"),
        ({"steps": (0, 6), "every": 5}, "every=5"),
        ({"picture": "timeline.doc"}, r"timeline\.doc"),
    ],
)
def test_numbers_and_names_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        PipelineTrace(**arguments)


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    used = cases.trainer("auto", callbacks=[PipelineTrace()], default_root_dir=tmp_path)
    with pytest.raises(SetupError, match="expected a strategy with a pipeline, got SingleDeviceStrategy"):
        used.fit(Net(), torch.utils.data.DataLoader(Rows(16), batch_size=4))


def test_a_step_that_fetches_its_batches_itself_is_refused(tmp_path: Path) -> None:
    class Iterating(Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return self.layers(next(dataloader_iter)[0]).square().mean()

    with pytest.raises(SetupError, match="dataloader_iter"):
        fit(PipelineTrace(steps=(1, 2)), tmp_path, Iterating())


# ---------------------------------------------------------------------- two ranks


AHEAD = 5000  # seconds that the clock of rank 1 is ahead


@dataclass
class Seen:
    """What one rank saw of a fit."""

    losses: list[float] = field(default_factory=list)
    events_left: int = 0
    recording: bool = False
    bubble: Any = None
    failure: str = ""
    offset: ClockOffset | None = None


def fit_recsys(folder: str, trace: PipelineTrace | None, fails: bool = False) -> Seen:
    module = cases.Clicks()
    callbacks: list[Any] = [] if trace is None else [trace]
    if fails:
        callbacks.append(Fail())
    seen = Seen()
    try:
        cases.fit(module, cases.recsys("prefetch"), callbacks=callbacks, default_root_dir=folder)
    except ZeroDivisionError as error:
        seen.failure = str(error)
    seen.losses = module.losses
    return seen


class Fail(pl.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        if args[-1] == 2:
            raise ZeroDivisionError("on purpose")


def fit_llm(folder: str, callbacks: list[Any], schedule: str = "1f1b") -> Seen:
    module, strategy = llm_cases.Tiny(), llm_cases.llm(schedule)
    seen = Seen()
    try:
        llm_cases.fit(module, strategy, llm_cases.row_batches(6), callbacks=callbacks, default_root_dir=folder)
    except SetupError as error:
        seen.failure = str(error)
        return seen
    seen.losses = module.losses
    seen.events_left, seen.recording = len(strategy.runner.events), strategy.runner.record_events
    monitors = [one for one in callbacks if isinstance(one, BubbleMonitor)]
    seen.bubble = monitors[0].report.steps if monitors and monitors[0].report else None
    return seen


def fits(rank: int, world_size: int, folder: str) -> dict[str, Seen]:
    seen = {"plain": fit_recsys(folder, None), "plain llm": fit_llm(folder, [])}
    seconds, nanoseconds = time.perf_counter, time.perf_counter_ns
    # As on another machine, whose clock began at another time.
    with (
        mock.patch.object(time, "perf_counter", side_effect=lambda: seconds() + AHEAD * rank),
        mock.patch.object(time, "perf_counter_ns", side_effect=lambda: nanoseconds() + AHEAD * 10**9 * rank),
    ):
        group: Any = dist.new_group(backend="gloo")
        seen["clock"] = Seen(offset=measure_offset(group))
        seen["recsys"] = fit_recsys(folder, PipelineTrace("recsys.json", (2, 3), picture="recsys.png"))
        seen["failed"] = fit_recsys(folder, PipelineTrace("failed.json", (1, 9), picture=None), fails=True)
        seen["zbv"] = fit_llm(folder, [PipelineTrace("zbv.json", (1, 1), picture=None)], "zbv_zero_bubble")
        monitor = BubbleMonitor(every_n_steps=1, warmup=1)
        seen["monitored"] = fit_llm(folder, [monitor, PipelineTrace("monitored.json", (0, 4), picture=None)])
        seen["before"] = fit_llm(folder, [PipelineTrace("before.json"), BubbleMonitor()])
    # On the clock that both ranks read, since the order of works of microseconds is looked at.
    seen["llm"] = fit_llm(folder, [PipelineTrace("llm.json", (2, 2), picture="llm.png")])
    return seen


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Seen]]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, run_ranks(fits, 2, str(folder))


Found = tuple[Path, list[dict[str, Seen]]]


def test_training_is_the_same_with_a_trace(two_ranks: Found) -> None:
    for one in two_ranks[1]:
        assert one["recsys"].losses == one["plain"].losses
        for name in ("llm", "monitored"):
            assert one[name].losses == one["plain llm"].losses
        assert len(one["plain llm"].losses) == 6


def test_both_ranks_are_in_one_file_with_their_threads_and_the_batches(two_ranks: Found) -> None:
    trace = read(two_ranks[0] / "recsys.json")
    for rank in (0, 1):
        for name in ("EmbForward", "DenseBackward", "OptimStep"):
            assert iterations(trace, name, rank) == [2, 3, 4]
        lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == rank + 1}
        assert lanes == {"main", "prefetch"}
    assert (two_ranks[0] / "recsys.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_are_put_on_one_clock(two_ranks: Found) -> None:
    folder, seen = two_ranks
    offset = seen[1]["clock"].offset
    assert offset is not None
    assert abs(offset.seconds + AHEAD) <= offset.error < AHEAD / 2
    trace = read(folder / "recsys.json")
    exact, error = trace["otherData"]["clock_error_us"]
    assert exact == 0 < error < AHEAD / 2 * 1e6
    for step in range(3):
        # Gradients are reduced from the backward pass on: that is over on no rank before it has begun on the other.
        begins = [[e for e in slices(trace, rank) if e["name"] == "DenseBackward"][step]["ts"] for rank in (0, 1)]
        reduced = [[e for e in slices(trace, rank) if e["name"] == "FinalizeGrads"][step] for rank in (0, 1)]
        assert max(begins) <= min(event["ts"] + event["dur"] for event in reduced) + error


def test_after_an_exception_each_rank_leaves_its_own(two_ranks: Found) -> None:
    folder, seen = two_ranks
    for rank in (0, 1):
        assert seen[rank]["failed"].failure == "on purpose"
        trace = read(folder / f"failed.rank{rank}.json")
        assert iterations(trace, "OptimStep", rank) == [1]
        assert not slices(trace, 1 - rank)
    assert not (folder / "failed.json").exists()


def test_micro_batches_are_seen_on_their_way_through_the_stages(two_ranks: Found) -> None:
    trace = read(two_ranks[0] / "llm.json")
    for rank in (0, 1):
        parts = [event for event in slices(trace, rank) if "stage" in event["args"]]
        counts = Counter((event["cat"], event["args"]["iteration"]) for event in parts)
        assert {key: counts[key] for key in counts if key[0] in ("forward", "backward")} == {
            (kind, batch): 4 for kind in ("forward", "backward") for batch in (2, 3)
        }
        assert any(event["cat"].startswith("wait_") for event in parts)
        assert {event["args"]["stage"] for event in parts} == {rank}
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    across = Counter((starts[key]["pid"], ends[key]["pid"]) for key in starts)
    assert across[1, 2] == across[2, 1] == 8  # forwards to rank 1, backwards to rank 0
    assert trace["otherData"]["clock_error_us"] == [0.0, 0.0]
    assert (two_ranks[0] / "llm.png").exists()


def test_both_parts_of_a_backward_are_seen(two_ranks: Found) -> None:
    trace = read(two_ranks[0] / "zbv.json")
    counts = Counter(event["cat"] for event in slices(trace))
    assert counts["input_backward"] > 0
    assert counts["input_backward"] + counts["backward"] == counts["forward"] == 8
    assert counts["weight_backward"] == counts["input_backward"]


def test_a_bubble_monitor_measures_beside_a_trace_that_comes_after_it(two_ranks: Found) -> None:
    folder, seen = two_ranks
    assert [one["monitored"].bubble for one in seen] == [5, 5]
    assert iterations(read(folder / "monitored.json"), "ScheduleStep") == [0, 1, 2, 3]
    parts = Counter(
        e["args"].get("iteration") for e in slices(read(folder / "monitored.json")) if e["cat"] == "forward"
    )
    assert parts == dict.fromkeys(range(4), 4)
    assert all("PipelineTrace must come after BubbleMonitor" in one["before"].failure for one in seen)
