"""Every plan trains the bits that the serial plan trains: each feature under the plans that may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pipe.loops import PipelineTrainingEpochLoop
from tests.distributed import run_ranks
from tests.scenarios.recommenders import test_dynamic_embeddings as dynamic
from tests.scenarios.recommenders.test_gradient_clipping import CLIP
from tests.scenarios.recommenders.test_half_precision import Overflows, half
from tests.strategies.cases import (
    ADAGRAD,
    PLANS,
    ROW_WISE_ADAGRAD,
    SGD,
    Clicks,
    Dlrm,
    Memory,
    Mixed,
    Pooled,
    Processed,
    Sequenced,
    difference,
    fit,
    loader,
    recsys,
    state_of,
)

KINDS = {"people": "row_wise", "things": "table_wise", "tags": "column_wise"}
BY_COLUMN = {"people": "column_wise", "things": "row_wise", "tags": "data_parallel"}
SEQUENCES = {"past": "table_wise", "people": "row_wise"}
HALF = {"forward": "bf16", "backward": "fp16", "backward_loss_scale": 1024.0}
BYTES = {"forward": "int8", "backward": "int8"}
DEPTHS = {"serial": 1, "base": 3, "threaded_input": 2, "prefetch": 3, "fused_sparse_dist": 3, "compute_ahead": 3}


@dataclass(frozen=True)
class Feature:
    """What is trained.

    Attributes:
        module: makes the module.
        plans: those that train it beside the serial one: the likeliest to differ.
        kinds: sharding type of each table; None leaves it to the planner.
        optimizer: of the tables.
        strategy: further arguments of the strategy.
        trainer: further arguments of the trainer.
        rows: of each rank.
    """

    module: Callable[[], Clicks]
    plans: tuple[str, ...]
    kinds: dict[str, str] | None = None
    optimizer: dict[str, Any] = field(default_factory=lambda: ROW_WISE_ADAGRAD)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict
    rows: int = 16


FEATURES = {
    "pooled": Feature(lambda: Clicks(Pooled), ("prefetch",), {"people": "row_wise", "things": "table_wise"}),
    "sequences": Feature(
        lambda: Clicks(Sequenced), ("fused_sparse_dist",), {"past": "row_wise", "people": "column_wise"}, ADAGRAD
    ),
    "several modules": Feature(
        lambda: Clicks(Mixed),
        tuple(plan for plan in PLANS if plan != "serial"),
        {"people": "table_row_wise", "things": "row_wise", "tags": "data_parallel"},
        ADAGRAD,
    ),
    # Their values are read in the lookup, which "fused_sparse_dist" has moved.
    "processed features": Feature(
        lambda: Clicks(Processed), ("prefetch",), {"people": "column_wise", "things": "row_wise"}, SGD
    ),
    "TorchRec's DLRM": Feature(lambda: Clicks(Dlrm), ("threaded_input",)),
    "16 bits on the wire": Feature(lambda: Clicks(Mixed), ("base",), KINDS, strategy={"quantized_comms": HALF}),
    "16 bits on the wire, clipped": Feature(
        lambda: Clicks(Sequenced),
        ("fused_sparse_dist",),
        SEQUENCES,
        strategy={"quantized_comms": HALF},
        trainer=lambda: {"gradient_clip_val": CLIP},
    ),
    "8 bits on the wire": Feature(
        lambda: Clicks(Mixed),
        ("prefetch",),
        {**KINDS, "people": "table_wise"},
        strategy={"quantized_comms": BYTES, "ids_on_wire": "int32"},
    ),
    "ids sent once": Feature(
        lambda: Clicks(Sequenced),
        ("base", "prefetch", "fused_sparse_dist"),
        {"past": "row_wise", "people": "column_wise"},
        ADAGRAD,
        strategy={"dedup": True},
    ),
    "ids sent once, in 16 bits, balanced, clipped": Feature(
        lambda: Clicks(Sequenced),
        ("prefetch",),
        SEQUENCES,
        strategy={"dedup": True, "quantized_comms": HALF, "balancer": True},
        trainer=lambda: {"gradient_clip_val": CLIP},
    ),
    "a scaled loss that overflows": Feature(
        lambda: Overflows("tables"),
        ("prefetch",),
        BY_COLUMN,
        trainer=lambda: {"plugins": [half()], "gradient_clip_val": CLIP},
    ),
    # The last batch is a short one.
    "balanced batches": Feature(lambda: Clicks(Mixed), ("prefetch",), KINDS, strategy={"balancer": True}, rows=14),
    "replicas of tables": Feature(lambda: Clicks(Pooled), ("fused_sparse_dist",), strategy={"replicas": 2}),
    "gradients of two batches in bf16": Feature(
        lambda: Clicks(Sequenced),
        ("fused_sparse_dist",),
        SEQUENCES,
        ADAGRAD,
        trainer=lambda: {"accumulate_grad_batches": 2, "precision": "bf16-mixed"},
    ),
}
DYNAMIC = "dynamic tables"
OF_DYNAMIC = ("fused_sparse_dist",)


class InFlight(Callback):
    """The most batches in flight."""

    most = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, PipelineTrainingEpochLoop)
        assert loop.ledger is not None
        self.most = max(self.most, loop.ledger.num_in_flight)


@dataclass
class Cell:
    """What a rank saw of a feature under a plan.

    Attributes:
        losses: of each batch.
        logged: lines.
        state: all that was trained.
        in_flight: the most batches in flight; None where it was not looked at.
        unchanged: names of parameters that training did not change.
    """

    losses: list[float]
    logged: Any
    state: dict[str, Any]
    in_flight: int | None = None
    unchanged: list[str] = field(default_factory=list)


def train(feature: Feature, plan: str, world_size: int) -> Cell:
    module, logger, in_flight = feature.module(), Memory(), InFlight()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    used = fit(
        module,
        recsys(plan, feature.kinds, feature.optimizer, **feature.strategy),
        loader(feature.rows * world_size),
        logger=logger,
        callbacks=[in_flight],
        **feature.trainer(),
    )
    state = state_of(used)
    unchanged = [name for name, value in before.items() if torch.equal(state[name], value)]
    return Cell(module.losses, logger.lines, state, in_flight.most, unchanged)


def train_dynamic(store: Path, plan: str, world_size: int) -> Cell:
    losses, state = dynamic.run(store, plan, train=loader(24 * world_size), module={"cache_rows": 48 * world_size})
    return Cell(losses, None, state)


def train_all(
    rank: int, world_size: int, folder: Path, cases: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Cell]:
    return {
        (name, plan): train_dynamic(folder / plan, plan, world_size)
        if name == DYNAMIC
        else train(FEATURES[name], plan, world_size)
        for name, plan in cases
    }


def plans_of(name: str) -> tuple[str, ...]:
    return OF_DYNAMIC if name == DYNAMIC else FEATURES[name].plans


# On four ranks one plan, with all kinds of sharding.
CELLS = {
    2: [(name, plan) for name in (*FEATURES, DYNAMIC) for plan in plans_of(name)],
    4: [("several modules", "prefetch")],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every rank saw, by number of ranks: each world is started once."""

    @cache
    def on(ranks: int) -> list[dict[tuple[str, str], Cell]]:
        cells = [(name, "serial") for name in dict.fromkeys(name for name, _ in CELLS[ranks])] + CELLS[ranks]
        return run_ranks(train_all, ranks, tmp_path_factory.mktemp(f"stores of {ranks}"), cells)

    return on


def differing(one: dict[str, Tensor], other: dict[str, Tensor], name: str) -> list[str]:
    if name == DYNAMIC:
        return [] if dynamic.same(one, other) else ["rows"]
    return difference(one, other)


@pytest.mark.parametrize(("ranks", "name", "plan"), [(ranks, *cell) for ranks in CELLS for cell in CELLS[ranks]])
def test_a_plan_trains_the_bits_of_the_serial_one(trained: Any, ranks: int, name: str, plan: str) -> None:
    for results in trained(ranks):
        found, serial = results[name, plan], results[name, "serial"]
        assert len(serial.losses) > 0
        assert found.losses == serial.losses
        assert found.logged == serial.logged
        assert differing(found.state, serial.state, name) == []
        if found.in_flight is not None:
            assert (serial.in_flight, found.in_flight) == (1, DEPTHS[plan])
        if name != DYNAMIC and not FEATURES[name].trainer():
            assert found.unchanged == []
            assert [line["loss_step"] for _, line in found.logged if "loss_step" in line] == found.losses


def test_ranks_train_batches_of_their_own(trained: Any) -> None:
    first, second = trained(2)
    for name, plan in first:
        assert first[name, plan].losses != second[name, plan].losses, name
