"""Losses over all ranks' tokens: what gradients become, what counts may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine import InputError
from lightning_pipe.recsys import GlobalTokenCount, token_weighted_mean
from lightning_pipe.recsys.batches.traversal import iterate_leaves
from tests.distributed import run_ranks
from tests.rounding import Reference

# Tokens of each rank.
COUNTS = {"two": [3, 5], "none on one": [0, 4], "none at all": [0, 0]}


def tokens_of(rank: int, count: int) -> torch.Tensor:
    return torch.rand(count, 4, generator=torch.Generator().manual_seed(rank))


def layer() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def averaged(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Loss and gradient, averaged over ranks as the reducer does, of each case; counted early and late."""
    found = {}
    for name, counts in COUNTS.items():
        for early in (True, False):
            model = layer()
            count: Any = torch.tensor(counts[rank])
            if early:
                count = GlobalTokenCount(count)
            losses = model(tokens_of(rank, counts[rank])).square()
            loss = token_weighted_mean(losses.sum(), count)
            loss.backward()
            assert model.weight.grad is not None
            both = torch.cat([loss.detach().reshape(1), model.weight.grad.reshape(-1)])
            dist.all_reduce(both)
            found[f"{name} {early}"] = both / world_size
    return found


def expected(name: str) -> Reference:
    counts = COUNTS[name]

    def alone() -> dict[str, torch.Tensor]:
        model = layer()
        everything = torch.cat([tokens_of(rank, count) for rank, count in enumerate(counts)])
        loss = model(everything).square().sum() / max(1, sum(counts))
        loss.backward()
        assert model.weight.grad is not None
        return {"loss and gradient": torch.cat([loss.detach().reshape(1), model.weight.grad.reshape(-1)])}

    return Reference.of(alone)


def test_averaged_gradients_are_those_of_the_mean_over_all_tokens() -> None:
    results = run_ranks(averaged, 2)
    for name in COUNTS:
        for found in results:
            for early in (True, False):
                assert expected(name).differences({"loss and gradient": found[f"{name} {early}"]}) == []
    assert results[0]["none at all True"].eq(0).all()


def wrong_on_one(rank: int, world_size: int) -> list[str]:
    texts = []
    counts: tuple[Any, ...] = (-1, float("nan"), float("inf"), "three", None, [1, 2])
    for count in counts:
        try:
            token_weighted_mean(torch.ones(()), count if rank else 2)
        except InputError as error:
            texts.append(str(error))
    # Behind that, ranks still understand each other.
    texts.append(str(GlobalTokenCount(rank + 1).total().item()))
    return texts


def test_a_count_that_is_none_is_an_error_on_all_ranks_that_names_the_rank() -> None:
    others, own = run_ranks(wrong_on_one, 2)
    for texts in (others, own):
        assert "-1.0 on rank 1" in texts[0]
        assert "nan on rank 1" in texts[1]
        assert "inf on rank 1" in texts[2]
        assert texts[6] == "3.0"
    for text in others[3:6]:
        assert "nan on rank 1" in text
    for text in own[3:6]:
        assert "expected one number" in text


def in_two_worlds(rank: int, world_size: int, store: str) -> list[float]:
    totals = [GlobalTokenCount(rank + 1).total().item()]
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return [*totals, GlobalTokenCount(10 * (rank + 1)).total().item()]


def test_a_new_world_has_a_group_of_its_own(tmp_path: Any) -> None:
    assert run_ranks(in_two_worlds, 2, str(tmp_path / "store")) == [[3.0, 30.0]] * 2


def test_one_process_needs_no_group() -> None:
    loss_sum = torch.tensor(6.0, requires_grad=True)
    loss = token_weighted_mean(loss_sum, torch.tensor([4]))
    loss.backward()
    assert loss.item() == 1.5
    assert loss_sum.grad is not None
    assert loss_sum.grad.item() == 0.25
    assert token_weighted_mean(torch.tensor(0.0), 0).item() == 0.0
    with pytest.raises(InputError, match=r"-2.0 on rank 0"):
        token_weighted_mean(torch.tensor(1.0), -2)


def test_a_count_in_a_batch_is_no_part_of_its_samples() -> None:
    batch = {"ids": torch.zeros(1), "tokens": GlobalTokenCount(1)}
    assert [str(path[0]) for path, _ in iterate_leaves(batch)] == ["['ids']"]
