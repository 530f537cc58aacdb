"""Attention over a ring of ranks is that of the whole sequences, for any number of heads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from lightning_pipe.engine.errors import SetupError
from lightning_pipe.llm.ring_attention import RingAttention, check_ring
from tests.distributed import run_ranks
from tests.llm.attention_cases import CASES, Plain, deviations, hugging_face, packed, tokens

ring = partial(deviations, method="ring")


def on_four_ranks(rank: int, size: int) -> dict[str, dict[str, float]]:
    """More ranks than most of these models have heads."""
    before = vars(torch_ring._cp_options).copy()
    found = {name: ring(model_of, batch_of) for name, (model_of, batch_of) in CASES.items()} | {
        "recomputed": ring(lambda: Plain(), lambda: tokens() | {"position_ids": torch.arange(8)[None]}, recompute=True),
        "recomputed, packed": ring(Plain, packed, recompute=True),
        "within itself": ring(partial(hugging_face, "llama"), tokens, entered=2),
        "not entered": ring(partial(hugging_face, "llama"), tokens, entered=0),
    }
    assert vars(torch_ring._cp_options) == before
    return found


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, dict[str, float]]:
    return run_ranks(on_four_ranks, 4)[0]


@pytest.mark.parametrize("case", [*CASES, "recomputed", "recomputed, packed", "within itself"])
def test_outputs_and_gradients_over_four_ranks_are_those_of_one_device(
    four_ranks: dict[str, dict[str, float]], case: str
) -> None:
    found = four_ranks[case]
    assert max(found["loss"], found["outputs"], found["evaluation"]) < 1e-6
    assert not {name: value for name, value in found.items() if not value < 1e-5}


def test_without_it_chunks_do_not_see_each_other(four_ranks: dict[str, dict[str, float]]) -> None:
    assert four_ranks["not entered"]["outputs"] > 1e-3


def in_half_precision(rank: int, size: int) -> tuple[torch.dtype, float]:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(2)
    query, key, value = torch.randn(3, 1, 2, 8, 4, generator=generator)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    own = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]][rank])
    with torch.autocast("cpu", torch.bfloat16), RingAttention(group):
        found = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, own], key[:, :, own], value[:, :, own], is_causal=True
        )
    return found.dtype, float((found.float() - expected[:, :, own]).abs().max())


def test_autocast_is_that_of_the_function() -> None:
    for dtype, distance in run_ranks(in_half_precision, 2):
        assert dtype == torch.bfloat16
        assert distance < 0.03


# ---------------------------------------------------------------------- what is refused


def with_dropout(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(SetupError, match=r"dropout_p=0.5, .* needed is 0.0"), RingAttention(group):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5, is_causal=True)


def test_dropout_is_refused() -> None:
    run_ranks(with_dropout, 1)


def test_a_pytorch_without_the_ring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_ring()
    monkeypatch.delattr(torch_ring, "_templated_ring_attention_backward")
    with pytest.raises(SetupError, match="is without _templated_ring_attention_backward in"):
        check_ring()
