"""The monitor of a fit: what it counts, by a clock that moves only where the test says, and what it says of that."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.callbacks.monitor import PipelineMonitor
from lightning_pipe.callbacks.trace import PipelineTrace
from lightning_pipe.callbacks.verdict import BottleneckVerdict, StepBreakdown, diagnose_bottleneck, find_straggler
from lightning_pipe.engine import PipelinePlan
from lightning_pipe.engine.observe.meter import CallerTimeMeter
from lightning_pipe.recsys.plans.recsys_plans import recsys_plan
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from tests.distributed import run_ranks
from tests.strategies.cases import Clicks, Memory, collate, recsys
from tests.strategies.cases import Rows as ClickRows

# ---------------------------------------------------------------------- what a step consists of


class Clock:
    """In the place of ``time.perf_counter``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


class Rows(Dataset[Any]):
    """Eight rows, each of which takes *seconds(epoch)* to read."""

    def __init__(self, clock: Clock, seconds: Callable[[int], float]) -> None:
        self.clock, self.seconds = clock, seconds
        self.read = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.clock.now += self.seconds(self.read // len(self))
        self.read += 1
        return {"x": torch.ones(3), "y": torch.ones(2)}


class Trains(pl.LightningModule):
    """A step takes six seconds, a hook one, one before the transfer as long as is said, a validation a hundred."""

    def __init__(self, clock: Clock, prepares: float = 0.0) -> None:
        super().__init__()
        self.clock, self.prepares = clock, prepares
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 6
        return self.layer(batch["x"]).sum()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 1

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.clock.now += self.prepares
        return batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 100

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(
    clock: Clock,
    monitor: PipelineMonitor,
    *more: pl.Callback,
    seconds: Callable[[int], float] = lambda epoch: 1.5,
    prepares: float = 0.0,
    batch_size: int = 2,
    epochs: int = 1,
    **options: Any,
) -> tuple[pl.Trainer, list[tuple[int | None, dict[str, float]]]]:
    """A fit of four batches an epoch; returns what was logged of the pipeline, too."""
    memory = Memory()
    data: Any = DataLoader(Rows(clock, seconds), batch_size=batch_size)
    used = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="pipeline",
        logger=memory,
        callbacks=[monitor, *more],
        max_epochs=epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    used.fit(Trains(clock, prepares), data, DataLoader(Rows(clock, lambda _: 0.0), batch_size=8))
    return used, [(step, found) for step, found in memory.lines if "pipeline/iteration_seconds" in found]


def test_a_step_is_told_apart_into_what_the_main_thread_did(clock: Clock) -> None:
    monitor = PipelineMonitor(every_n_steps=2)
    used, logged = run(clock, monitor, seconds=lambda _: 1.25, prepares=0.5)
    (use,) = monitor.step_breakdown_by_rank
    # Two rows at 1.25 s, and the hook; the last batch of four fetches none, and the first is not counted.
    assert use.steps == 3
    assert use.loader == pytest.approx(2.0)
    assert use.seconds == pytest.approx(9.0)
    assert use.tasks["TrainBatch"] == pytest.approx(6.0)
    assert use.tasks["H2D"] == 0.0
    assert use.workers == use.other_loaders == 0.0
    assert [step for step, _ in logged] == [1, 3]
    assert logged[0][1] == {
        "pipeline/iteration_seconds": pytest.approx(10.0),
        "pipeline/loader_seconds": pytest.approx(3.0),
        "pipeline/forward_wait_seconds": 0.0,
        "pipeline/batches_in_flight": 2.0,
        "pipeline/samples_per_second": pytest.approx(0.2),
    }
    assert logged[1][1]["pipeline/batches_in_flight"] == 1.5
    assert float(used.callback_metrics["pipeline/iteration_seconds"]) == pytest.approx(8.5)
    assert "pipeline/iteration_seconds" not in used.progress_bar_metrics


def test_a_step_in_which_the_plan_has_changed_is_left_out(clock: Clock) -> None:
    class Changes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.fit_loop.epoch_loop.program.pipeline.meter = CallerTimeMeter()

    monitor = PipelineMonitor()
    run(clock, monitor, Changes(), batch_size=1)
    assert monitor.step_breakdown_by_rank[0].steps == 6
    assert monitor.step_breakdown_by_rank[0].tasks["TrainBatch"] == pytest.approx(6.0)


def test_validation_is_left_out(clock: Clock) -> None:
    monitor = PipelineMonitor()
    run(clock, monitor, val_check_interval=2)
    assert monitor.step_breakdown_by_rank[0].seconds == pytest.approx(9.0)


def test_a_step_that_was_not_training_alone_can_be_left_out(clock: Clock) -> None:
    monitor = PipelineMonitor()

    class Pauses(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                clock.now += 1000
                monitor.exclude_step()

    run(clock, monitor, Pauses(), seconds=lambda _: 0.0, epochs=1, limit_val_batches=0)
    assert monitor.step_breakdown_by_rank == []  # two steps are too few
    run(clock, monitor, Pauses(), seconds=lambda _: 0.0, batch_size=1, limit_val_batches=0)
    assert monitor.step_breakdown_by_rank[0].seconds == pytest.approx(7.0)
    assert monitor.step_breakdown_by_rank[0].steps == 6


@pytest.mark.parametrize("monitor_first", [True, False])
def test_what_a_trace_writes_and_draws_is_left_out(
    clock: Clock, monitor_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: Any) -> None:
        clock.now += 1000

    monkeypatch.setattr("lightning_pipe.callbacks.trace.export_chrome_trace", draw)
    monitor, trace = PipelineMonitor(), PipelineTrace(tmp_path / "trace.json", steps=(2, 2), picture=None)
    callbacks = (monitor, trace) if monitor_first else (trace, monitor)
    run(clock, *callbacks, seconds=lambda _: 0.0, batch_size=1, epochs=1, limit_val_batches=0)
    assert monitor.step_breakdown_by_rank[0].seconds == pytest.approx(7.0)
    # Of eight steps the first, the one that ends the trace, and the one behind that, in which other ranks wait.
    assert monitor.step_breakdown_by_rank[0].steps in (4, 5)


def test_batches_are_counted_where_they_do_not_say_how_many_samples_they_have(clock: Clock) -> None:
    class Halves(PipelineMonitor):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(trainer, pl_module, {**batch, "y": batch["y"][:1]}, batch_idx)

    _, logged = run(clock, Halves(every_n_steps=4))
    assert logged[0][1]["pipeline/batches_per_second"] == pytest.approx(1 / 9)
    assert "pipeline/samples_per_second" not in logged[0][1]


def test_the_trainers_interval_is_the_default_and_the_progress_bar_is_on_request(clock: Clock) -> None:
    used, logged = run(clock, PipelineMonitor(prog_bar=True), log_every_n_steps=4)
    assert [step for step, _ in logged] == [3]
    assert used.progress_bar_metrics["pipeline/iteration_seconds"] == pytest.approx(9.0)
    assert used.progress_bar_metrics["pipeline/samples_per_second"] == pytest.approx(2 / 9)


def test_it_speaks_where_something_else_holds_the_steps_up_and_at_the_end(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = PipelineMonitor()
    run(clock, monitor, seconds=lambda epoch: [3, 3, 0, 0][epoch], epochs=4, limit_val_batches=0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.split(";")[0] for line in lines] == [
        "epoch 0: input-bound: 36 % of the step waits for the data loader",
        "epoch 2: hook-bound: 14 % of the step is spent outside the pipeline's tasks, in hooks, callbacks and logging",
        "epoch 3: hook-bound: 14 % of the step is spent outside the pipeline's tasks, in hooks, callbacks and logging",
    ]
    assert monitor.verdict == lines[-1]


# ---------------------------------------------------------------------- what holds it up

PREFETCH = recsys_plan("prefetch", recsys_tasks())
SERIAL = recsys_plan("serial", recsys_tasks())


def use(
    loader: float = 0.0, workers: float = 0.0, other: float = 0.0, hooks: float = 0.0, **tasks: float
) -> StepBreakdown:
    """A step of ten seconds, a mean of twenty, that is filled up with DenseBackward."""
    rest = 10.0 - loader - workers - other - hooks - sum(tasks.values())
    return StepBreakdown(20, 10.0, loader, other, workers, {**tasks, "DenseBackward": rest})


def of(*uses: StepBreakdown, plan: PipelinePlan = PREFETCH, **known: Any) -> BottleneckVerdict:
    return diagnose_bottleneck(uses, plan, **known)


@pytest.mark.parametrize(
    ("workers", "loader", "cores", "advice"),
    [
        (0, 4.0, 8, "try num_workers=1 (currently 0)"),  # four seconds of work beside six
        (0, 7.5, 8, "try num_workers=3 (currently 0)"),  # 7.5 beside 2.5
        (2, 5.0, 8, "try num_workers=4 (currently 2)"),  # a batch takes each of two workers twenty, beside five
        (0, 9.5, 4, "try num_workers=4 (currently 0); hiding all of it would take 19 workers on separate cores"),
        (4, 9.0, 4, "its 4 workers already occupy all cores (4 per rank): read and collate less per batch"),
        (None, 4.0, 8, "prepare batches in the background"),
    ],
)
def test_a_slow_loader_is_advised_as_many_workers_as_hide_it(
    workers: int | None, loader: float, cores: int, advice: str
) -> None:
    found = of(use(loader), num_workers=workers, cores=cores)
    assert found.kind == "input-bound"
    assert found.text.startswith(f"input-bound: {10 * loader:.0f} % of the step waits for the data loader; {advice}")


@pytest.mark.parametrize(("workers", "enough"), [(0, 10), (8, 16)])
def test_a_number_of_workers_is_advised_only_from_enough_steps(workers: int, enough: int) -> None:
    few, many = (of(replace(use(4.0), steps=steps), num_workers=workers, cores=64) for steps in (enough - 1, enough))
    assert few.kind == many.kind == "input-bound"
    assert few.text == (
        f"input-bound: 40 % of the step waits for the data loader; the epoch has only {enough - 1} steps, but at least"
        f" {enough} are needed to estimate the number of workers: train a longer epoch before changing num_workers"
        f" (currently {workers})"
    )
    assert "try num_workers=" in many.text
    # Without workers of PyTorch's no number is computed.
    assert "prepare batches in the background" in of(replace(use(4.0), steps=3)).text


def test_what_every_rank_waits_is_the_networks() -> None:
    found = of(use(EmbInputDistWait=3.0), use(EmbInputDistWait=2.0, workers=0.5))
    assert found.kind == "network-bound"
    assert (
        "25 % of the step waits for messages of other ranks (EmbInputDistWait 20 %, worker threads 5 %)" in found.text
    )
    assert "it takes longer than the work that it can overlap with" in found.text
    assert "agreement on batches 30 %" in of(*2 * [use(other=3.0)]).text
    assert "try strategy='recsys_prefetch_pipeline'" in of(*2 * [use(EmbPrefetch=3.0)], plan=SERIAL).text
    assert "larger batches" in of(*2 * [use(FinalizeGrads=3.0)]).text


@pytest.mark.parametrize(
    ("waits", "plan"),
    [({"EmbInputDistWait": 3.0}, PREFETCH), ({"other": 3.0}, SERIAL), ({"FinalizeGrads": 3.0}, PREFETCH)],
)
def test_of_ranks_on_one_host_nothing_is_said_of_a_network(waits: dict[str, float], plan: PipelinePlan) -> None:
    found = of(*2 * [use(**waits)], plan=plan, one_host=True)
    assert found.kind == "rank-bound"
    assert "30 % of the step waits for other ranks on this machine" in found.text
    assert not {"network", "send"} & set(re.findall(r"\w+", found.text))
    # Elsewhere there is one.
    assert of(*2 * [use(**waits)], plan=plan).kind == "network-bound"


def test_a_rank_that_the_others_wait_for_is_named() -> None:
    found = of(use(EmbInputDistWait=5.0), use(EmbInputDistWait=0.5), use(EmbInputDistWait=4.0))
    assert found.kind == "uneven"
    assert "rank 0 waits 45 % of the step longer than rank 1, the slowest rank" in found.text


@pytest.mark.parametrize(
    ("one", "kind", "said"),
    [
        (use(workers=2.0), "worker-bound", "20 % of the step waits for the worker threads ('prefetch')"),
        (use(H2DAndShuffle=2.0), "copy-bound", "pin_memory=True"),
        (use(hooks=2.0), "hook-bound", "20 % of the step is spent outside the pipeline's tasks"),
        (
            use(loader=0.9, EmbForward=2.0),
            "compute-bound",
            "91 % of the step is work (DenseBackward 71 %, EmbForward 20 %)",
        ),
        (StepBreakdown(9, 1.0, 0.0, tasks={"ScheduleStep": 0.95}), "schedule-bound", "BubbleMonitor"),
    ],
)
def test_one_rank_is_held_up_by(one: StepBreakdown, kind: str, said: str) -> None:
    found = of(one)
    assert found.kind == kind
    assert found.text.startswith(f"{kind}: ")
    assert said in found.text


def test_of_a_pipe_it_is_not_said_that_nothing_is_to_be_gained() -> None:
    step = StepBreakdown(9, 1.0, 0.0, tasks={"TrainBatch": 0.95})
    assert diagnose_bottleneck([step], PREFETCH).kind == "compute-bound"
    found = diagnose_bottleneck([step], PREFETCH, has_pipe=True)
    assert found.kind == "schedule-bound"
    assert "95 % of the step is spent in the pipe; use PipelineTrace" in found.text


# ---------------------------------------------------------------------- who holds the others up


def waiting(*shares: float) -> list[StepBreakdown]:
    """A step of ten seconds on each rank, of which it waits a share, and otherwise is in DenseForward."""
    return [
        StepBreakdown(20, 10.0, 0.0, tasks={"DenseForward": 10 * (1 - share)}, wait_share=share, host=f"node{rank}")
        for rank, share in enumerate(shares)
    ]


def test_a_straggler_costs_what_the_next_slowest_rank_waits_longer() -> None:
    found = find_straggler(waiting(0.3, 0.02, 0.2))
    assert found is not None
    assert (found.rank, found.host) == (1, "node1")
    assert found.cost == pytest.approx(0.18)
    assert found.text == (
        "straggler: all ranks wait for rank 1 on host node1, which costs 18 % of the step, most of it in DenseForward"
    )


@pytest.mark.parametrize(
    "shares",
    [(0.3,), (0.05, 0.0), (0.3, 0.0, 0.01), (0.0, 0.0, 0.0)],
    ids=["one rank", "5 %", "two equally slow ranks", "no waits"],
)
def test_no_rank_is_named_where_none_alone_costs_more_than_a_twentieth(shares: tuple[float, ...]) -> None:
    assert find_straggler(waiting(*shares)) is None


class OwnTime:
    """The clock of a rank, in the place of ``time.perf_counter``: it moves only where the rank says."""

    now = 0.0


def two_ranks(rank: int, world_size: int, slow: dict[int, float], forwards: float) -> Any:
    """Fit of six batches; in its forward, rank 1 is slower by *slow* seconds, by batch, which rank 0 waits for."""
    clock = OwnTime()

    class Slow(Clicks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.now += forwards + (slow.get(batch_idx, 0.0) if rank == 1 else 0.0)
            return super().training_step(batch, batch_idx)

    monitor = PipelineMonitor()
    read: Any = time.perf_counter
    time.perf_counter = lambda: clock.now
    ran = CallerTimeMeter.add_task_time

    def waits(self: CallerTimeMeter, task: str, begun: float) -> None:
        if task == "FinalizeGrads" and rank == 0:
            clock.now += slow.get(waits.batch, 0.0)  # type: ignore[attr-defined]
        waits.batch += task == "FinalizeGrads"  # type: ignore[attr-defined]
        ran(self, task, begun)

    waits.batch = 0  # type: ignore[attr-defined]
    CallerTimeMeter.add_task_time = waits  # type: ignore[method-assign]
    try:
        used = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=recsys("serial"),
            callbacks=[monitor],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        used.fit(Slow(), DataLoader(ClickRows(12), batch_size=1, collate_fn=collate))
    finally:
        time.perf_counter, CallerTimeMeter.add_task_time = read, ran  # type: ignore[method-assign]
    found = monitor.straggler
    return monitor.verdict, found and (found.rank, found.host, round(found.cost, 3))


def test_the_slow_one_of_two_ranks_is_named_on_both() -> None:
    for verdict, straggler in run_ranks(two_ranks, 2, dict.fromkeys(range(6), 2.0), 8.0):
        assert straggler == (1, socket.gethostname(), 0.2)
        assert f"all ranks wait for rank 1 on host {socket.gethostname()}, which costs 20 % of the step" in verdict
        assert verdict.endswith("most of it in DenseForward")
