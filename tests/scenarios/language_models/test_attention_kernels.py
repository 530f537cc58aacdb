"""FlexAttention and kernels for sequences of varying lengths train as a plain loop, or are refused by name.

PyTorch's kernels have no backward on a CPU. Here FlexAttention runs its operator without a kernel, in a plain call or
with the backward of a compiled one, and the other kernel is replaced by a loop over documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention import varlen
from transformers import masking_utils
from transformers.integrations.flex_attention import WrappedFlexAttention

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.llm.batches.padding import pad_microbatch
from lightning_pipe.llm.parallel.attention_kernels import check_attention_device
from lightning_pipe.llm.parallel.hf_document_masking import POSITION_ID_FAMILIES
from lightning_pipe.llm.run import stage_parts
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from tests.distributed import run_ranks
from tests.scenarios.language_models import families
from tests.scenarios.language_models.test_hf_documents import WINDOW, config_of, documents, has_window, packed
from tests.scenarios.language_models.test_packing import MAX_LENGTH, ROWS, WITHIN, batches, plain_losses
from tests.strategies.llm_cases import SEED, Block, Tiny, TinyHF, TinyLM, fit, hf_config, llm, row_batches

SCHEDULES = ("1f1b", "zbv_zero_bubble")


def loop_over_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    ends_k: Tensor,
    longest: int,
    longest_k: int,
    **options: Any,
) -> Tensor:
    """What ``varlen_attn`` computes, for (tokens, heads, width)."""
    assert ends.dtype == torch.int32
    assert query.dtype == key.dtype == value.dtype
    assert longest == longest_k == int(ends.diff().max())
    before, after = options["window_size"]
    assert after == 0
    parts = []
    for of_query, of_key, of_value in zip(
        *(one.split(ends.diff().tolist()) for one in (query, key, value)), strict=True
    ):
        size = len(of_query)
        distance = torch.arange(size)[:, None] - torch.arange(size)
        mask = (distance >= 0) & (distance <= (size if before < 0 else before))
        one, two, three = (part.transpose(0, 1) for part in (of_query, of_key, of_value))
        attended = F.scaled_dot_product_attention(
            one, two, three, attn_mask=mask, scale=options["scale"], enable_gqa=options["enable_gqa"]
        )
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


def shapes_alone(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    fake = isinstance(query, torch._subclasses.FakeTensor)
    return query + 0 * (key.sum() + value.sum()) if fake else loop_over_documents(query, key, value, *args, **options)


def uncompiled_mask(**options: Any) -> flex.BlockMask:
    return flex.create_block_mask(**options | {"_compile": False})


@contextmanager
def on_cpu(compiled: bool = False) -> Iterator[None]:
    """Context in which the kernels run on the CPU."""
    function = torch.compile(flex.flex_attention, backend="aot_eager") if compiled else flex.flex_attention
    with ExitStack() as entered:
        for target, name, value in (
            (flex, "_validate_device", lambda *tensors: None),
            (WrappedFlexAttention, "_compiled_flex_attention", staticmethod(function)),
            (WrappedFlexAttention, "_is_flex_compiled", True),
            (WrappedFlexAttention, "training", True),
            (WrappedFlexAttention, "__init__", lambda self, training: None),
            (masking_utils, "create_block_mask", uncompiled_mask),
            (varlen, "varlen_attn", shapes_alone),
            (stage_parts, "check_attention_device", lambda *args: None),
        ):
            entered.enter_context(mock.patch.object(target, name, value, create=True))
        yield
    torch.compiler.reset()


# ---------------------------------------------------------------------- Hugging Face


def trained(rank: int, world: int, attention: str, compiled: bool, options: dict[str, Any]) -> dict[str, list[float]]:
    losses = {}
    micro_batches, rows = options.pop("micro_batches", ROWS), slice(None)
    if "dp_shard" in options:
        micro_batches, rows = ROWS // 2, slice(rank % 2, None, 2)
    for schedule in SCHEDULES:
        with on_cpu(compiled):
            module = TinyHF(hf_config("llama"), attention=attention)
            mine = [{key: one[rows] for key, one in batch.items()} for batch in batches("best_fit")]
            fit(module, llm(schedule, micro_batches, **options), mine, use_distributed_sampler=False)
        losses[schedule] = module.losses
    return losses


def check(attention: str, compiled: bool = False, world: int = 2, **options: Any) -> None:
    expected = plain_losses("llama", "best_fit")
    for losses in run_ranks(trained, world, attention, compiled, options):
        assert losses == {schedule: pytest.approx(expected, abs=WITHIN) for schedule in SCHEDULES}


def test_packed_documents_train_with_flex_attention_as_single_ones() -> None:
    check("flex_attention", compiled=True)


def test_packed_documents_train_with_varlen_attention_as_single_ones() -> None:
    check("varlen_attn")


@pytest.mark.parametrize("attention", ["flex_attention", "varlen_attn"])
def test_micro_batches_may_have_several_rows_and_layers_be_recomputed(attention: str) -> None:
    check(attention, micro_batches=ROWS // 2, activation_checkpoint={"mode": "full"})


def trained_in_bf16(rank: int, world: int, attention: str) -> list[float]:
    module = TinyHF(hf_config("llama"), attention=attention)
    with on_cpu(compiled=True):
        fit(module, llm("1f1b", ROWS), batches("best_fit"), precision="bf16-mixed")
    return module.losses


@pytest.mark.parametrize("attention", ["flex_attention", "varlen_attn"])
def test_kernels_get_queries_keys_and_values_of_one_type_under_autocast(attention: str) -> None:
    expected = trained_in_bf16(0, 1, "sdpa")
    assert trained_in_bf16(0, 1, attention) == pytest.approx(expected, rel=2**-8)


@pytest.mark.exhaustive
def test_sharded_stages_train_with_kernels() -> None:
    check("flex_attention", True, 4, dp_shard=2)


REFUSED = {"doge", "gemma2", "vaultgemma"}  # masks of its own; capped attention


@pytest.mark.parametrize(
    ("family", "window"),
    [(family, None) for family in sorted(POSITION_ID_FAMILIES)]
    + [(family, WINDOW) for family in sorted(POSITION_ID_FAMILIES) if has_window(family)],
)
def test_a_family_gives_the_kernel_the_boundaries_of_all_rows_or_is_refused(family: str, window: int | None) -> None:
    torch.manual_seed(SEED)
    module = HFCausalLM(config_of(family, window), attention="varlen_attn")
    rows = [[5, 7, 4], [8, 8]]
    whole = [packed(lengths, "position_ids") for lengths in rows]
    batch = {key: torch.cat([one[key] for one in whole]) for key in whole[0]}
    with on_cpu(), torch.no_grad():
        try:
            module.configure_model()
            found, refused = module.eval().predict_step([batch], 0)[0], False
        except (InputError, SetupError) as error:
            known = "cannot be built", "expected causal attention without", "is not supported for"
            refused = any(one in str(error) for one in known)
        for row, lengths in enumerate([] if refused else rows):
            apart = torch.cat([module.predict_step(one, 0) for one in documents(lengths)], 1)
            assert float((found[row] - apart[0]).abs().max()) < WITHIN
        assert refused == (family in REFUSED)


# ---------------------------------------------------------------------- a model of one's own


class FlexBlock(Block):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended: Any = flex.flex_attention(query, key, value, block_mask=mask)
        return x + attended.squeeze(1) + self.mlp(x)


class FlexLM(TinyLM):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        for layer in self.layers:
            layer.__class__ = FlexBlock  # another block would draw other numbers

    def forward(self, input_ids: Tensor, position_ids: Tensor, block_mask: Any) -> Tensor:  # type: ignore[override]
        x = self.embedding(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x, block_mask)
        return self.head(self.norm(x))


class Own(Tiny):
    """Builds the mask of each micro-batch, where every row has other documents."""

    def build_model(self) -> nn.Module:
        return FlexLM(self.layers)

    def model_inputs(self, micro_batch: Any) -> Any:
        ids, positions = micro_batch["input_ids"], micro_batch["position_ids"]
        starts = (positions == 0).cumsum(1)

        def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (starts[row, query] == starts[row, key])

        blocks = flex.create_block_mask(mask, len(ids), None, ids.shape[1], ids.shape[1], device="cpu", BLOCK_SIZE=4)
        return (ids,), {"position_ids": positions, "block_mask": blocks}


def trained_own(rank: int, world: int) -> dict[str, list[float]]:
    losses = {}
    for schedule in SCHEDULES:
        with on_cpu():
            module = Own()
            fit(module, llm(schedule, ROWS // 2), batches("best_fit"))
        losses[schedule] = module.losses
    return losses


def test_a_block_mask_that_is_built_for_each_micro_batch_trains_as_documents_alone() -> None:
    expected = plain_losses("own", "best_fit")
    for losses in run_ranks(trained_own, 2):
        assert losses == {schedule: pytest.approx(expected, abs=WITHIN) for schedule in SCHEDULES}


# ---------------------------------------------------------------------- refused


def test_a_block_mask_for_other_rows_or_another_length_is_refused() -> None:
    tokens = torch.zeros(2, MAX_LENGTH, dtype=torch.long)

    def mask(rows: int | None, length: int) -> Any:
        return flex.create_block_mask(lambda b, h, q, k: q >= k, rows, None, length, length, device="cpu", BLOCK_SIZE=4)

    for fitting in (mask(None, MAX_LENGTH), mask(2, MAX_LENGTH)):
        assert pad_microbatch({"input_ids": tokens, "mask": fitting}, MAX_LENGTH)["mask"] is fitting
    for rows, length in ((4, MAX_LENGTH), (2, 8)):
        with pytest.raises(InputError, match=r"'mask' is a BlockMask of .* Build the mask in model_inputs"):
            pad_microbatch({"input_ids": tokens, "mask": mask(rows, length)}, MAX_LENGTH)


@pytest.mark.parametrize("attention", ["flex_attention", "varlen_attn"])
def test_a_kernel_that_has_no_backward_on_a_cpu_is_refused_by_name(attention: str) -> None:
    module = HFCausalLM(hf_config("llama"), attention=attention)
    with pytest.raises(SetupError, match=rf"attention='{attention}' cannot be trained on cpu.*attention='sdpa'"):
        fit(module, llm("gpipe", 2), batches("best_fit"))
    check_attention_device(module.build_model(), torch.device("cuda"))


def test_the_error_of_an_own_models_kernel_says_that_another_device_is_needed() -> None:
    with pytest.raises(SetupError, match=r"does not support backward on CPU.* Use another device"):
        fit(Own(), llm("gpipe", 2), batches("best_fit"))


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "varlen_attn") for family in ("bloom", "falcon", "gpt_neox_japanese", "llama4_text", "rembert")),
        ("doge", "flex_attention"),
    ],
)
def test_a_family_that_would_train_with_another_mask_is_refused_by_name(family: str, attention: str) -> None:
    with pytest.raises(SetupError, match=rf"{family}.*(is not supported|cannot be built|another mask)"):
        HFCausalLM(families.config_of(family), attention=attention).configure_model()


def padded(rank: int, world: int, attention: str, left: bool) -> list[float]:
    module = TinyHF(hf_config("llama"), attention=attention)
    rows = row_batches(2)
    for batch in rows:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        for row, pads in enumerate([0, 1, 3] if not left else [2]):
            pad = slice(None, pads) if left else slice(batch["input_ids"].shape[1] - pads, None)
            batch["attention_mask"][row, pad] = 0
            batch["labels"][row, pad] = -100
    with on_cpu():
        fit(module, llm("1f1b", 4), rows)
    return module.losses


def test_padding_at_the_end_of_rows_is_not_trained_by_varlen_attention() -> None:
    expected = run_ranks(padded, 2, "sdpa", False)
    for losses, same in zip(run_ranks(padded, 2, "varlen_attn", False), expected, strict=True):
        assert losses == pytest.approx(same, abs=WITHIN)


def left_padded(rank: int, world: int) -> None:
    with pytest.raises(InputError, match=r"masks tokens before others, which attention='varlen_attn'"):
        padded(rank, world, "varlen_attn", left=True)


def test_padding_at_the_beginning_of_rows_is_refused_by_varlen_attention() -> None:
    run_ranks(left_padded, 2)


def test_a_mask_of_pairs_of_tokens_is_refused_by_varlen_attention() -> None:
    module = HFCausalLM(hf_config("llama"), attention="varlen_attn")
    module.configure_model()
    tokens = torch.zeros(2, 4, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.zeros(2, 1, 4, 4)}
    with on_cpu(), pytest.raises(InputError, match="a layer gets an attention mask"):
        module.predict_step(batch, 0)


def in_parts(rank: int, world: int, attention: str) -> None:
    module: Any = Own() if attention == "own" else TinyHF(hf_config("llama"), attention=attention)
    strategy = llm("1f1b", 2, pp=1, cp=2)
    message = "which attention='varlen_attn' does not read" if attention == "varlen_attn" else "context parallelism"
    with on_cpu(), pytest.raises((InputError, SetupError), match=message):
        fit(module, strategy, batches("best_fit"))


@pytest.mark.parametrize("attention", ["flex_attention", "varlen_attn", "own"])
def test_kernels_are_refused_with_parts_of_sequences(attention: str) -> None:
    run_ranks(in_parts, 2, attention)
