"""Several ranks: what only one of them does or gets wrong, all of them know, and none waits for ever.

Two ranks run all cases of a plan; each test looks at one of them.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipe.engine import InputError
from tests.distributed import run_ranks
from tests.strategies.cases import (
    KEYS,
    PLANS,
    Batch,
    Clicks,
    Mixed,
    Rows,
    collate,
    difference,
    fit,
    loader,
    recsys,
    state_of,
    trainer,
)

KINDS = {"people": "row_wise", "things": "table_wise"}
# Plans with batches in flight in a thread, and with lookups ahead.
CORNERS = ("prefetch", "fused_sparse_dist")
BAD_RANK = 1


# Steps without a loss: batches of an optimizer step, and whether no rank has a loss.
WITHOUT = [(1, True), (2, False)]


# ---------------------------------------------------------------------- bad input


def _without_jagged(batch: Batch) -> Batch:
    return Batch(batch.dense, batch.dense, batch.tags, batch.label)


def _other_keys(batch: Batch) -> Batch:
    batch.sparse._keys = [f"other {key}" for key in KEYS]
    return batch


def _unmovable(batch: Batch) -> Batch:
    return Batch(batch.dense, batch.sparse, batch.tags, threading.Lock())  # type: ignore[arg-type]


def _out_of_range(batch: Batch) -> Batch:
    batch.sparse.values().add_(1000)
    return batch


def _not_a_number(batch: Batch) -> Batch:
    return Batch(batch.dense * float("nan"), batch.sparse, batch.tags, batch.label)


# What is wrong with a batch, the strategy's arguments, and what the message says on every rank.
BAD: dict[str, tuple[Callable[[Batch], Batch], dict[str, Any], str]] = {
    "no keyed jagged tensor": (_without_jagged, {}, "KeyedJaggedTensor"),
    "other keys": (_other_keys, {}, "other user"),
    "a type that cannot be moved": (_unmovable, {}, "cannot be moved to a device"),
    "an id out of range": (_out_of_range, {"validate_ids": True}, r"the id 10\d\d, but .* table 'people'"),
    "a loss that is not a number": (_not_a_number, {"detect_nan": True}, r"not finite on rank\(s\) \[1\]"),
}


HOOK = "a transfer hook"
# What is wrong, with which batch, and the plan: each bad batch under one plan, and each plan with one at least.
BAD_CASES = [
    *((name, 3, PLANS[place % len(PLANS)]) for place, name in enumerate([*BAD, HOOK])),
    ("an id out of range", 0, "prefetch"),
]


class Spoiling:
    """Collates; on one rank, one batch comes out bad."""

    def __init__(self, spoil: Callable[[Batch], Batch], at: int) -> None:
        self._spoil = spoil
        self._left = at

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        batch = collate(rows)
        self._left -= 1
        return self._spoil(batch) if dist.get_rank() == BAD_RANK and self._left == -1 else batch


class BadHook(Clicks):
    """A user's transfer hook that fails on one rank."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.left -= 1
        if dist.get_rank() == BAD_RANK and self.left == -1:
            raise KeyError("no such column")
        return batch


def failure(module: Clicks, strategy: Any, **options: Any) -> dict[str, Any]:
    """What training raised on this rank, and what it left behind."""
    groups = len(dist.distributed_c10d._world.pg_map)
    try:
        fit(module, strategy, max_epochs=1, **options)
    except Exception as error:
        raised = {
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "message": str(error),
            "notes": "".join(getattr(error, "__notes__", ())),
        }
    else:
        raised = {"kinds": [], "message": "", "notes": ""}
    return {
        **raised,
        "trained": len(module.losses),
        "forwards": [name for name, child in module.named_modules() if "forward" in child.__dict__],
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_pipe")],
        "groups": len(dist.distributed_c10d._world.pg_map) - groups,
    }


# ---------------------------------------------------------------------- steps without a loss


class Without(Clicks):
    """Some batches have no loss, on one rank or on all."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.everywhere = everywhere

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        without = batch_idx % 3 == 1 and (self.everywhere or dist.get_rank() == 1)
        return None if without else loss


class Accumulating(Clicks):
    """Writes down a dense gradient after each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[torch.Tensor] = []

    def on_after_backward(self) -> None:
        gradient = self.dense_parameters()[0].grad
        assert gradient is not None
        self.gradients.append(gradient.clone())


class Endless(IterableDataset[Any]):
    """Batches of up to four rows without a length; as many rows as each rank is told."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(DataLoader(Rows(self.rows), batch_size=4, collate_fn=collate))


def lbfgs(module: Clicks) -> Any:
    return torch.optim.LBFGS(module.dense_parameters())


# ---------------------------------------------------------------------- what the ranks run


def status_messages(plan: str) -> tuple[int, int]:
    """Messages that only tell whether ranks have a next batch, and the batches of the epoch."""
    strategy, module = recsys(plan, KINDS), Clicks()
    groups: list[Any] = []

    def reduce(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        groups.append(group)
        return all_reduce(*args, group=group, **kwargs)

    class Watching(Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.group = trainer.fit_loop.epoch_loop.status_exchange.group  # type: ignore[attr-defined]

    watching = Watching()
    all_reduce: Any = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", reduce):
        fit(module, strategy, loader(160), max_epochs=1, callbacks=[watching])
    return groups.count(watching.group), len(module.losses)


def run_plan(rank: int, world_size: int, plan: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, at, _ in [case for case in BAD_CASES if case[2] == plan]:
        if name == HOOK:
            results[f"{name}, {at}, {plan}"] = failure(BadHook(at), recsys(plan, KINDS), train=loader(48))
            continue
        spoil, arguments, _ = BAD[name]
        train = loader(48, collate_fn=Spoiling(spoil, at))
        results[f"{name}, {at}, {plan}"] = failure(Clicks(), recsys(plan, KINDS, **arguments), train=train)
    if plan in ("serial", *CORNERS):
        for accumulate, everywhere in WITHOUT:
            module = Without(everywhere)
            used = fit(module, recsys(plan, KINDS), loader(48), accumulate_grad_batches=accumulate)
            results[f"without {accumulate} {everywhere} {plan}"] = module.losses, state_of(used)
    results[f"status messages, {plan}"] = status_messages(plan)
    if plan not in CORNERS:
        return results
    results[f"closure, {plan}"] = failure(Clicks(optimizers=lbfgs), recsys(plan, KINDS))
    shorter = Clicks()
    fit(shorter, recsys(plan, KINDS), Endless((20, 16)[rank]), max_epochs=2)
    results[f"uneven, {plan}"] = len(shorter.losses)
    refusing = recsys(plan, KINDS, uneven_batches="error")
    results[f"uneven refused, {plan}"] = failure(Clicks(), refusing, train=Endless((20, 16)[rank]))
    accumulating = Accumulating()
    fit(accumulating, recsys(plan, KINDS), loader(48), accumulate_grad_batches=3, max_epochs=1)
    results[f"accumulating, {plan}"] = accumulating.gradients
    return results


def run_others(rank: int, world_size: int) -> dict[str, Any]:
    """Cases of no one plan."""
    results: dict[str, Any] = {}
    differing = DataLoader(Rows((8, 7)[rank]), 4, collate_fn=collate)
    for clip in (None, 1.0):
        used = trainer(
            recsys("prefetch", {"people": "row_wise"}),
            use_distributed_sampler=False,
            max_epochs=1,
            gradient_clip_val=clip,
        )
        try:
            used.fit(Clicks(), differing)
            results[f"rows of a batch differ, clip {clip}"] = "trained"
        except InputError as error:
            results[f"rows of a batch differ, clip {clip}"] = str(error)
    results["statistics"] = statistics(rank)
    return results


def statistics(rank: int) -> list[torch.Tensor]:
    """BatchNorm's running mean and variance.

    Returns:
        Values after the last training step, at the end of ``fit``, after a save, and of a model that loads the save.
    """

    def of(module: Clicks) -> torch.Tensor:
        normalize = module.network.normalize
        assert isinstance(normalize, torch.nn.BatchNorm1d)
        assert normalize.running_mean is not None
        assert normalize.running_var is not None
        return torch.stack([normalize.running_mean, normalize.running_var]).clone()

    class Ending(Clicks):
        def on_train_end(self) -> None:  # Lightning calls it before the strategy's
            found.append(of(self))

    found: list[torch.Tensor] = []
    trained, loaded = Ending(Mixed), Clicks(Mixed)
    with tempfile.TemporaryDirectory() as folder:  # the first rank's is used
        used = fit(trained, recsys())
        found.append(of(trained))
        path = used.strategy.broadcast(f"{folder}/saved.ckpt")
        used.save_checkpoint(path)
        found.append(of(trained))
        trainer(recsys()).validate(loaded, loader(16), ckpt_path=path, verbose=False)
        dist.barrier()
    return [*found, of(loaded)]


Results = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def ranks() -> Results:
    """One case's result on each rank."""

    @cache
    def of(plan: str) -> list[dict[str, Any]]:
        return run_ranks(run_plan, 2, plan) if plan in PLANS else run_ranks(run_others, 2)

    def named(name: str) -> list[Any]:
        plan = name.split()[-1]
        return [of_rank[name] for of_rank in of(plan if plan in PLANS else "")]

    return named


@pytest.mark.parametrize(("name", "at", "plan"), BAD_CASES)
def test_every_rank_raises_what_is_wrong_with_the_batch_of_one(ranks: Results, name: str, at: int, plan: str) -> None:
    message = BAD[name][2] if name in BAD else "no such column"
    for rank, outcome in enumerate(ranks(f"{name}, {at}, {plan}")):
        # What a user's hook raised keeps its type where it did.
        kind = "KeyError" if name == HOOK and rank == BAD_RANK else "InputError"
        assert kind in outcome["kinds"], outcome
        assert re.search(message, outcome["message"]), outcome
        assert f"of iteration {at}" in outcome["notes"]
        assert outcome["trained"] <= at + 1
        assert (outcome["forwards"], outcome["threads"]) == ([], [])
        assert outcome["groups"] == 1  # of the sharded module


@pytest.mark.parametrize("plan", CORNERS)
def test_every_rank_refuses_an_optimizer_that_calls_its_closure_twice(ranks: Results, plan: str) -> None:
    for outcome in ranks(f"closure, {plan}"):
        assert "SetupError" in outcome["kinds"], outcome
        assert "called its closure a second time" in outcome["message"]


@pytest.mark.parametrize("plan", PLANS)
def test_only_an_input_dist_on_a_worker_needs_messages_of_its_own_for_the_next_batch(ranks: Results, plan: str) -> None:
    for messages, batches in ranks(f"status messages, {plan}"):
        # Before the first input dist, and after batches without one, a status has a message of its own.
        assert messages >= batches if plan == "threaded_input" else messages <= 6


@pytest.mark.parametrize(("accumulate", "everywhere"), WITHOUT)
def test_a_step_may_have_no_loss(ranks: Results, accumulate: int, everywhere: bool) -> None:
    serial = ranks(f"without {accumulate} {everywhere} serial")
    (_, state), (_, other) = serial
    assert difference(state, other) == []
    for plan in CORNERS:
        for (losses, found), (expected_losses, expected) in zip(
            ranks(f"without {accumulate} {everywhere} {plan}"), serial, strict=True
        ):
            assert len(losses) == 12
            assert losses == expected_losses, plan
            assert difference(found, expected) == [], plan


@pytest.mark.parametrize("clip", [None, 1.0])  # with clipping, an earlier task exchanges the gradients
def test_batches_of_different_numbers_of_rows_are_explained_where_gloo_cannot_exchange_them(
    ranks: Results, clip: float | None
) -> None:
    for message in ranks(f"rows of a batch differ, clip {clip}"):
        assert "must have the same number of rows on every rank" in message


@pytest.mark.parametrize("plan", CORNERS)
def test_an_epoch_ends_with_the_rank_that_has_the_fewest_batches(ranks: Results, plan: str) -> None:
    assert ranks(f"uneven, {plan}") == [8, 8]
    for found in ranks(f"uneven refused, {plan}"):
        assert "InputError" in found["kinds"]
        assert "all ranks have 4, with 1 or more on rank 0 left over" in found["message"]


@pytest.mark.parametrize("plan", CORNERS)
def test_gradients_are_averaged_over_ranks_once_for_all_micro_batches(ranks: Results, plan: str) -> None:
    one, other = ranks(f"accumulating, {plan}")
    averaged = [torch.equal(gradient, others) for gradient, others in zip(one, other, strict=True)]
    assert averaged == [False, False, True, False, False, True]


def test_every_rank_ends_saves_and_evaluates_with_the_first_ones_running_statistics(
    ranks: Results,
) -> None:
    (own, *of_first), (others, *of_other) = ranks("statistics")
    assert not torch.equal(own, others)  # of their own samples
    for found in (*of_first, *of_other):
        assert torch.equal(found, own)
