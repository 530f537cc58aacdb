"""Clipping by the norm of all gradients, against Lightning's on the unsharded module."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.kernels.table_optimizer import SparseOptimizerConfig
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    ADAGRAD,
    ROW_WISE_ADAGRAD,
    SGD,
    Clicks,
    Pooled,
    Processed,
    Sequenced,
    adam,
    difference,
    fit,
    loader,
    recsys,
    state_of,
)

# Below the norms of every step but a few.
CLIP = 0.05


class Joint(torch.optim.Optimizer):
    """Two optimizers as one, which is all that automatic optimization takes."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__(
            [parameter for part in parts for group in part.param_groups for parameter in group["params"]], {}
        )

    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return result


def joint(tables: dict[str, Any]) -> Callable[[Clicks], Joint]:
    """Adam for the dense parameters, and for tables what their kernels do."""

    def configure(module: Clicks) -> Joint:
        chosen = SparseOptimizerConfig.from_config(tables)
        return Joint(adam(module), chosen.optimizer_class(module.table_parameters(), **chosen.arguments))

    return configure


class Norms(pl.Callback):
    """Norms before clipping, of the unsharded module."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))


def unsharded(
    network: Callable[[], nn.Module], optimizer: dict[str, Any], batch_size: int, kind: type[Clicks] = Clicks
) -> Reference:
    """What Lightning's own loop trains; more than half of the gradients on the way are clipped."""

    def run() -> dict[str, Tensor]:
        norms = Norms()
        module = kind(network, optimizers=joint(optimizer))
        clip = CLIP if kind is Clicks else None  # the others clip in hooks of their own
        used = fit(module, "auto", loader(batch_size=batch_size), gradient_clip_val=clip, callbacks=[norms])
        assert sum(norm > CLIP for norm in norms.norms) > len(norms.norms) / 2
        return own(state_of(used))

    return Reference.of(run)


def own(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values without the states of optimizers, whose names differ."""
    return {name: value for name, value in state.items() if " " not in name}


# Without dropout and statistics of the batch, which differ between one process and several.
TRAININGS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, str]]] = {
    "SGD": (Pooled, SGD, {"people": "table_wise", "things": "table_wise"}),
    "Adagrad": (Pooled, ADAGRAD, {"people": "column_wise", "things": "data_parallel"}),
    "row-wise Adagrad": (Pooled, ROW_WISE_ADAGRAD, {"people": "row_wise", "things": "row_wise"}),
    "sequences": (Sequenced, ROW_WISE_ADAGRAD, {"past": "row_wise", "people": "table_wise"}),
}


@pytest.mark.parametrize("name", ["row-wise Adagrad"])
def test_one_process_trains_as_lightning_trains_the_unsharded_module(name: str) -> None:
    network, optimizer, kinds = TRAININGS[name]
    reference = unsharded(network, optimizer, 4)
    used = fit(Clicks(network), recsys("prefetch", kinds, optimizer), gradient_clip_val=CLIP)
    assert reference.differences(state_of(used)) == []
    unclipped = fit(Clicks(network), recsys("prefetch", kinds, optimizer))
    assert len(reference.differences(state_of(unclipped))) == len(reference.values)


OF_TWO_RANKS = ("Adagrad", "sequences")


def two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """States after each training."""
    found: dict[str, Any] = {}
    for name in OF_TWO_RANKS:
        network, optimizer, kinds = TRAININGS[name]
        module = Clicks(network)
        strategy = recsys("prefetch", kinds, optimizer)
        found[name] = state_of(fit(module, strategy, loader(in_order=True), gradient_clip_val=CLIP))
    return found


@pytest.fixture(scope="module")
def trained_by_two() -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2)


@pytest.mark.parametrize("name", OF_TWO_RANKS)
def test_two_ranks_train_as_lightning_trains_the_unsharded_module(name: str, trained_by_two: Any) -> None:
    network, optimizer, _ = TRAININGS[name]
    reference = unsharded(network, optimizer, 8)
    for rank in trained_by_two:
        assert reference.differences(rank[name]) == []


# ---------------------------------------------------------------------- users' own clipping


class OwnClipping(Clicks):
    """Calls Lightning's clip_gradients with a norm of its own."""

    algorithm = "norm"

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm=self.algorithm)


class Tighter(OwnClipping):
    """A second clipping sees what the first one left."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=2 * CLIP, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")


def trained(module: Clicks, **options: Any) -> dict[str, Tensor]:
    return state_of(fit(module, recsys("prefetch", optimizer=ADAGRAD), **options))


def test_a_module_that_clips_in_its_own_hook_clips_the_tables_too() -> None:
    assert not difference(trained(OwnClipping(Pooled)), trained(Clicks(Pooled), gradient_clip_val=CLIP))


def test_gradients_clipped_twice_are_clipped_as_lightning_clips_them_twice() -> None:
    assert unsharded(Pooled, ADAGRAD, 4, Tighter).differences(trained(Tighter(Pooled))) == []


class NoLoss(Clicks):
    """Every second batch is not trained."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else None


def test_a_batch_without_a_loss_is_not_clipped_and_changes_no_table() -> None:
    module = NoLoss(Pooled)
    tables: list[Tensor] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            tables.append(trainer.strategy.sharded_model.full_table("people"))  # type: ignore[attr-defined]

    fit(module, recsys("prefetch"), gradient_clip_val=CLIP, callbacks=[Watch()], max_epochs=1)
    assert [torch.equal(*pair) for pair in pairwise(tables)] == [False, True, False, True, False]


# ---------------------------------------------------------------------- the plugin, and what is refused


def test_the_precision_plugin_is_as_before_after_training_and_after_a_failure() -> None:
    used = fit(Clicks(Pooled), recsys("prefetch"), gradient_clip_val=CLIP)
    assert not {"clip_grad_by_norm", "clip_grad_by_value"} & set(vars(used.precision_plugin))

    class Fails(Clicks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("no more")
            return super().training_step(batch, batch_idx)

    strategy = recsys("prefetch")
    with pytest.raises(RuntimeError, match="no more"):
        fit(Fails(Pooled), strategy, gradient_clip_val=CLIP)
    assert not {"clip_grad_by_norm", "clip_grad_by_value"} & set(vars(strategy.precision_plugin))


def test_clipping_by_value_is_refused() -> None:
    with pytest.raises(SetupError, match="Set it to 'norm'"):
        fit(Clicks(Pooled), recsys(), gradient_clip_val=CLIP, gradient_clip_algorithm="value")


def test_clipping_accumulated_gradients_is_refused() -> None:
    with pytest.raises(SetupError, match="accumulate_grad_batches is 2"):
        fit(Clicks(Pooled), recsys(), gradient_clip_val=CLIP, accumulate_grad_batches=2)
    schedule = GradientAccumulationScheduler({1: 4})
    with pytest.raises(SetupError, match="accumulate_grad_batches is 4"):
        fit(Clicks(Pooled), recsys(), gradient_clip_val=CLIP, callbacks=[schedule])


def test_clipping_with_feature_processors_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match=r"'network\.bags' is a ShardedFeatureProcessed"):
        fit(Clicks(Processed), recsys(), gradient_clip_val=CLIP)
