"""Stages whose parameters are sharded (FSDP2) or replicated train as one device does with all of the data."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    Tiny,
    Trained,
    as_one,
    fit,
    llm,
    loader,
    microbatches_of,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    train_alone,
    train_with_lightning,
    trainer,
    unequal,
)

STEPS = 2
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("1f1b", {"dp_shard": 2}),
    "sharded, gathered anew for backward": (
        "interleaved_1f1b",
        {"dp_shard": 2, "reshard_after_forward": True},
    ),
    "replicated, zero bubble": ("zbv_zero_bubble", {"dp_replicate": 2}),
    "sharded and replicated, one stage": (
        "gpipe",
        {"dp_replicate": 2, "dp_shard": 2},
    ),
}

# Batches of other lengths in one step, and validation in the middle of it.
ACCUMULATED_BATCHES = 4  # two steps of two batches


def whole(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def four_ranks(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, (schedule, options) in CASES.items():
        parts = 4 if case == "sharded and replicated, one stage" else 2
        mine = [{key: value[rank % parts :: parts] for key, value in batch.items()} for batch in row_batches(STEPS)]
        module = Tiny(optimizer="adamw")
        used = fit(
            module, llm(schedule, **options), mine, loader(mine), gradient_clip_val=0.5, use_distributed_sampler=False
        )
        assert module.model is not None
        parameters = dict(module.model.named_parameters())
        found[case] = {
            "trained": Trained(module.losses, [whole(one) for one in module.gradients], whole(dict(parameters))),
            "sharded": sorted({type(one).__name__ for one in parameters.values()}),
            "val_loss": used.callback_metrics["val_loss"].item(),
        }
        found[case]["trained"].parameters = {k: v.detach() for k, v in found[case]["trained"].parameters.items()}
    batches = row_batches(ACCUMULATED_BATCHES)
    mine = [{key: value[rank % 2 :: 2] for key, value in batch.items()} for batch in batches]
    module = Tiny(optimizer="adamw")
    of_trainer: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    strategy = llm("zbv_zero_bubble", dp_shard=2)
    fit(module, strategy, mine, loader(mine[-1:]), use_distributed_sampler=False, **of_trainer)
    found["accumulated"] = [whole(one) for one in module.gradients]
    reduced: set[Any] = set()
    reduce = _fsdp_param_group.foreach_reduce

    def noting(*args: Any, **kwargs: Any) -> Any:
        reduced.add(inspect.signature(reduce).bind(*args, **kwargs).arguments["reduce_dtype"])
        return reduce(*args, **kwargs)

    half = Tiny()
    with mock.patch.object(_fsdp_param_group, "foreach_reduce", noting):
        fit(half, llm("1f1b", dp_shard=2), row_batches(1), precision="bf16-true")
    found["half"] = {one.dtype for one in half.parameters()}, reduced
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(four_ranks, 4)


@pytest.fixture(scope="module")
def expected() -> Reference:
    """Gradients are noted before they are clipped by the norm of all of them, which the parameters show."""

    def alone() -> dict[str, Any]:
        module = Tiny(optimizer="adamw")
        batches = [as_one(batch) for batch in row_batches(STEPS)]
        results = results_of(train_with_lightning(module, batches, gradient_clip_val=0.5))
        # Means of several batches, each of its own number of tokens, are weighted by them.
        (metrics,) = trainer("auto").validate(module, loader(batches), verbose=False)
        return results | {"val_loss": metrics["val_loss"]}

    return Reference.of(alone)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_parameters_are_those_of_one_device(case: str, trained: Any, expected: Any) -> None:
    ranks = (results_of(rank[case]["trained"]) | {"val_loss": rank[case]["val_loss"]} for rank in trained)
    assert not ranks_beyond_rounding(ranks, expected)


def test_gradients_of_other_lengths_add_up_in_the_shards(trained: Any) -> None:
    batches = row_batches(ACCUMULATED_BATCHES)
    pairs = [[*microbatches_of(batches[step], 4), *microbatches_of(batches[step + 1], 4)] for step in (0, 2)]
    expected = Reference.of(
        lambda: results_of(Trained([], train_alone(Tiny(optimizer="adamw"), "adamw", pairs, 8).gradients))
    )
    assert not ranks_beyond_rounding((results_of(Trained([], rank["accumulated"])) for rank in trained), expected)


def test_gradients_of_half_precision_are_summed_in_float32(trained: Any) -> None:
    for rank in trained:
        assert rank["half"] == ({torch.bfloat16}, {torch.float32})


@pytest.mark.parametrize("case", CASES)
def test_every_rank_says_one_loss_of_validation(case: str, trained: Any) -> None:
    assert len({results[case]["val_loss"] for results in trained}) == 1


def test_parameters_are_sharded_where_that_is_asked_for(trained: Any) -> None:
    for case in CASES:
        assert trained[0][case]["sharded"] == ["DTensor"], case


def test_ranks_of_one_stage_agree_to_the_bit(trained: Any) -> None:
    for case in CASES:
        ranks = [results[case]["trained"] for results in trained]
        groups = [(0, 1), (2, 3)] if case != "sharded and replicated, one stage" else [(0, 1), (0, 2), (0, 3)]
        for one, other in groups:
            assert unequal(ranks[one], ranks[other]) == [], case


def test_a_zero_bubble_schedule_with_gathering_anew_is_refused() -> None:
    message = run_ranks(refused, 2)
    for one in message:
        assert "reshard_after_forward is true" in one


def refused(rank: int, world_size: int) -> str:
    strategy = llm("zbv_zero_bubble", dp_shard=2, reshard_after_forward=True)
    with pytest.raises(SetupError) as caught:
        fit(Tiny(), strategy, row_batches(1))
    return str(caught.value)
