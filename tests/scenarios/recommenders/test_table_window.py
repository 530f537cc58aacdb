"""``accumulate_tables="window"``: tables step once for all micro-batches, as Lightning steps an unsharded module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.rewrite.table_window import TableGradientAccumulator
from lightning_pipe.recsys.sharding.shard_model import shard_model
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.scenarios.recommenders.test_dynamic_embeddings import run as run_dynamic
from tests.scenarios.recommenders.test_gradient_clipping import CLIP, TRAININGS, joint, own
from tests.scenarios.recommenders.test_half_precision import Fragile, half
from tests.scenarios.recommenders.test_managed_collision import Small, rows_of_ids
from tests.strategies.cases import (
    ADAGRAD,
    ROW_WISE_ADAGRAD,
    SGD,
    Batch,
    Clicks,
    Managed,
    Mixed,
    Pooled,
    Processed,
    Sequenced,
    difference,
    fit,
    loader,
    outcome,
    recsys,
    state_of,
)

# An epoch of six batches ends within a window of four.
FOUR: dict[str, Any] = {"accumulate_grad_batches": 4}


def windowed(plan: str = "prefetch", kinds: Any = None, optimizer: Any = ADAGRAD, **options: Any) -> Any:
    return recsys(plan, kinds, optimizer, accumulate_tables="window", **options)


def unsharded(
    network: Callable[[], nn.Module],
    optimizer: dict[str, Any],
    batch_size: int = 4,
    kind: Callable[..., Clicks] = Clicks,
    **options: Any,
) -> Reference:
    """What Lightning's own loop trains."""

    def run() -> dict[str, Tensor]:
        module = kind(network, optimizers=joint(optimizer))
        return own(state_of(fit(module, "auto", loader(batch_size=batch_size), **options)))

    return Reference.of(run)


# ---------------------------------------------------------------------- against Lightning


@pytest.mark.parametrize(("name", "clip"), [("Adagrad", CLIP), ("sequences", None)])
def test_one_process_trains_as_lightning_trains_the_unsharded_module(name: str, clip: float | None) -> None:
    network, optimizer, kinds = TRAININGS[name]
    reference = unsharded(network, optimizer, gradient_clip_val=clip, **FOUR)
    used = fit(Clicks(network), windowed("prefetch", kinds, optimizer), gradient_clip_val=clip, **FOUR)
    assert reference.differences(own(state_of(used))) == []


# Names of trainings, and their clipping.
OF_TWO_RANKS = [("row-wise Adagrad", CLIP), ("sequences", None)]


def two_ranks(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, clip in OF_TWO_RANKS:
        network, optimizer, kinds = TRAININGS[name]
        module = Clicks(network)
        used = fit(
            module,
            windowed("prefetch", kinds, optimizer),
            loader(batch_size=2, in_order=True),
            gradient_clip_val=clip,
            accumulate_grad_batches=2,
        )
        found[f"{name} {clip}"] = state_of(used)
    return found


def test_two_ranks_train_as_one_process_with_batches_of_the_size_of_a_window() -> None:
    trained = run_ranks(two_ranks, 2)
    for name, clip in OF_TWO_RANKS:
        network, optimizer, _ = TRAININGS[name]
        # Two micro-batches of two rows on each of two ranks. The rows of a step are the same, in another order.
        reference = unsharded(network, optimizer, 8, gradient_clip_val=clip)
        for rank in trained:
            assert reference.differences(own(rank[f"{name} {clip}"])) == []


class WithoutLoss(Clicks):
    """Its step returns None for some batches: within a window, and for the last of one."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if (self.current_epoch, batch_idx) in ((0, 1), (1, 3)) else loss


class Skips(Clicks):
    """Leaves out the rest of the first epoch within a window."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (0, 2) else None


@pytest.mark.parametrize("kind", [WithoutLoss, Skips])
def test_batches_without_a_loss_and_unfinished_windows_count_as_for_dense_parameters(kind: type[Clicks]) -> None:
    reference = unsharded(Pooled, SGD, kind=kind, **FOUR)
    used = fit(kind(Pooled), windowed(optimizer=SGD), **FOUR)
    assert reference.differences(own(state_of(used))) == []


class FragileInFloat(Fragile):
    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(batch)


class Overflows(Clicks):
    """The gradients of tables, and of them alone, overflow in one micro-batch."""

    def __init__(self, overflow: int, **options: Any) -> None:
        super().__init__(FragileInFloat, **options)
        self.overflow = overflow

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        assert isinstance(self.network, Fragile)
        self.network.breaks = batch_idx == self.overflow
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("overflow", [2, 3], ids=["first of a window", "last of a window"])
@pytest.mark.parametrize("clip", [None, CLIP])
def test_an_overflow_in_a_micro_batch_skips_the_step_of_the_window(overflow: int, clip: float | None) -> None:
    options: dict[str, Any] = {"gradient_clip_val": clip, "max_epochs": 1, "accumulate_grad_batches": 2}

    def run() -> dict[str, Tensor]:
        module = Overflows(overflow, optimizers=joint(SGD))
        return own(state_of(fit(module, "auto", loader(), plugins=[half()], **options)))

    reference = Reference.of(run)
    used = fit(Overflows(overflow), windowed(optimizer=SGD), plugins=[half()], **options)
    assert reference.differences(own(state_of(used))) == []


# ---------------------------------------------------------------------- plans and other features

SETTINGS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "weights, dropout and normalization": (Mixed, {}, {}),
    "clipping": (Sequenced, {"optimizer": ROW_WISE_ADAGRAD}, {"gradient_clip_val": CLIP}),
    "balancing": (Pooled, {"balancer": True}, {}),
    "managed collision, clipping": (Managed, {"optimizer": ROW_WISE_ADAGRAD}, {"gradient_clip_val": CLIP}),
    "bf16": (Pooled, {"quantized_comms": {"forward": "bf16", "backward": "bf16"}}, {"precision": "bf16-mixed"}),
}


def under_plans(rank: int, world: int, plans: Sequence[str], settings: dict[str, Any]) -> dict[str, list[str]]:
    """For each setting and plan: differences from the serial plan."""
    found = {}
    for name, (network, strategy, options) in settings.items():
        serial: Any = None
        for plan in ("serial", *plans):
            if network is Managed and plan == "fused_sparse_dist":
                continue
            module = Clicks(network)
            trained = outcome(module, fit(module, windowed(plan, **strategy), loader(24 * world), **FOUR, **options))
            losses = trained.pop("losses")
            if serial is None:
                serial, first = trained, losses
            found[f"{name}, {plan}"] = difference(serial, trained) + ([] if losses == first else ["losses"])
    return found


def test_plans_train_the_same() -> None:
    for found in run_ranks(under_plans, 2, ("threaded_input", "fused_sparse_dist"), SETTINGS):
        assert {name: what for name, what in found.items() if what} == {}


def test_dynamic_tables_step_once_and_keep_their_rows_for_it(tmp_path: Path) -> None:
    def run(name: str, plan: str, window: bool, **options: Any) -> Any:
        extra = {"accumulate_tables": "window"} if window else {}
        return run_dynamic(tmp_path / name, plan, strategy=extra, train=loader(shuffle=False), **options)

    one_batch = run_dynamic(tmp_path / "one", "serial", train=loader(batch_size=8, shuffle=False))[1]
    serial = run("serial", "serial", True, accumulate_grad_batches=2)
    piped = run("piped", "early_prefetch", True, accumulate_grad_batches=2)
    assert serial[0] == piped[0]
    assert rows_differ(serial[1], piped[1], 0.0) == []
    assert rows_differ(serial[1], one_batch, 1e-6) == []
    each = run("each", "serial", False, accumulate_grad_batches=2)
    assert rows_differ(each[1], one_batch, 1e-6) != []


def rows_differ(one: Any, other: Any, within: float, name: str = "") -> list[str]:
    """Names of values that differ by more than *within*, in nested mappings."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"keys of {name}"]
        return [line for key in one for line in rows_differ(one[key], other[key], within, f"{name}.{key}")]
    if isinstance(one, (list, tuple)):
        return rows_differ(dict(enumerate(one)), dict(enumerate(other)), within, name)
    if not isinstance(one, Tensor):
        return [] if one == other else [name]
    if not one.is_floating_point():
        return []  # counts of batches
    return [] if torch.allclose(one.double(), other.double(), rtol=0.0, atol=within) else [name]


def test_rows_that_are_evicted_within_a_window_lose_their_gradients(one_rank: Any) -> None:
    model = Small()
    sharded = shard_model(model, device=torch.device("cpu"), group=one_rank, sparse_optimizer=SGD)
    rewrite = ModelRewrite(sharded.module, split_backward=True)
    window = TableGradientAccumulator(rewrite.sharded_modules)
    batches = [
        KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([2, 1])) for ids in ([1, 2, 3], [4, 5, 5])
    ]
    for number, features in enumerate(batches):  # 4 and 5 take the rows of two ids of the first batch
        with rewrite.recording(features) as embeddings:
            output = model.bags(features)[0].values()
        output.sum().backward()
        rewrite.tables_backward.run_to_kernels(embeddings)
        if number == 0:
            window.add(embeddings)
            rewrite.tables_backward.discard(embeddings)
        else:
            window.complete(embeddings)
            rewrite.run_embedding_backward(embeddings)
    rewrite.restore()
    # Half the gradient of its bags: 1 over the length of the bag.
    expected = {1: 0.25, 2: 0.25, 3: 0.5, 4: 0.25, 5: 0.75}
    after = rows_of_ids(sharded)["few"]
    assert {4, 5} < after.keys()
    for number, (row,) in after.items():
        assert torch.allclose(1 - row, torch.full((4,), expected[number]), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- checkpoints and refusals


class Saves(pl.Callback):
    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)


def test_a_run_continues_from_the_end_of_a_window(tmp_path: Path) -> None:
    path, options = tmp_path / "one.ckpt", {"accumulate_grad_batches": 2}
    whole = fit(Clicks(Mixed), windowed(), loader(shuffle=True), callbacks=[Saves(path, 4)], **options)
    rest = fit(Clicks(Mixed), windowed(), loader(shuffle=True), ckpt_path=path, **options)
    assert difference(state_of(whole), state_of(rest)) == []


def test_what_cannot_step_once_is_refused() -> None:
    with pytest.raises(SetupError, match=r"ShardedFeatureProcessed.*which trains dense weights together"):
        fit(Clicks(Processed), windowed(), **FOUR)
    with pytest.raises(SetupError, match="accumulate_tables is 'epoch'; expected one of 'micro_batch', 'window'"):
        recsys(accumulate_tables="epoch")
    fit(Clicks(Processed), windowed(), max_epochs=1)  # nothing is accumulated
