"""Samples balanced between ranks under a Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys import BatchBalancer, recsys_plan, recsys_tasks, token_weighted_mean
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    SGD,
    Batch,
    Clicks,
    Memory,
    Mixed,
    difference,
    fit,
    loader,
    recsys,
    state_of,
)

KINDS = {"people": "row_wise", "things": "table_wise"}


class Weighted(Clicks):
    """The mean over all samples of all ranks."""

    def loss_of(self, batch: Batch) -> Tensor:
        logits = self.network(batch)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        return token_weighted_mean(losses, len(batch.label))


class Seen(Callback):
    """The labels and dense features of each batch as the hooks see them, and as the step does."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Batch, batch_idx: int) -> None:
        self.batches.append(batch.dense.clone())

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        assert torch.equal(batch.dense, self.batches[-1]), "another batch was trained than the hook before saw"


def under(plan: Any, module: Any = None, **options: Any) -> dict[str, Any]:
    callbacks = options.pop("callbacks", [])
    seen, logger = Seen(), Memory()
    module = Clicks(Mixed) if module is None else module
    data = options.pop("data", None) or loader(28)  # the last batch is a short one
    used = fit(module, recsys(plan, KINDS, **options), data, callbacks=[seen, *callbacks], logger=logger)
    strategy: Any = used.strategy
    report = strategy.balance_report if "balancer" in options else None
    return {
        "state": state_of(used),
        "losses": module.losses,
        "lines": logger.lines,
        "seen": seen.batches,
        "report": report,
    }


def plans(rank: int, world_size: int) -> dict[str, Any]:
    serial = under("serial", balancer=True)
    found: dict[str, Any] = {"evener": serial["report"].mean_after < serial["report"].mean_before}
    configs: dict[str, Any] = {
        "base": True,
        "threaded_input": BatchBalancer(),
        "prefetch": {"class_path": "lightning_pipe.recsys.BatchBalancer", "init_args": {"exchange": "all_gather"}},
        "in yaml": {},
    }
    for name, balancer in configs.items():
        plan: Any = recsys_plan("base", recsys_tasks()) if name == "in yaml" else name
        other = under(plan, balancer=balancer)
        found[name] = {
            "state": difference(serial["state"], other["state"]),
            "losses": serial["losses"] == other["losses"],
            "lines": serial["lines"] == other["lines"],
            "seen": all(map(torch.equal, serial["seen"], other["seen"])),
            "report": serial["report"] == other["report"],
        }
    return found


def test_every_plan_with_a_balancer_trains_as_the_serial_one_to_the_bit() -> None:
    for found in run_ranks(plans, 2):
        assert found.pop("evener")
        for plan, same in found.items():
            assert same == {"state": [], "losses": True, "lines": True, "seen": True, "report": True}, plan


def in_the_mean(rank: int, world_size: int) -> dict[str, Any]:
    def sgd(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.5)  # the tables' rate

    data = loader(4 * 4 * world_size + 3, in_order=True)

    def train(**options: Any) -> dict[str, Any]:
        return under("prefetch", Weighted(optimizers=sgd), optimizer=SGD, data=data, **options)

    # The unsharded module, on the unbalanced batches; its optimiser has no state.
    expected = Reference.of(lambda: state_of(fit(Weighted(optimizers=sgd), "ddp", data)))
    balanced, without = train(balancer=True), train()
    return {
        "differences": [expected.differences(one["state"]) for one in (balanced, without)],
        "moved": balanced["losses"] != without["losses"],
    }


def test_training_is_that_of_the_unbalanced_batches() -> None:
    assert run_ranks(in_the_mean, 2) == [{"differences": [[], []], "moved": True}] * 2


def bad_batch(rank: int, world_size: int) -> str:
    def workload(batch: Batch) -> Tensor:
        return torch.full_like(batch.label, -1.0 if rank else 1.0)

    try:
        under("prefetch", balancer={"workload": workload})
    except Exception as error:
        return str(error)
    return "no error"


def test_a_bad_workload_on_one_rank_ends_training_on_all() -> None:
    for text in run_ranks(bad_batch, 2):
        assert "sample 0 of rank 1 has the workload -1.0" in text


def test_what_is_no_balancer_is_said_when_the_strategy_is_made() -> None:
    with pytest.raises(SetupError, match="exchange is 'none'"):
        recsys(balancer={"exchange": "none"})


def test_without_a_balancer_there_is_no_report() -> None:
    assert recsys().balance_report is None
