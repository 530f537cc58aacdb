"""Attention over a ring of ranks is that of the whole sequences, for any number of heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from lightning_pipe._compat.attention import attend, attend_backward
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.parallel.ring_attention import RingAttention
from lightning_pipe.llm.parallel.sequence_chunks import AttentionPattern, chunk_positions
from tests.distributed import run_ranks
from tests.llm.attention_cases import CASES, Results, deviations, hugging_face, over_ranks, tokens
from tests.tiers import sampled, wanted

LLAMA = partial(hugging_face, "llama")
# A model and a batch, and options of the run.
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (case, {}) for name, case in CASES.items()},
    "recomputed": (CASES["plain"], {"recompute": True}),
    "recomputed, packed": (CASES["plain, packed"], {"recompute": True}),
    "within itself": ((LLAMA, tokens), {"entered": 2}),
    "not entered": ((LLAMA, tokens), {"entered": 0}),
}
# Their kinds of batches are those of other cases, too.
RARELY = ("Llama, grouped heads in SDPA", "Llama, packed", "GPT-NeoX, padded")
OFTEN = [name for name in RUNS if name not in RARELY]


def on_four_ranks(rank: int, size: int, names: list[str]) -> dict[str, Results]:
    """More ranks than most of these models have heads."""
    before = vars(torch_ring._cp_options).copy()
    found = {}
    for name in names:
        (model_of, batch_of), options = RUNS[name]
        found[name] = over_ranks(model_of, batch_of, method="ring", **options)
    assert vars(torch_ring._cp_options) == before
    return found


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest) -> dict[str, Results]:
    return run_ranks(on_four_ranks, 4, wanted(request.config, RUNS, OFTEN.__contains__))[0]


@pytest.mark.parametrize("case", sampled([name for name in RUNS if name != "not entered"], OFTEN.__contains__))
def test_outputs_and_gradients_over_four_ranks_are_those_of_one_device(
    four_ranks: dict[str, Results], case: str
) -> None:
    (model_of, batch_of), _ = RUNS[case]
    assert deviations(model_of, batch_of, four_ranks[case]) == []


def test_without_it_chunks_do_not_see_each_other(four_ranks: dict[str, Results]) -> None:
    differing = deviations(LLAMA, tokens, four_ranks["not entered"])
    assert [one for one in differing if one.startswith("output 0")] != []


def in_half_precision(rank: int, size: int) -> tuple[torch.dtype, float]:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(2)
    query, key, value = torch.randn(3, 1, 2, 8, 4, generator=generator)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    own = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]][rank])
    with torch.autocast("cpu", torch.bfloat16), RingAttention(group):
        found = F.scaled_dot_product_attention(query[:, :, own], key[:, :, own], value[:, :, own], is_causal=True)
    return found.dtype, float((found.float() - expected[:, :, own]).abs().max())


def test_autocast_is_that_of_the_function() -> None:
    for dtype, distance in run_ranks(in_half_precision, 2):
        assert dtype == torch.bfloat16
        assert distance < 0.03


def of_other_widths(rank: int, size: int) -> tuple[float, float]:
    """Values wider than keys, in float64: how far outputs and gradients are, merely causal and with a mask."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(2)
    whole = [
        torch.randn(2, heads, 8, width, generator=generator).double() for heads, width in ((4, 6), (2, 6), (2, 10))
    ]
    own = chunk_positions(rank, size, 8, balanced=True)
    distances = []
    for mask in (None, torch.ones(8, 8, dtype=torch.bool).tril(1).tril() & (torch.arange(8) != 1)):
        inputs = [tensor.clone().requires_grad_() for tensor in whole]
        options: dict[str, Any] = {"enable_gqa": True, "is_causal": mask is None}
        query, key, value = inputs
        expected = F.scaled_dot_product_attention(query, key, value, mask, **options)
        expected.nan_to_num().sum().backward()
        parts = [tensor[:, :, own].clone().requires_grad_() for tensor in whole]
        attention = None if mask is None else AttentionPattern(mask=mask[None, None])
        with RingAttention(group, attention):
            query, key, value = parts
            found = F.scaled_dot_product_attention(query, key, value, None, **options)
        found.nan_to_num().sum().backward()
        gaps = [(found.nan_to_num() - expected.nan_to_num()[:, :, own]).abs().max()]
        for part, tensor in zip(parts, inputs, strict=True):
            assert part.grad is not None
            assert tensor.grad is not None
            gaps.append((part.grad - tensor.grad[:, :, own]).nan_to_num().abs().max())
        distances.append(float(torch.stack(gaps).max()))
    return distances[0], distances[1]


def test_values_may_be_wider_than_keys_and_sums_keep_their_precision() -> None:
    for distances in run_ranks(of_other_widths, 2):
        assert max(distances) < 1e-12


@pytest.mark.parametrize("length", [3, 32, 40])
def test_sums_of_cudas_kernel_are_cut_to_the_queries(length: int) -> None:
    query = torch.empty(1, 2, length, 8, device="meta")
    with torch.device("meta"):
        out, sums, *rest = attend(query, query, query, True, 1.0)
        assert sums.shape == (1, 2, length)
        gradients = attend_backward(out, (query, query, query, out, sums), rest, True, 1.0)
    assert [gradient.shape for gradient in gradients] == 3 * [query.shape]


# ---------------------------------------------------------------------- what is refused


def with_dropout(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(SetupError, match=r"dropout_p=0.5, .* expected 0.0"), RingAttention(group):
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.5, is_causal=True)


def test_dropout_is_refused() -> None:
    run_ranks(with_dropout, 1)
