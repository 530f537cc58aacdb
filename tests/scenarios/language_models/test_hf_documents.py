"""Documents packed into one row train as each document by itself, in every family of Hugging Face's that is named."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from lightning_pipe.engine import InputError
from lightning_pipe.llm.parallel.hf_document_masking import MASKED_FAMILIES, POSITION_ID_FAMILIES, HFDocumentMasking
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from tests.distributed import run_ranks
from tests.strategies.llm_cases import SEED, VOCABULARY, Tiny, fit, llm

LENGTHS = [5, 7, 4]
# Float32 and a model of two layers: differences of rounding are below 1e-6, and tokens of another document move logits
# by 1e-3 and more.
WITHIN = 1e-5
WINDOW = 3
# By the names that configs have for the same.
_SIZES: dict[str, Any] = {
    name: value
    for value, names in (
        (64, "vocab_size max_position_embeddings n_positions"),
        (32, "hidden_size n_embd d_model word_embed_proj_dim"),
        (48, "intermediate_size n_inner ffn_dim"),
        (
            2,
            "num_hidden_layers n_layer n_layers num_layers num_key_value_heads eos_token_id "
            "num_experts_per_tok top_k moe_topk moe_k",
        ),
        (
            4,
            "num_attention_heads n_head n_heads num_heads rotary_dim num_experts num_local_experts "
            "moe_num_experts n_routed_experts",
        ),
        (8, "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank"),
        (0, "pad_token_id"),
        (1, "bos_token_id first_k_dense_replace n_group topk_group"),
        (16, "moe_intermediate_size shared_expert_intermediate_size"),
        (1.0, "partial_rotary_factor"),
        (
            0.0,
            "attention_dropout attn_pdrop resid_pdrop embd_pdrop dropout hidden_dropout hidden_dropout_prob "
            "attention_probs_dropout_prob activation_dropout layerdrop",
        ),
    )
    for name in names.split()
}


def config_of(family: str, window: int | None = None) -> dict[str, Any]:
    known = AutoConfig.for_model(family).to_dict()
    config = {key: value for key, value in _SIZES.items() if key in known}
    if family == "falcon":
        config.pop("head_dim", None)  # which it computes
    if family == "deepseek_v3":
        config["num_key_value_heads"] = config["num_attention_heads"]  # which the checkpoints of the family have, too
    if family == "dbrx":
        config["attn_config"] = {"rope_theta": 10_000.0, "clip_qkv": 8.0}  # without which it has no forward
    if family == "gpt_neo":
        config["attention_types"] = [[["global", "local"], 1]]
    if "sliding_window" in known:
        config["sliding_window"] = window or 64
        if "use_sliding_window" in known:
            config |= {"use_sliding_window": window is not None, "max_window_layers": 0}
    return {"model_type": family} | config


def has_window(family: str) -> bool:
    return "sliding_window" in AutoConfig.for_model(family).to_dict()


def attention_of(family: str) -> str:
    eager = ("codegen", "gemma2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "vaultgemma")
    return "eager" if family in eager else "sdpa"


def built(family: str, window: int | None = None) -> HFCausalLM:
    torch.manual_seed(SEED)
    module = HFCausalLM(config_of(family, window), attention=attention_of(family), learning_rate=0.01)
    module.configure_model()
    return module.eval()


def documents(lengths: list[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(8)
    rows = [torch.randint(3, 60, (1, length + 1), generator=generator) for length in lengths]
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in rows]


def packed(lengths: list[int], described: str) -> dict[str, Tensor]:
    """The documents as one row, which ``cu_seq_lens`` or ``position_ids`` describe."""
    row = {key: torch.cat([one[key] for one in documents(lengths)], 1) for key in ("input_ids", "labels")}
    if described == "position_ids":
        return row | {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def difference(module: HFCausalLM, described: str) -> float:
    with torch.no_grad():
        apart = torch.cat([module.predict_step(one, 0) for one in documents(LENGTHS)], 1)
        return float((module.predict_step([packed(LENGTHS, described)], 0)[0] - apart).abs().max())


@pytest.mark.parametrize("family", sorted(POSITION_ID_FAMILIES | MASKED_FAMILIES))
def test_a_packed_row_gives_what_its_documents_give_one_by_one(family: str) -> None:
    module = built(family)
    assert difference(module, "cu_seq_lens") < WITHIN
    assert difference(module, "position_ids") < WITHIN
    if has_window(family):
        windowed = built(family, WINDOW)
        if family in POSITION_ID_FAMILIES:
            assert difference(windowed, "position_ids") < WITHIN
        else:
            with pytest.raises(InputError, match=r"do not support documents together with a sliding window of 3"):
                difference(windowed, "position_ids")


@pytest.mark.parametrize("family", ["bloom", "mamba", "recurrent_gemma", "xglm"])
def test_a_family_that_mixes_documents_is_refused_by_name(family: str) -> None:
    known = AutoConfig.for_model(family).to_dict()
    config = {key: value for key, value in _SIZES.items() if key in known}
    module = HFCausalLM({"model_type": family} | config, attention="eager")
    module.configure_model()
    module.eval()
    for described in ("cu_seq_lens", "position_ids"):
        with pytest.raises(InputError, match=f"'{family}' models are not known to keep apart"):
            module.predict_step([packed(LENGTHS, described)], 0)


def test_masked_padding_may_be_beside_documents_and_before_them() -> None:
    for family in ("llama", "stablelm"):
        module, row = built(family), packed(LENGTHS, "position_ids")
        with torch.no_grad():
            expected = module.predict_step([row], 0)[0]
            for before, after in ((0, 3), (3, 0)):
                padded = {
                    key: torch.nn.functional.pad(value, (before, after), value=1)
                    for key, value in row.items()
                    if key != "labels"
                }
                mask = torch.nn.functional.pad(torch.ones_like(row["input_ids"]), (before, after))
                found = module.predict_step([padded | {"attention_mask": mask}], 0)[0]
                assert float((found[:, before : before + sum(LENGTHS)] - expected).abs().max()) < WITHIN


def test_positions_that_go_on_across_documents_contradict_them() -> None:
    row = packed(LENGTHS, "cu_seq_lens") | {"position_ids": torch.arange(sum(LENGTHS))[None]}
    with pytest.raises(InputError, match="position_ids continue where cu_seq_lens begin a document"):
        built("llama").predict_step([row], 0)


def rows_of(ends: Any) -> dict[str, Any]:
    """Two rows of five tokens, with these boundaries."""
    whole = documents([5, 5])
    rows = {key: torch.cat([one[key] for one in whole]) % VOCABULARY for key in ("input_ids", "labels")}
    return rows | {"cu_seq_lens_q": ends}


def row_of(ends: Any) -> list[dict[str, Any]]:
    """A row of 12 tokens in a list, with these boundaries."""
    row = packed([5, 4, 3], "cu_seq_lens")
    return [{key: row[key] % VOCABULARY for key in ("input_ids", "labels")} | {"cu_seq_lens_q": ends}]


STRATEGIES: dict[str, Any] = {"auto": lambda: "auto", "stages": lambda: llm("gpipe", 1)}
MODELS: dict[str, Any] = {"llama": lambda: HFCausalLM(config_of("llama")), "own": Tiny}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([rows_of(torch.tensor([0, 3, 5, 7, 10]))], r"ends at \[10\], for 2 row\(s\) of 5 tokens"),
        (rows_of(torch.tensor([0, 3, 7, 10])), r"shape \(4,\), .*for 2 (packed rows|row\(s\)) of 5 tokens"),
        (rows_of(torch.tensor([[0, 3, 5], [0, 2, 5]])), r"shape \(2, 3\), .*for 2 (packed rows|row\(s\)) of 5 tokens"),
        (rows_of([torch.tensor([0, 3, 5])]), "a list of 1 .* for 2 packed rows of 5 tokens"),
        (row_of(torch.tensor([0, 5, 9, 13])), r"ends at \[13\], for 1 row"),
        (row_of(torch.tensor([5, 9, 12])), r"begins at \[5\]"),
        (row_of(torch.tensor([0, 9, 5, 12])), "positions, ascending from 0"),
        (row_of([0, 5, 9, 12]), "'cu_seq_lens_q' is a list"),
    ],
    ids=["in a list", "across a row", "a matrix", "of one row", "too long", "from 5", "not ascending", "no tensor"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_boundaries_that_are_not_those_of_each_row_are_refused_by_every_strategy(
    model: str, strategy: str, batch: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fit(MODELS[model](), STRATEGIES[strategy](), [batch])


@pytest.mark.parametrize("model", MODELS)
def test_the_last_document_extends_to_the_end_of_the_row_in_every_strategy(model: str) -> None:
    batches = [row_of(torch.tensor(ends)) for ends in ([0, 5, 9, 12], [0, 5, 9, 10])]
    losses = []
    for make in STRATEGIES.values():
        for batch in batches:
            torch.manual_seed(SEED)
            losses.append(float(fit(MODELS[model](), make(), [batch]).callback_metrics["train_loss"]))
    assert losses == pytest.approx(losses[:1] * 4, abs=WITHIN)


class OfEmbeddings(HFCausalLM):
    """Takes embeddings in place of tokens."""

    def model_inputs(self, micro_batch: Any) -> Any:
        keywords = {key: value for key, value in micro_batch.items() if key not in ("embeddings", "labels")}
        return (), keywords | {"inputs_embeds": micro_batch["embeddings"]}


@pytest.mark.parametrize("family", ["llama", "stablelm"])
def test_documents_of_embeddings_are_kept_apart_too(family: str) -> None:
    torch.manual_seed(SEED)
    module = OfEmbeddings(config_of(family))
    module.configure_model()
    row = packed(LENGTHS, "cu_seq_lens")
    row["embeddings"] = torch.nn.functional.one_hot(row.pop("input_ids"), 32 * 2)[..., :32].float()
    ends = row["cu_seq_lens_q"].tolist()
    with torch.no_grad():
        apart = [
            module.eval().run_batch({key: row[key][:, start:end] for key in ("embeddings", "labels")})
            for start, end in pairwise(ends)
        ]
        expected = sum(float(one.loss) * one.tokens for one in apart) / sum(LENGTHS)
        assert float(module.run_batch([row]).loss) == pytest.approx(expected, abs=WITHIN)


# ---------------------------------------------------------------------- in stages


def trained(rank: int, world: int, family: str, described: str, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(SEED)
    module = HFCausalLM(config_of(family), attention=attention_of(family), learning_rate=0.01)
    losses: list[float] = []
    step = module.training_step

    def noting(batch: Any, batch_idx: int) -> Tensor:
        loss = step(batch, batch_idx)
        losses.append(float(loss.detach()))
        return loss

    module.training_step = noting  # type: ignore[method-assign]
    batch = [packed(lengths, described) for lengths in ([5, 7, 4], [8, 8])]
    fit(module, "auto" if world == 1 else llm("1f1b", 2, **options), [batch] * 3)
    return losses


@pytest.mark.parametrize(
    ("family", "described"),
    [("llama", "cu_seq_lens"), ("opt", "position_ids")],
)
def test_stages_and_context_ranks_keep_them_apart_too(family: str, described: str) -> None:
    expected = trained(0, 1, family, described, {})
    for options in ({}, {"pp": 1, "cp": 2}):
        for losses in run_ranks(trained, 2, family, described, options):
            assert losses == pytest.approx(expected, abs=WITHIN)


def test_flash_attention_gets_the_boundaries_of_all_rows() -> None:
    config = AutoConfig.for_model("llama")
    rows = [packed(lengths, "position_ids") for lengths in ([5, 7, 4], [8, 8])]
    batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    for name in ("flash_attention_2", "kernels-community/flash-attn2"):
        config._attn_implementation_internal = name
        found = HFDocumentMasking(config, torch.float32).add_document_inputs(
            batch, {"position_ids": batch["position_ids"]}
        )
        for side in ("q", "k"):
            assert found[f"cu_seq_lens_{side}"].tolist() == [0, 5, 12, 16, 24, 32]
            assert found[f"cu_seq_lens_{side}"].dtype == torch.int32
            assert found[f"max_length_{side}"] == 8
    config._attn_implementation_internal = "sdpa"
    assert "cu_seq_lens_q" not in HFDocumentMasking(config, torch.float32).add_document_inputs(batch, {})


def test_the_guide_lists_the_families() -> None:
    guide = " ".join((Path(__file__).parents[3] / "docs" / "llm_guide.md").read_text().split())
    listed = guide.split("This is supported for Hugging Face's")[1].split("Packed documents for any other")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == POSITION_ID_FAMILIES | MASKED_FAMILIES
