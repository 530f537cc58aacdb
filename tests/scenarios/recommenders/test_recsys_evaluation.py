"""Validation, test and prediction of sharded tables run under the plan of training, and give the same to the bit."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipe.engine import InputError
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    Batch,
    Clicks,
    Mixed,
    Rows,
    collate,
    fit,
    loader,
    predictions,
    recsys,
    state_of,
    trainer,
)

KINDS = {"people": "row_wise", "things": "table_wise"}


class Everything(Clicks):
    """Keeps every loss of an evaluation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.evaluated: list[float] = []

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append(self.loss_of(batch).item())

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx)


class Wrapped(Everything):
    """Gets the batches of its second loader inside a dict."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch["inside"] if dataloader_idx == 1 else batch, batch_idx)


class Twice(Everything):
    """Looks everything up twice, from what it makes of the batch."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        super().validation_step(batch, batch_idx)


class Endless(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, length: int) -> None:
        self.rows = Rows(length)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.rows[index] for index in range(len(self.rows))])


def inside(rows: list[Any]) -> dict[str, Batch]:
    return {"inside": collate(rows)}


def evaluations(plan: Any, make: Callable[[], Clicks], **options: Any) -> list[Any]:
    used = trainer(recsys(plan, KINDS, **options), use_distributed_sampler=False)
    module = make()
    validated = used.validate(module, loader(20), verbose=False)
    tested = used.test(module, loader(12), verbose=False)
    return [validated, tested, predictions(used, module, loader(20))]


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    assert ours[:2] == theirs[:2]
    assert torch.equal(ours[2], theirs[2])


@pytest.mark.parametrize(
    ("rewrite", "plan"),
    [("record", "serial"), ("direct", "base"), ("fx", "prefetch"), ("record", "fused_sparse_dist")],
)
def test_what_is_found_equals_what_the_module_computes_batch_by_batch(plan: str, rewrite: Any) -> None:
    expected = evaluations(plan, Clicks, rewrite={"evaluation": False})
    assert_equal(evaluations(plan, Clicks, rewrite={"method": rewrite}), expected)


@pytest.mark.parametrize(
    ("network", "plan"),
    [(Mixed, "threaded_input"), (Mixed, "fused_sparse_dist")],
)
def test_a_validation_in_mid_epoch_changes_nothing_of_training(plan: str, network: Any) -> None:
    def trained(**options: Any) -> tuple[Clicks, dict[str, Tensor]]:
        module = Clicks(network)
        used = fit(module, recsys(plan, **options), loader(40), loader(12), val_check_interval=3)
        return module, state_of(used)

    (ours, state), (expected, its) = trained(), trained(rewrite={"evaluation": False})
    assert ours.losses == expected.losses
    assert state.keys() == its.keys()
    assert all(torch.equal(state[name], its[name]) for name in its)


def spans(plan: str) -> list[Any]:
    """Of the third batch's period on, of a validation of six batches."""

    found: list[Any] = []

    class Tracing(Callback):
        def on_validation_batch_start(self, used: Any, module: Any, batch: Any, batch_idx: int, *rest: Any) -> None:
            if batch_idx == 2:
                used.strategy._evaluation.programs[0].pipeline.start_trace()

        def on_validation_epoch_end(self, used: Any, module: Any) -> None:
            found[:] = used.strategy._evaluation.programs[0].pipeline.stop_trace()

    trainer(recsys(plan), callbacks=[Tracing()]).validate(Clicks(), loader(24), verbose=False)
    return found


def test_under_the_prefetch_plan_later_batches_are_under_way_when_one_is_evaluated() -> None:
    found = spans("prefetch")
    order = [(span.task, span.iteration) for span in found]
    assert order.index(("EmbInputDistStart", 4)) < order.index(("DenseForward", 2))
    assert order.index(("H2DAndShuffle", 5)) < order.index(("DenseForward", 3))
    groups = {span.thread for span in found if span.task == "EmbPrefetch"}
    assert groups == {"prefetch"} != {MAIN}
    assert {task for task, _ in order} == {
        *("H2DAndShuffle", "EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch", "EmbForward", "DenseForward")
    }


@pytest.mark.parametrize("plan", ["prefetch"])
def test_each_loader_may_have_batches_of_its_own_form(plan: str) -> None:
    def run(**options: Any) -> list[float]:
        module = Wrapped()
        loaders = [loader(12), DataLoader(Rows(12), 4, collate_fn=inside), loader(8)]
        trainer(recsys(plan, **options)).validate(module, loaders, verbose=False)
        return module.evaluated

    losses = run()
    assert len(losses) == 8
    assert losses == run(rewrite={"evaluation": False})


@pytest.mark.parametrize("plan", ["fused_sparse_dist"])
def test_modules_that_are_called_twice_are_looked_up_as_they_are_called(plan: str) -> None:
    module, expected = Twice(), Everything()
    with pytest.warns(UserWarning, match="pipelined"):
        trainer(recsys(plan)).validate(module, loader(12), verbose=False)
    trainer(recsys(plan)).validate(expected, loader(12), verbose=False)
    assert module.evaluated == [loss for loss in expected.evaluated for _ in range(2)]


@pytest.mark.parametrize("plan", ["prefetch"])
def test_an_error_leaves_the_module_as_it_was_and_training_can_begin(plan: str) -> None:
    class Breaking(Clicks):
        breaks = True

        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if batch_idx == 1 and self.breaks:
                raise LookupError("no such column")

    module = Breaking()
    strategy = recsys(plan)
    with pytest.raises(LookupError, match="no such column") as raised:
        fit(module, strategy, loader(24), loader(12), val_check_interval=2, num_sanity_val_steps=0)
    assert "batch 1 of dataloader 0 failed in validation on rank 0" in raised.value.__notes__
    sharded = strategy.sharded_model.sharded_modules
    assert [name for name, one in sharded.items() if "forward" in one.__dict__] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_pipe")] == []
    Breaking.breaks = False
    used = fit(module, recsys(plan), loader(24), loader(12), val_check_interval=2)
    assert used.global_step == 12


def test_a_step_that_passes_something_else_than_the_first_time_is_told_so() -> None:
    class Changing(Everything):
        def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
            if batch_idx == 2:
                batch = collate([Rows(4)[index] for index in range(4)])
            super().validation_step(batch, batch_idx)

    with pytest.raises(InputError, match=r"rewrite: \{evaluation: false\}"):
        trainer(recsys()).validate(Changing(), loader(16), verbose=False)
    module = Changing()
    trainer(recsys(rewrite={"evaluation": False})).validate(module, loader(16), verbose=False)
    assert len(module.evaluated) == 4


def test_an_evaluation_checks_ids_where_asked_to_and_leaves_the_kernels_counts() -> None:
    def spoilt(rows: list[Any]) -> Batch:
        batch = collate(rows)
        batch.sparse.values().add_(1000)
        return batch

    with pytest.raises(InputError, match=r"the id 10\d\d, but ids must be"):
        trainer(recsys(validate_ids=True)).validate(Clicks(), DataLoader(Rows(8), 4, collate_fn=spoilt), verbose=False)
    strategy = recsys()
    used = trainer(strategy, max_epochs=1)
    module = Clicks()
    used.fit(module, loader(12))
    modules = strategy.sharded_model.sharded_modules.values()
    before = [int(kernel.iter_cpu) for one in modules for kernel in find_fused_kernels(one)]
    used.validate(module, loader(24), verbose=False)
    assert [int(kernel.iter_cpu) for one in modules for kernel in find_fused_kernels(one)] == before


# ---------------------------------------------------------------------- several ranks


def rows_of(rank: int, counts: tuple[int, int]) -> DataLoader[Any]:
    return DataLoader([Rows(24)[rank + 2 * index] for index in range(counts[rank])], 2, collate_fn=collate)  # type: ignore[arg-type]


def run_plan(rank: int, world_size: int, plan: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for ahead in (True, False):
        strategy: dict[str, Any] = {"plan": plan, "kinds": KINDS, "rewrite": {"evaluation": ahead}}
        used = trainer(recsys(**strategy), use_distributed_sampler=False)
        module = Everything(Mixed)
        used.validate(module, rows_of(rank, (12, 12)), verbose=False)
        predicted = [
            torch.cat([torch.cat(of_loader) for of_loader in used.predict(module, loaders) or []])
            for loaders in (
                [rows_of(rank, (9, 4)), rows_of(rank, (2, 7))],
                [rows_of(rank, (6, 6)), rows_of(rank, (3, 2))],
            )
        ]
        trained = Everything(Mixed)
        state = state_of(fit(trained, recsys(**strategy), loader(48), loader(24), val_check_interval=2))
        results[f"{plan}, {ahead}"] = (module.evaluated, predicted, trained.losses, trained.evaluated, state)
    for name, loaders, entry in (
        ("uneven", rows_of(rank, (8, 4)), "validate"),
        ("streams", DataLoader(Endless((12, 8)[rank]), 4, collate_fn=collate), "validate"),
        (
            "second stream",
            [rows_of(rank, (4, 4)), DataLoader(Endless((4, 9)[rank]), 4, collate_fn=collate)],
            "test",
        ),
    ):
        used = trainer(recsys(plan, KINDS, uneven_evaluation="error"), use_distributed_sampler=False)
        try:
            getattr(used, entry)(Everything(), loaders)
        except InputError as error:
            results[f"{name}, {plan}"] = str(error)
    even = Everything()
    streams = DataLoader(Endless(12), 4, collate_fn=collate)
    trainer(recsys(plan, KINDS), use_distributed_sampler=False).validate(even, streams, verbose=False)
    results[f"even streams, {plan}"] = even.evaluated
    return results


@cache
def ranks(plan: str) -> list[dict[str, Any]]:
    return run_ranks(run_plan, 2, plan)


@pytest.mark.parametrize("plan", ["prefetch", "fused_sparse_dist"])
def test_ranks_find_together_what_they_find_batch_by_batch(plan: str) -> None:
    for results in ranks(plan):
        ours, expected = results[f"{plan}, True"], results[f"{plan}, False"]
        assert ours[0] == expected[0]
        assert len(ours[0]) == 6
        for one, other in zip(ours[1], expected[1], strict=True):
            assert torch.equal(one, other)
        assert ours[2:4] == expected[2:4]
        assert all(torch.equal(ours[4][name], value) for name, value in expected[4].items())


def test_uneven_ranks_predict_each_row_once_of_every_loader() -> None:
    for rank, results in enumerate(ranks("prefetch")):
        uneven, nearly = results["prefetch, True"][1]
        assert (len(uneven), len(nearly)) == ((11, 9), (11, 8))[rank]
    module = Everything(Mixed)
    alone = Reference.of(lambda: {"rows": predictions(trainer("auto"), module, rows_of(0, (9, 4)))})
    assert alone.differences({"rows": ranks("prefetch")[0]["prefetch, True"][1][0][:9]}) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uneven", r"uneven numbers of batches in validation, for each dataloader: \[4\] on rank 0, \[2\] on rank 1"),
        ("streams", r"uneven numbers of batches: all ranks have 2, with 1 or more on rank 0 left over"),
        ("second stream", r"uneven numbers of batches: all ranks have 3, with \d or more on rank 1 left over"),
    ],
)
def test_no_rank_waits_for_one_that_has_fewer_batches_where_that_is_refused(name: str, said: str) -> None:
    for results in ranks("prefetch"):
        assert re.search(said, results[f"{name}, prefetch"]), results[f"{name}, prefetch"]


def test_streams_of_one_length_are_evaluated_to_their_end() -> None:
    assert [len(results["even streams, prefetch"]) for results in ranks("prefetch")] == [3, 3]
