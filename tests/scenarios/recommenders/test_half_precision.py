"""Loss scaling ("16-mixed"): tables are unscaled, and skip a step together with the dense parameters, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.scenarios.recommenders.test_gradient_clipping import CLIP, joint, own
from tests.strategies.cases import (
    ADAGRAD,
    ROW_WISE_ADAGRAD,
    SGD,
    Batch,
    Clicks,
    Mixed,
    Pooled,
    Processed,
    difference,
    fit,
    loader,
    recsys,
    state_of,
)

SCALE = 2.0**10
ROW_WISE = {"people": "row_wise", "things": "row_wise"}
EVERY_KIND = {"people": "column_wise", "things": "row_wise", "tags": "data_parallel"}


def half(**options: Any) -> MixedPrecision:
    """Lightning turns "16-mixed" on a CPU into bf16, unless it is given the plugin."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE, **options))


class InFloat(Pooled):
    """Leaves autocast, as a model may: losses are scaled, and nothing is rounded to half precision.

    In half precision, another result in the last place of a table moves a value to the next half now and then, so no
    bound from float32 holds; and a bound from halves would not show a learning rate that is off by 5 %.
    """

    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(batch)


def unsharded(optimizer: dict[str, Any], clip: float | None) -> dict[str, Tensor]:
    """What Lightning trains by itself with the same scale."""
    module = Clicks(InFloat, optimizers=joint(optimizer))
    used = fit(module, "auto", loader(), plugins=[half()], gradient_clip_val=clip, max_epochs=1)
    return own(state_of(used))


@pytest.mark.parametrize(("clip", "optimizer"), [(None, ADAGRAD), (CLIP, ROW_WISE_ADAGRAD)])
def test_one_process_trains_as_lightning_trains_the_unsharded_module(optimizer: Any, clip: float | None) -> None:
    reference = Reference.of(lambda: unsharded(optimizer, clip))
    strategy = recsys("prefetch", ROW_WISE, optimizer)
    used = fit(Clicks(InFloat), strategy, plugins=[half()], gradient_clip_val=clip, max_epochs=1)
    assert reference.differences(own(state_of(used))) == []


class Infinite(torch.autograd.Function):
    """Identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, torch.inf)


class Fragile(Mixed):
    """Without what differs between ranks; on request the gradients of the embeddings alone are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks = False

    def forward(self, batch: Any) -> Tensor:
        bags, tags = self.bags(batch.sparse).values(), self.weighted(batch.tags)["tag"]
        logits: Tensor = self.over(torch.cat([batch.dense, Infinite.apply(bags) if self.breaks else bags, tags], dim=1))
        return logits[:, 0]


class Overflows(Clicks):
    """The third batch's gradients are infinite on the last rank: all of them, or those of the embeddings alone, or that
    of one dense parameter alone."""

    def __init__(self, where: str) -> None:
        super().__init__(Fragile)
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        due = batch_idx == 2 and self.global_rank == self.trainer.world_size - 1
        assert isinstance(self.network, Fragile)
        self.network.breaks = due and self.where == "tables"
        loss = super().training_step(batch, batch_idx)
        if due and self.where == "dense":
            loss = loss + 0 * Infinite.apply(next(iter(self.network.over.parameters()))).sum()
        return loss * torch.inf if due and self.where == "loss" else loss


@dataclass
class Record:
    """What was there after every batch: everything trained, the loss scale, the kernels' step counts."""

    states: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)


class Recorder(pl.Callback):
    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.record.states.append(state_of(trainer))
        self.record.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]
        sharded = trainer.strategy.sharded_model  # type: ignore[attr-defined]
        kernels = [kernel for module in sharded.sharded_modules.values() for kernel in find_fused_kernels(module)]
        counts = [(int(kernel.iter), int(kernel.iter_cpu)) for kernel in kernels]
        self.record.counts.append([count for both in counts for count in both])


def overflown(where: str, plan: str, clip: float | None) -> Record:
    record = Record()
    module = Overflows(where)
    strategy = recsys(plan, EVERY_KIND, ROW_WISE_ADAGRAD)
    fit(module, strategy, plugins=[half()], gradient_clip_val=clip, callbacks=[Recorder(record)], max_epochs=1)
    return record


def check_skip(record: Record) -> None:
    """The third batch of six, or of three, changes nothing but the scale; all others train."""
    same = [not difference(one, other) for one, other in pairwise(record.states)]
    assert same == [index == 1 for index in range(len(same))]
    assert record.scales[:2] == [SCALE, SCALE]
    assert set(record.scales[2:]) == {SCALE / 2}
    counts = [sum(one) for one in record.counts]
    steps = [later - earlier for earlier, later in pairwise(counts)]
    assert steps[1] == 0 < steps[0]
    assert len({step for index, step in enumerate(steps) if index != 1}) == 1
    assert all(value.isfinite().all() for value in record.states[-1].values())


class LossOfSomeRanks(Clicks):
    """The first rank has no loss in the first batch, and no rank has one in the second."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 or self.global_rank == batch_idx == 0 else loss


def two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """By where it overflows (on rank 1 alone) and clipping; and what is left where a rank has no loss."""
    records: dict[str, Any] = {
        f"{where} {clip}": overflown(where, "prefetch", clip)
        for where, clip in (("loss", None), ("tables", None), ("dense", None), ("tables", CLIP))
    }
    for precision in ("16-mixed", "32-true"):
        options: dict[str, Any] = {"plugins": [half()]} if precision == "16-mixed" else {}
        module = LossOfSomeRanks(InFloat)
        records[f"no loss {precision}"] = state_of(
            fit(module, recsys("prefetch", ROW_WISE, SGD), loader(in_order=True), gradient_clip_val=CLIP, **options)
        )
    return records


@pytest.fixture(scope="module")
def by_two() -> list[dict[str, Record]]:
    return run_ranks(two_ranks, 2)


@pytest.mark.parametrize("name", ["loss None", "tables None", "dense None", f"tables {CLIP}"])
def test_all_ranks_skip_a_batch_that_overflows_on_one(name: str, by_two: Any) -> None:
    for rank in by_two:
        check_skip(rank[name])
    first, second = (rank[name].states[-1] for rank in by_two)
    assert not difference(first, second)


def test_a_rank_without_a_loss_steps_with_the_others(by_two: Any) -> None:
    first, second = (rank["no loss 16-mixed"] for rank in by_two)
    assert not difference(first, second)
    # The scale is a power of two, by which nothing is rounded.
    assert not difference(first, by_two[0]["no loss 32-true"])


class SkipsSteps(Clicks):
    """Steps its optimizer every second batch, in a hook of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


def test_tables_are_unscaled_in_a_batch_whose_optimizer_step_a_hook_leaves_out() -> None:
    strategy = recsys("prefetch", ROW_WISE, SGD)
    used = fit(SkipsSteps(InFloat), strategy, plugins=[half()], max_epochs=1)
    without = fit(SkipsSteps(InFloat), recsys("prefetch", ROW_WISE, SGD), max_epochs=1)
    assert not difference(state_of(used), state_of(without))


# ---------------------------------------------------------------------- what is refused


def test_accumulation_is_refused() -> None:
    with pytest.raises(SetupError, match="'16-mixed' and accumulate_grad_batches is 2"):
        fit(Clicks(Pooled), recsys(), plugins=[half()], accumulate_grad_batches=2)
    with pytest.raises(SetupError, match="'16-mixed' and accumulate_grad_batches is 4"):
        fit(Clicks(Pooled), recsys(), plugins=[half()], callbacks=[GradientAccumulationScheduler({1: 4})])


def test_feature_processors_are_refused_by_name() -> None:
    with pytest.raises(SetupError, match=r"'network\.bags' is a ShardedFeatureProcessed"):
        fit(Clicks(Processed), recsys(), plugins=[half()])


def test_an_optimizer_that_unscales_by_itself_skips_with_the_tables() -> None:
    record = Record()
    module = Overflows("tables")
    module.optimizers_of = lambda one: torch.optim.Adam(one.dense_parameters(), lr=0.05, fused=True)
    fit(
        module,
        recsys("prefetch", EVERY_KIND, ROW_WISE_ADAGRAD),
        plugins=[half()],
        callbacks=[Recorder(record)],
        max_epochs=1,
    )
    check_skip(record)
