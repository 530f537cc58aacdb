"""Attention that context parallelism does not see, or that it would make another, is refused before any data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.deferred import fake_copy
from lightning_pipe.llm.model.derived_config import derive_config
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.parallel.attention_mode import CheckedAttention, OwnMasks, check_mask_heads
from lightning_pipe.llm.parallel.context_ranks import ContextMethod
from tests.llm.attention_cases import VOCABULARY, Block, hugging_face


class Layers(nn.Module):
    """Between an embedding and a head, whatever layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(*layers)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layers(self.embedding(ids))


def causal(query: Tensor, *args: Any, dtype: torch.dtype = torch.bool, **options: Any) -> Tensor:
    """Attention with a mask that the model made, in this type."""
    mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    if dtype.is_floating_point:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(query, args[0], args[1], mask, enable_gqa=True)


def crossing(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key[:, :, 1:], value[:, :, 1:], enable_gqa=True)


def by_hand(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def look_at(
    model: nn.Module, size: int = 2, method: ContextMethod = "ulysses", tensor_size: int = 1, **keywords: Tensor
) -> None:
    """One forward without data, as every rank runs it before the first one with data."""
    if isinstance(model, Layers):
        config = ModuleConfig(len(model.layers), "layers", ("embedding",), ())
    else:
        config = derive_config(model)
    fake, mode = fake_copy(model)
    stage = CheckedAttention(StageModule(fake, 0, 1).eval(), config.layers, size, method, tensor_size)
    with mode, torch.no_grad():
        stage(mode.from_tensor(torch.zeros(2, 4, dtype=torch.long)), **keywords)


def test_attention_that_is_seen_and_fits_is_let_be() -> None:
    look_at(Layers(nn.Linear(16, 16), Block(), nn.Sequential(nn.LayerNorm(16), nn.GELU()), Block(causal)))
    look_at(hugging_face("llama"))


def test_a_mask_of_the_batch_may_be_additive_and_need_not_be_causal() -> None:
    model = Layers(Block(partial(causal, dtype=torch.float32)), Block(is_causal=False))
    look_at(model, attention_mask=torch.zeros(2, 1, 4, 4))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Layers(Block(), Block(by_hand)), r"layer layers.1 \(Block\) does not call"),
        (lambda: hugging_face("llama", attention="eager"), r"layer model.layers.0 \(LlamaDecoderLayer\) does not call"),
        (lambda: Layers(Mixing()), "torch.nn.MultiheadAttention"),
        (lambda: Layers(Block(is_causal=False)), "is_causal=False, so that all tokens attend"),
        (lambda: Layers(Block(partial(causal, dtype=torch.float32))), "attn_mask of torch.float32"),
        (lambda: Layers(Block(crossing)), r"query of \(2, 2, 4, 8\) and a key of \(2, 1, 3, 8\)"),
        (lambda: hugging_face("mistral"), "sliding_window=4096"),
        (
            lambda: hugging_face("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope_scaling of type 'dynamic'",
        ),
    ],
    ids=["by hand", "eager", "module", "not causal", "additive", "crossing", "window", "frequencies"],
)
def test_attention_that_would_be_another_over_several_ranks_is_refused(
    model: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        look_at(model())


def test_a_ring_asks_for_no_number_of_heads_but_for_attention_without_dropout() -> None:
    look_at(Layers(Block()), size=3, method="ring")
    with pytest.raises(SetupError, match=r"dropout_p=0.1, .* parallel.cp_method='ulysses'"):
        look_at(hugging_face("llama", attention_dropout=0.1), method="ring")
    look_at(hugging_face("llama", attention_dropout=0.1))


def test_a_mask_for_each_head_beside_tensor_parallelism_is_refused() -> None:
    model = Layers(Block(is_causal=False))
    look_at(model, tensor_size=2, attention_mask=torch.zeros(2, 1, 4, 4))
    with pytest.raises(SetupError, match=r"attention_mask has 2 heads, which parallel.tp=2 shares out"):
        look_at(model, tensor_size=2, attention_mask=torch.zeros(2, 2, 4, 4))


def window(length: int, width: int) -> Tensor:
    positions = torch.arange(length)
    ago = positions[:, None] - positions
    return (ago >= 0) & (ago < width)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("whole", [None, torch.ones(16, 16, dtype=torch.bool).tril()[None, None]])
def test_a_mask_of_the_models_own_may_say_only_what_the_whole_one_says(whole: Tensor | None, balanced: bool) -> None:
    OwnMasks._seen.clear()
    for rank in (0, 1):
        masks = OwnMasks(whole, rank, 2, balanced=balanced)
        with pytest.raises(SetupError, match="its own mask, such as a sliding window"):
            masks.check(window(8, 3))
        masks.check(None)
        masks.check(torch.zeros(8, 8))  # a bias is not looked at here
    masks.check(torch.ones(8, 8, dtype=torch.bool).tril())


def test_a_model_may_take_pieces_that_do_not_follow_on_for_documents() -> None:
    OwnMasks._seen.clear()
    apart = torch.ones(8, 8, dtype=torch.bool).tril()
    apart[4:, :4] = False
    OwnMasks(None, 0, 2, balanced=True).check(apart)
    OwnMasks._seen.clear()
    with pytest.raises(SetupError, match="its own mask, such as a sliding window"):
        OwnMasks(None, 0, 2).check(apart[None])


def test_a_mask_has_the_heads_of_the_query_or_one() -> None:
    query = torch.zeros(1, 4, 2, 8)
    for mask in (None, torch.zeros(1, 1, 2, 2), torch.zeros(1, 4, 2, 2)):
        check_mask_heads(mask, query)
    with pytest.raises(SetupError, match="attention_mask has 2 heads, and attention 4"):
        check_mask_heads(torch.zeros(1, 2, 2, 2), query)


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(SetupError, match=r"2 heads, which parallel.cp=4 does not divide"):
        look_at(Layers(Block()), size=4)
