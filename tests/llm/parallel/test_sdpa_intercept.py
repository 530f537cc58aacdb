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
from lightning_pipe.llm.batches.padding import pad_microbatch
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.meta_tensors import fake_copy
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.parallel.context_parallel_group import ContextMethod
from lightning_pipe.llm.parallel.sdpa_intercept import AttentionCheckedStage, ChunkMaskCheck
from lightning_pipe.llm.parallel.sequence_chunks import AttentionPattern, chunk_positions
from tests.distributed import run_ranks
from tests.llm.attention_cases import VOCABULARY, Block, Plain, hugging_face, over_ranks, tokens


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
        config = PPModuleConfig(len(model.layers), "layers", ("embedding",), ())
    else:
        config = derive_pp_module_config(model)
    fake, mode = fake_copy(model)
    stage = AttentionCheckedStage(StageModule(fake, 0, 1).eval(), config.layer_fqns, size, method, tensor_size)
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


OTHER = "its own mask, such as a sliding window"
CAUSAL = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]


def additive(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def own_masks(attention: AttentionPattern | None, rank: int, size: int, balanced: bool = False) -> ChunkMaskCheck:
    """The check for an attention pattern."""
    if attention is None:
        return ChunkMaskCheck(None, rank, size, balanced=balanced)
    return ChunkMaskCheck(attention.as_mask(), rank, size, balanced=balanced, square=attention.mask is not None)


def part(mask: Tensor, rank: int, balanced: bool) -> Tensor:
    """Mask of the chunk of one of two ranks."""
    positions = chunk_positions(rank, 2, 16, balanced=balanced)
    return mask.index_select(-2, positions).index_select(-1, positions)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(
    "attention",
    [None, AttentionPattern(documents=torch.arange(16)[None] // 8), AttentionPattern(CAUSAL)],
    ids=["causal", "documents", "mask of the batch"],
)
def test_each_mask_of_a_model_is_checked_whatever_masks_came_before(
    attention: AttentionPattern | None, balanced: bool
) -> None:
    whole = None if attention is None else attention.as_mask()
    for rank in range(2):
        masks = own_masks(attention, rank, 2, balanced=balanced)
        fitting = part(CAUSAL if whole is None else whole, rank, balanced)
        for mask in (fitting[0, 0], fitting, fitting.expand(3, 1, -1, -1), fitting.expand(3, 4, -1, -1)):
            masks.check(mask, 8)
            with pytest.raises(SetupError, match=OTHER):
                masks.check(window(8, 3) & mask, 8)
        masks.check(None, 8)
        changed = fitting.clone()
        masks.check(changed, 8)
        changed[..., 1, 0] = False
        with pytest.raises(SetupError, match=OTHER):
            masks.check(changed, 8)


PREFIX = CAUSAL | (torch.arange(16) < 4)
HEADS = torch.cat([CAUSAL, window(16, 3)[None, None]], 1)
BIAS = additive(CAUSAL) - (torch.arange(16)[:, None] - torch.arange(16)).abs() / 4


@pytest.mark.parametrize(
    ("whole", "fitting", "others"),
    [
        (PREFIX, [PREFIX, additive(PREFIX)], [CAUSAL, additive(CAUSAL), PREFIX.clone().fill_(True)]),
        (HEADS, [HEADS, additive(HEADS)], [HEADS.flip(1), CAUSAL, HEADS[:, 1:]]),
        (BIAS, [BIAS, BIAS.bfloat16()], [CAUSAL, additive(CAUSAL), BIAS / 2]),
        (additive(CAUSAL), [CAUSAL, additive(CAUSAL, torch.bfloat16)], [PREFIX, BIAS, window(16, 3)]),
    ],
    ids=["prefix", "heads", "bias", "additive"],
)
@pytest.mark.parametrize("balanced", [False, True])
def test_a_model_may_only_use_the_mask_of_the_batch_if_there_is_one(
    whole: Tensor, fitting: list[Tensor], others: list[Tensor], balanced: bool
) -> None:
    masks = own_masks(AttentionPattern(whole), 0, 2, balanced=balanced)
    for mask in fitting:
        masks.check(part(mask, 0, balanced), 8)
    for mask in others:
        with pytest.raises(SetupError, match=OTHER):
            masks.check(part(mask, 0, balanced), 8)


def test_masks_may_differ_in_what_padding_attends_to() -> None:
    real = torch.tensor([[True] * 6 + [False] * 2])
    for attention in (
        AttentionPattern(real=real),
        AttentionPattern(pad_microbatch({"attention_mask": CAUSAL[..., :6, :6]}, 8)["attention_mask"]),
    ):
        own_masks(attention, 0, 1).check(window(8, 8), 8)
        with pytest.raises(SetupError, match=OTHER):
            own_masks(attention, 0, 1).check(window(8, 5), 8)
    with pytest.raises(SetupError, match=OTHER):  # tokens attend to padding before them
        own_masks(AttentionPattern(real=real.flip(1)), 0, 1).check(window(8, 8), 8)


def test_a_model_may_take_pieces_that_do_not_follow_on_for_documents() -> None:
    apart = torch.ones(8, 8, dtype=torch.bool).tril()
    apart[4:, :4] = False
    own_masks(None, 0, 2, balanced=True).check(apart, 8)
    with pytest.raises(SetupError, match=OTHER):
        own_masks(None, 0, 2).check(apart[None], 8)


class Windowed(Plain):
    """Its first layer has a causal mask, its second one a window."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(16, 16)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seq_lens_q: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        length = input_ids.shape[1]
        return self.head(self.layers[1](self.layers[0](x, window(length, length)), window(length, 3)))


def errors_of_windows(rank: int, size: int) -> list[str]:
    """What a rank is told of a window in the second layer, and in a model that follows a causal one."""
    errors = []
    for method in ("ulysses", "ring", "ulysses", "ring"):
        try:
            over_ranks(Windowed, partial(tokens, length=16), method)
        except SetupError as error:
            errors.append(str(error))
    return errors


def test_a_window_after_a_causal_mask_is_refused_on_every_rank() -> None:
    for errors in run_ranks(errors_of_windows, 2):
        assert [OTHER in error for error in errors] == [True] * 4


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(SetupError, match=r"2 heads, which parallel.cp=4 does not divide"):
        look_at(Layers(Block()), size=4)
