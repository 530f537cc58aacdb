"""Plans that look batches up ahead of their turn, under a Trainer: learning rates, ends, and what goes between."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_pipe.engine import PlanError
from lightning_pipe.recsys import TrainPipeline, shard_model
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from tests.distributed import run_ranks
from tests.strategies.cases import (
    ROW_WISE_ADAGRAD,
    SGD,
    Clicks,
    Pooled,
    Processed,
    Sequenced,
    difference,
    fit,
    loader,
    recsys,
    state_of,
)

CPU = torch.device("cpu")
ROWS = 48  # twelve batches on one rank
KINDS = {"people": "row_wise", "things": "table_wise", "past": "row_wise"}


def falling(module: Clicks) -> Any:
    """The rate falls with every batch, and the tables' with it."""
    optimizer = torch.optim.Adam(module.dense_parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def data() -> Any:
    return loader(ROWS * world_size(), in_order=True)


def kinds_of(network: Any) -> dict[str, str]:
    return {name: KINDS[name] for name in (("people", "things") if network is Pooled else ("people", "past"))}


class Seen(Clicks):
    """Notes the first dense number of each batch it trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(float(batch.dense[0, 0]))
        return super().training_step(batch, batch_idx)


# ---------------------------------------------------------------------- exact

OPTIONS: dict[str, dict[str, Any]] = {
    "a schedule of the tables": {
        "sparse_lr_scheduler": {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.8}}
    },
    "accumulation": {"accumulate_grad_batches": 3},
    "validation in between": {"val_check_interval": 5},
}


def under(plan: str, network: Any, optimizer: Any, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    options = dict(options)
    of_strategy = {name: options.pop(name) for name in ("sparse_lr_scheduler",) if name in options}
    module = Clicks(network, optimizers=falling)
    val = data() if "val_check_interval" in options else None
    used = fit(module, recsys(plan, kinds_of(network), optimizer, **of_strategy), data(), val, **options)
    return module.losses, state_of(used)


NETWORKS = {Pooled: ROW_WISE_ADAGRAD, Sequenced: SGD}
# One network for each option.
CASES = [(name, [*NETWORKS][place % 2]) for place, name in enumerate(OPTIONS)]


def exact(rank: int, world: int) -> dict[str, bool]:
    found = {}
    for name, network in CASES:
        plans = ("serial", "fused_sparse_dist")
        serial, ahead = (under(plan, network, NETWORKS[network], OPTIONS[name]) for plan in plans)
        same = serial[0] == ahead[0] and not difference(serial[1], ahead[1])
        found[f"{name}, {network.__name__}"] = same and len(serial[0]) == 24
    return found


def test_lookups_ahead_train_the_same_under_schedules_clipping_accumulation_and_validation() -> None:
    for found in run_ranks(exact, 2):
        assert [what for what, is_true in found.items() if not is_true] == []


def test_feature_processors_which_lookups_read_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'semi_sync' looks up batches ahead.*dense_parameters.*Use the plan"):
        fit(Clicks(Processed), recsys("semi_sync"))


# ---------------------------------------------------------------------- one batch stale


def in_train_pipeline(
    network: Any, optimizer: Any, stops: tuple[int, ...] = ()
) -> tuple[list[float], dict[str, Tensor]]:
    """Two epochs of ``falling`` in the train pipeline, which the tests of recsys compare with a loop.

    Args:
        network: see Clicks.
        optimizer: of the tables.
        stops: after how many batches the pipeline is closed and another goes on: the next batch is looked up afresh.
    """
    module = Clicks(network, optimizers=falling)
    group = dist.group.WORLD
    assert group is not None
    constraints = {name: {"sharding_types": [kind], "min_partition": 4} for name, kind in kinds_of(network).items()}
    sharded = shard_model(module, device=CPU, group=group, sparse_optimizer=optimizer, constraints=constraints)
    dense = torch.optim.Adam([parameter for _, parameter in sharded.dense_parameters()], lr=0.05)

    def forward(batch: Any) -> Any:
        loss = module.loss_of(batch)
        return loss, loss.item()

    def pipeline_of() -> TrainPipeline:
        return TrainPipeline(
            sharded, dense, CPU, "semi_sync", custom_model_fwd=forward, options={"rewrite": {"method": "direct"}}
        )

    pipeline = pipeline_of()
    losses: list[float] = []
    for epoch in range(2):
        batches = list(data())
        feed = iter(batches)
        while True:
            try:
                losses.append(pipeline.progress(feed))
            except StopIteration:
                break
            trained = len(losses)
            sharded.set_learning_rate_factor(0.9**trained)
            dense.param_groups[0]["lr"] = 0.05 * 0.9**trained
            if trained in stops:
                pipeline.close()
                pipeline = pipeline_of()
                feed = iter(batches[trained - epoch * len(batches) :])
    pipeline.close()
    found = {name: sharded.full_table(name) for name in sharded.tables}
    return losses, {**found, **{name: value.detach().clone() for name, value in sharded.dense_parameters()}}


def in_trainer(network: Any, optimizer: Any, **options: Any) -> tuple[list[float], dict[str, Tensor], pl.Trainer]:
    module = Clicks(network, optimizers=falling)
    strategy = recsys("semi_sync", kinds_of(network), optimizer, rewrite={"method": "direct"})
    used = fit(module, strategy, data(), options.pop("val", None), **options)
    return module.losses, state_of(used), used


def same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return ours[0] == theirs[0] and not difference({name: ours[1][name] for name in theirs[1]}, theirs[1])


def stale(rank: int, world: int) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for network, optimizer in ((Pooled, ROW_WISE_ADAGRAD), (Sequenced, SGD)):
        expected = in_train_pipeline(network, optimizer)
        plain = in_trainer(network, optimizer)
        validated = in_trainer(network, optimizer, val=data(), val_check_interval=5)
        serial = under("serial", network, optimizer, {})
        found |= {
            f"{network.__name__}, all trained": len(plain[0]) == 24,
            f"{network.__name__}, as the train pipeline": same(plain, expected),
            f"{network.__name__}, validation changes nothing": same(validated, expected),
            f"{network.__name__}, stale": not same(plain, serial),
        }
    return found


def test_stale_lookups_train_under_a_trainer_as_in_the_train_pipeline() -> None:
    for found in run_ranks(stale, 2):
        assert [what for what, is_true in found.items() if not is_true] == []


def counts(used: pl.Trainer) -> list[int]:
    modules = used.strategy.sharded_model.sharded_modules.values()  # type: ignore[attr-defined]
    return [int(kernel.iter.item()) for module in modules for kernel in find_fused_kernels(module)]


class Stop(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.after


class SkipRest(Seen):
    """Of the first epoch, after four batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 4 else None


@pytest.mark.parametrize("plan", ["fused_sparse_dist", "semi_sync"])
def test_batches_looked_up_and_not_trained_are_not_counted_by_the_optimizers_of_tables(plan: str) -> None:
    modules = [SkipRest(Pooled, optimizers=falling) for _ in range(2)]
    runs = [
        fit(module, recsys(which, None, ROW_WISE_ADAGRAD, rewrite={"method": "direct"}), data(), max_epochs=2)
        for module, which in zip(modules, ("serial", plan), strict=True)
    ]
    assert modules[0].seen == modules[1].seen
    assert len(modules[0].seen) == 4 + 12
    assert counts(runs[0]) == counts(runs[1])
    if plan == "fused_sparse_dist":
        assert difference(state_of(runs[0]), state_of(runs[1])) == []


@cache
def whole() -> tuple[list[float], list[float]]:
    """The batches and the losses of a stale run that is not stopped."""
    module = Seen(Pooled, optimizers=falling)
    plan = recsys("semi_sync", kinds_of(Pooled), ROW_WISE_ADAGRAD, rewrite={"method": "direct"})
    fit(module, plan, data())
    return module.seen, module.losses


# In mid-epoch and at the end of an epoch.
@pytest.mark.parametrize("stop", [5, 12])
def test_a_stale_run_taken_up_from_a_checkpoint_looks_its_first_batch_up_afresh(stop: int, tmp_path: Path) -> None:
    new = partial(Seen, Pooled, optimizers=falling)
    plan = partial(recsys, "semi_sync", kinds_of(Pooled), ROW_WISE_ADAGRAD, rewrite={"method": "direct"})
    saver = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=stop, save_top_k=0)
    first, second = new(), new()
    fit(first, plan(), data(), callbacks=[saver, Stop(stop)], enable_checkpointing=True, min_epochs=0)
    used = fit(second, plan(), data(), ckpt_path=tmp_path / "last.ckpt")
    seen, losses = whole()
    assert first.seen + second.seen == seen
    # Where an epoch ends, nothing is in flight: the next batch is looked up afresh in any case.
    assert (first.losses + second.losses == losses) == (stop == 12)
    expected = in_train_pipeline_alone(stop)
    assert same((first.losses + second.losses, state_of(used)), expected)


def in_train_pipeline_alone(stop: int) -> tuple[list[float], dict[str, Tensor]]:
    (found,) = run_ranks(_alone, 1, stop)
    return found


def _alone(rank: int, world: int, stop: int) -> tuple[list[float], dict[str, Tensor]]:
    return in_train_pipeline(Pooled, ROW_WISE_ADAGRAD, (stop,))
