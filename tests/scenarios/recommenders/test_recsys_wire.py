"""Embeddings, gradients and ids that take fewer bytes on their way: checkpoints know nothing of it.

One spawn of two ranks runs every case; each test looks at one of them.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.strategies.cases import (
    Clicks,
    Pooled,
    difference,
    fit,
    recsys,
    state_of,
    trainer,
)

HALF = {"forward": "bf16", "backward": "fp16", "backward_loss_scale": 1024.0}


def scaled() -> MixedPrecision:
    """Lightning turns "16-mixed" on a CPU into bf16, unless it is given the plugin."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


def moved_through_a_checkpoint() -> list[list[str]]:
    """What differs of a model that was trained in 16 bits, saved, and loaded by one in 32; and the other way round."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (before, after) in enumerate([({"quantized_comms": HALF}, {}), ({}, {"quantized_comms": HALF})]):
            kinds = {"people": "row_wise", "things": "table_wise"}
            saving = fit(Clicks(Pooled), recsys(kinds=kinds, **before))
            path = saving.strategy.broadcast(f"{folder}/{index}.ckpt")
            saving.save_checkpoint(path)
            loading = trainer(recsys(kinds=kinds, **after), max_epochs=2)
            loading.fit(Clicks(Pooled), saving.train_dataloader, ckpt_path=path)  # nothing is left to train
            found.append(difference(state_of(saving), state_of(loading)))
            dist.barrier()
    return found


def refused() -> dict[str, str]:
    found = {}
    rows = {"people": "row_wise", "things": "table_wise"}
    for name, strategy, options in (
        ("int8", recsys(kinds=rows, quantized_comms={"forward": "int8"}), {}),
        (
            "scaled",
            recsys(kinds=rows, quantized_comms=HALF),
            {"plugins": [scaled()], "gradient_clip_val": 1.0},
        ),
    ):
        with pytest.raises(SetupError) as caught:
            fit(Clicks(Pooled), strategy, **options)
        found[name] = str(caught.value)
    module = Clicks(Pooled)
    fit(module, recsys(quantized_comms=HALF), max_epochs=1)
    with pytest.raises(SetupError) as caught:
        fit(module, recsys(quantized_comms={"forward": "fp16"}), max_epochs=1)
    found["sharded already"] = str(caught.value)
    return found


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "checkpoint": moved_through_a_checkpoint(),
        "refused": refused(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


def test_checkpoints_are_those_of_tables_in_32_bits(ranks: list[dict[str, Any]]) -> None:
    assert [of_rank["checkpoint"] for of_rank in ranks] == [[[], []]] * 2


REFUSED = {
    "int8": "int8 does not support",
    "scaled": "values beyond 65504 would be cut off",
    "sharded already": "sharded by an earlier strategy with quantized_comms=",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(ranks: list[dict[str, Any]], name: str) -> None:
    for of_rank in ranks:
        assert REFUSED[name] in of_rank["refused"][name]
