"""Validation, test and prediction run ahead as training does, and give what Lightning's loops give."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from lightning_pipe.loops import EvaluationProgram, PipelineEvaluationLoop
from lightning_pipe.strategies.pipeline import PipelineStrategy
from tests.loops.models import Net, Rows, Stream, trainer
from tests.strategies.cases import Memory


class Ahead(PipelineStrategy):
    """Moves batches so many ahead, and writes down when."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.events: list[str] = []

    def evaluation_program(self, used: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        def move(ctx: IterContext) -> None:
            ctx.batch = transfer(ctx.batch)
            self.events.append(f"move {int(ctx.batch[0, 0])}")

        tasks = {
            PipelineTask("H2D", move, reads=("batch",), writes=("batch",)): TaskSchedule(stage=self.depth),
            PipelineTask("Evaluate", lambda ctx: None, reads=("batch",)): TaskSchedule(),
        }
        return EvaluationProgram(SWPipeline(PipelinePlan(tasks)), transfer="H2D", step="Evaluate")


class Seen(Net):
    """Remembers each batch evaluated and what was known of it; a step draws random numbers."""

    def __init__(self, strategy: Any = None) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.events: list[str] = [] if strategy is None else strategy.events

    def _evaluate(self, batch: Tensor, batch_idx: int, dataloader_idx: int, progress: Any) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.events.append(f"step {int(batch[0, 0])}")
        drawn = torch.rand(()).item()
        self.seen.append(
            (batch[:, 0].tolist(), batch_idx, dataloader_idx, progress.is_last_batch, loss.item(), drawn, batch.sum())
        )
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loop = self.trainer._evaluation_loop
        self.log("loss", self._evaluate(batch, batch_idx, dataloader_idx, loop.batch_progress))

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self._evaluate(batch, batch_idx, dataloader_idx, self.trainer.predict_loop.batch_progress)
        return batch[:, 0]


def rows(length: int = 10, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(length), 4, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "one": rows,
    "shuffled": lambda: rows(shuffle=True),
    "several": lambda: [rows(10, shuffle=True), rows(8), rows(9, shuffle=True)],
    "a stream": lambda: DataLoader(Stream(10), 4),
    "several streams": lambda: [DataLoader(Stream(10), 4), DataLoader(Stream(3), 4), rows()],
    "workers": lambda: rows(20, num_workers=1, shuffle=True),
}


def evaluated(strategy: Any, entry: str, loaders: Any, **options: Any) -> tuple[Seen, Any, Tensor]:
    pl.seed_everything(11)
    module = Seen(strategy if isinstance(strategy, Ahead) else None)
    used = trainer(strategy=strategy, **options)
    result = getattr(used, entry)(module, loaders)
    return module, result, torch.rand(3)


def assert_equal(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert len(one) == len(other)
        for value, expected in zip(one, other, strict=True):
            assert torch.equal(value, expected) if isinstance(value, Tensor) else value == expected


@pytest.mark.parametrize(
    ("loaders", "entry", "depth"),
    [(name, "validate", 3) for name in LOADERS]
    + [
        ("several", "test", 3),
        ("several", "predict", 3),
        ("several streams", "predict", 0),
        ("shuffled", "validate", 0),
    ],
)
def test_steps_see_the_batches_and_the_random_numbers_that_they_see_in_lightnings_loop(
    loaders: str, entry: str, depth: int
) -> None:
    theirs, their_result, their_next = evaluated("auto", entry, LOADERS[loaders]())
    ours, our_result, our_next = evaluated(Ahead(depth), entry, LOADERS[loaders]())
    assert len(theirs.seen) >= 3
    assert str(our_result) == str(their_result)
    if loaders == "several streams":
        # Lightning itself reads ahead into the next loader, and draws its seed between the model's numbers.
        assert_equal([one[:5] for one in ours.seen], [one[:5] for one in theirs.seen])
    else:
        assert_equal(ours.seen, theirs.seen)
        assert torch.equal(our_next, their_next)


@pytest.mark.parametrize(
    ("options", "loaders"),
    [({"limit_val_batches": 2}, "several"), ({"limit_val_batches": 0.5}, "one"), ({"fast_dev_run": True}, "several")],
)
def test_limits_hold(loaders: str, options: dict[str, Any]) -> None:
    theirs, their_result, _ = evaluated("auto", "validate", LOADERS[loaders](), **options)
    ours, our_result, _ = evaluated(Ahead(2), "validate", LOADERS[loaders](), **options)
    assert_equal(ours.seen, theirs.seen)
    assert our_result == their_result


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_loaders_that_are_read_together_are(mode: Any) -> None:
    class Joined(Seen):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(torch.cat([one for one in batch if one is not None]), batch_idx)

    def run(strategy: Any) -> Joined:
        pl.seed_everything(11)
        module = Joined()
        trainer(strategy=strategy).validate(module, CombinedLoader([rows(14), rows(6)], mode))
        return module

    theirs, ours = run("auto"), run("pipeline")
    assert [one[:4] for one in ours.seen] == [one[:4] for one in theirs.seen]
    assert len(ours.seen) == (2 if mode == "min_size" else 4)


def test_later_batches_are_moved_before_a_step_and_none_twice() -> None:
    strategy = Ahead(2)
    module, _, _ = evaluated(strategy, "validate", rows(20))
    steps, moves = ([event for event in strategy.events if event.startswith(kind)] for kind in ("step", "move"))
    assert steps == [f"step {row}" for row in range(0, 20, 4)]
    assert moves == [f"move {row}" for row in range(0, 20, 4)]
    assert strategy.events[:5] == ["move 0", "move 4", "move 8", "step 0", "move 12"]
    assert module.seen[-1][3]


def test_nothing_is_read_of_a_loader_before_the_one_before_it_is_evaluated() -> None:
    strategy = Ahead(3)
    evaluated(strategy, "validate", [rows(8), rows(8)])
    assert strategy.events == ["move 0", "move 4", "step 0", "step 4"] * 2


def test_training_goes_on_as_after_a_validation_of_lightnings() -> None:
    def fitted(strategy: Any) -> tuple[Seen, pl.Trainer]:
        pl.seed_everything(11)
        module = Seen()
        used = trainer(strategy=strategy, val_check_interval=2, max_epochs=2)
        used.fit(module, rows(24, shuffle=True), [rows(8), rows(4)])
        return module, used

    theirs, _ = fitted("auto")
    ours, used = fitted(Ahead(2))
    assert isinstance(used.fit_loop.epoch_loop.val_loop, PipelineEvaluationLoop)
    assert ours.trained == theirs.trained
    assert ours.losses == theirs.losses
    assert_equal(ours.seen, theirs.seen)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_predictions_are_written_with_the_indices_of_their_rows() -> None:
    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.written: list[Any] = []

        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
            self.written.append((prediction.tolist(), indices))

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, indices: Any) -> None:
            self.written.append([[one.tolist() for one in predictions[0]], indices])

    def written(strategy: Any) -> list[Any]:
        writer = Writer()
        evaluated(strategy, "predict", rows(), callbacks=[writer])
        return writer.written

    ours = written(Ahead(2))
    assert ours == written("auto")
    assert ours[0] == ([0.0, 1.0, 2.0, 3.0], [0, 1, 2, 3])


@pytest.mark.parametrize("place", ["validation_step", "on_validation_batch_end", "transfer_batch_to_device", "fetch"])
def test_an_error_is_raised_as_it_is_with_a_note_and_leaves_nothing_behind(place: str) -> None:
    class Broken(Seen):
        def fails(self, *args: Any, **kwargs: Any) -> Any:
            if place != "transfer_batch_to_device" or self.seen:
                raise LookupError("no such column")
            return args[0]

    class Unreadable(Rows):
        def __getitem__(self, index: int) -> Tensor:
            if place == "fetch" and index == 9:
                raise LookupError("no such column")
            return super().__getitem__(index)

    module = Broken()
    if place != "fetch":
        setattr(module, place, module.fails)
    used = trainer(strategy="pipeline")
    with pytest.raises(LookupError, match="no such column") as raised:
        used.validate(module, DataLoader(Unreadable(20), 4))
    notes = " ".join(raised.value.__notes__)
    assert ("batch 0 of dataloader 0 failed in validation on rank 0" in notes) or ("of iteration" in notes)
    assert [thread.name for thread in threading.enumerate() if "lightning_pipe" in thread.name] == []
    again = Seen()
    trainer(strategy="pipeline").validate(again, rows())
    assert len(again.seen) == 3


def test_a_step_that_reads_for_itself_gets_lightnings_iterator() -> None:
    class Reads(Seen):
        def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            self.seen.append((batch[:, 0].tolist(), batch_idx, dataloader_idx))

    module = Reads()
    trainer(strategy="pipeline").validate(module, rows())
    assert module.seen == [([0, 1, 2, 3], 0, 0), ([4, 5, 6, 7], 1, 0), ([8, 9], 2, 0)]


def test_hooks_are_told_the_dataloader_and_loggers_the_step() -> None:
    class Told(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[Any] = []

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.told.append(("before", dataloader_idx))
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.told.append(("after", dataloader_idx))
            return batch

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("each", batch.sum(), on_step=True, on_epoch=True)

    def run(strategy: Any) -> tuple[list[Any], list[Any]]:
        module, logger = Told(), Memory()
        trainer(strategy=strategy, logger=logger).validate(module, [rows(10), rows(8)])
        return sorted(module.told), [(step, sorted(line)) for step, line in logger.lines]

    told, lines = run("auto")
    assert run("pipeline") == (told, lines)
    assert {index for _, index in told} == {0, 1}
    assert [step for step, _ in lines][:5] == [0, 1, 2, 0, 1]


def test_a_step_that_ends_the_evaluation_ends_that_one_alone() -> None:
    class Ending(Seen):
        ends = True

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            if self.ends and batch_idx == 1:
                raise StopIteration
            super().validation_step(batch, batch_idx)

    def evaluated_in(strategy: Any) -> list[Any]:
        module = Ending()
        trainer(strategy=strategy, val_check_interval=2, max_epochs=1, num_sanity_val_steps=0).fit(
            module, rows(24), rows()
        )
        return [one[:3] for one in module.seen]

    assert evaluated_in("pipeline") == evaluated_in("auto")
    assert len(evaluated_in("pipeline")) == 3
