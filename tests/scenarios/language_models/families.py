"""Table of ``docs/families.md``: each causal LM of transformers, trained in stages and by a plain loop.

``python -m tests.scenarios.language_models.families`` prints it. Configs are made small by the names of their fields,
so a new release of transformers needs new lines only for families with sizes of their own.
"""

from __future__ import annotations

import logging
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from tests.distributed import run_ranks
from tests.strategies.llm_cases import SEED, fit, llm

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SCHEDULES = ("1f1b", "zbv_zero_bubble")
LAYERS, STEPS, COUNT = 4, 2, 2
# Float32, four layers and losses below 10: rounding of sums over 32 columns, also after a step, stays below.
WITHIN = 1e-5
CHUNK = 16  # families that one start of two processes trains


def _by_names(*pairs: tuple[Any, str]) -> dict[str, Any]:
    return {name: value for value, names in pairs for name in names.split()}


_SIZES = _by_names(
    (
        64,
        "vocab_size max_position_embeddings n_positions max_seq_len n_ctx context_length model_max_length"
        " decoder_vocab_size unpadded_vocab_size pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input"
        " max_target_positions max_source_positions",
    ),
    (
        32,
        "hidden_size n_embd d_model word_embed_proj_dim embedding_size emb_dim embedding_dim input_embedding_size"
        " output_embedding_size lru_width attention_hidden_size",
    ),
    (
        48,
        "intermediate_size n_inner ffn_dim dff dim_ff feed_forward_size ffn_hidden_size encoder_ffn_dim decoder_ffn_dim"
        " d_inner intermediate_size_mlp dense_intermediate_size shared_intermediate_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"
        " num_encoder_layers num_blocks",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads"
        " num_decoder_attention_heads num_encoder_attention_heads rotary_dim num_experts num_local_experts"
        " moe_num_experts n_routed_experts swa_num_attention_heads index_n_heads mamba_n_heads mamba_num_heads"
        " num_mamba_heads linear_num_value_heads linear_num_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads eos_token_id num_experts_per_tok"
        " num_experts_per_token top_k moe_topk moe_k top_k_experts linear_num_key_heads n_mamba_heads num_query_groups",
    ),
    (
        8,
        "adapter_rank time_step_rank mamba_dt_rank laurel_rank hidden_size_per_layer_input head_dim qk_rope_head_dim"
        " qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank d_head dim_head kv_channels swa_head_dim index_head_dim"
        " attention_head_dim attention_head_size linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head"
        " d_rel",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"
        " expert_ffn_hidden_size shared_experts_intermediate_size state_size mamba_d_state ssm_state_size"
        " router_hidden_size",
    ),
    (0, "pad_token_id"),
    (
        1,
        "bos_token_id decoder_start_token_id first_k_dense_replace n_group topk_group num_expert_group num_dense_layers"
        " n_groups num_shared_experts n_shared_experts moe_num_shared_experts mamba_n_groups",
    ),
    (1.0, "partial_rotary_factor"),
    # Below the length of the sequences, so that it has an effect.
    (
        5,
        "sliding_window sliding_window_size attention_window_size window_size keep_window_size attention_chunk_size",
    ),
    # Large enough for layers to have an effect on the loss.
    (0.2, "initializer_range init_std"),
    (3.0, "embedding_multiplier final_logit_softcapping logits_soft_cap output_logit_soft_cap"),
    (2.0, "logits_scaling lm_head_multiplier"),
    (0.5, "logit_scale"),
)
# Names of the layers' kinds, of which each layer has one.
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
# Set also where a family's default is None.
_UNSET = ("head_dim", "final_logit_softcapping")
_BLT = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": LAYERS}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {**_BLT, "hidden_size_global": 32, "num_hidden_layers": 1},
        "decoder_config": {**_BLT, "hidden_size_global": 32},
        "global_config": _BLT,
        "patcher_config": {**_BLT, "num_hidden_layers": 2},
    },
    "cohere_compass_text": {
        "num_key_value_heads": 2,
        "logit_scale": 0.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": 16, "swa_head_dim": 16, "per_layer_config": {}},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * LAYERS},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 1,
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "hc_lowrank": 8,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [2, 4],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local"] * LAYERS,
        "local_attn_chunk_length": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def _shrunk(known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in known.items():
        if isinstance(value, dict) and name.endswith(("config", "encoder", "decoder")):
            kind = value.get("model_type")
            yield name, dict(_shrunk(value)) | ({"model_type": kind} if kind else {}) | _OWN.get(str(kind), {})
        elif isinstance(value, list) and name in _KINDS and isinstance(value[0], str):
            kinds = list(dict.fromkeys(value))
            yield name, [kinds[index % len(kinds)] for index in range(LAYERS)]
        elif name in _SIZES and not isinstance(value, bool | str) and (value is not None or name in _UNSET):
            yield name, _SIZES[name]
        elif name == "is_decoder":
            yield name, True
        elif isinstance(value, float) and re.search("drop|noise", name) and "classifier" not in name:
            yield name, 0.0
        elif isinstance(value, int) and name.endswith(("token_id", "token_index")):
            yield name, 3
    if "kv_lora_rank" in known:
        yield "num_key_value_heads", 4


def config_of(family: str, **changes: Any) -> Any:
    """A small config of a family."""
    known = AutoConfig.for_model(family).to_dict()
    given = _merged(dict(_shrunk(known)), _OWN.get(family, {})) | {"model_type": family}
    return AutoConfig.for_model(**given | changes)


def _merged(given: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    inner = {name: _merged(given.get(name, {}), value) for name, value in own.items() if isinstance(value, dict)}
    return given | own | inner


def batches() -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(4, 60, (2, 9), generator=generator) for _ in range(STEPS * COUNT)]
    cut = [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in rows]
    return [cut[step * COUNT : (step + 1) * COUNT] for step in range(STEPS)]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """AdamW whose steps do not grow rounding noise."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0, eps=1e-3)


def by_a_plain_loop(config: Any) -> list[float]:
    """Losses of Hugging Face's own model, without any of this package."""
    torch.manual_seed(SEED)
    model: Any = AutoModelForCausalLM.from_config(config).train()
    optimizer = optimizer_of(model.parameters())
    balanced = getattr(config, "output_router_logits", False)
    losses = []
    for step in batches():
        tokens = sum(batch["labels"].numel() for batch in step)
        total = 0.0
        for batch in step:
            output = model(input_ids=batch["input_ids"], use_cache=False)
            logits, labels = output.logits.flatten(0, 1).float(), batch["labels"].flatten()
            loss = nn.functional.cross_entropy(logits, labels)
            if balanced:
                loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * output.aux_loss
            (loss * labels.numel() / tokens).backward()
            total += float(loss.detach()) * labels.numel() / tokens
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


class Noting(HFCausalLM):
    """Notes the losses."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.parameters())


@dataclass
class Found:
    """What training came to. Errors are texts.

    Attributes:
        plain: losses of the plain loop.
        staged: losses in stages, by schedule.
    """

    plain: list[float] | str = ""
    staged: dict[str, list[float] | str] = field(default_factory=dict)


def losses_of(train: Any) -> list[float] | str:
    try:
        losses: list[float] = train()
    except SetupError as error:
        return f"SetupError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses


def in_stages(config: Any, schedule: str) -> list[float]:
    """Losses in stages, of a model that is built without memory, or, under other schedules than the first, with it."""
    module = Noting(config)
    if schedule != SCHEDULES[0]:
        torch.manual_seed(SEED)
        module.configure_model()
    fit(module, llm(schedule, COUNT), batches())
    return module.losses


def train(rank: int, world: int, families: Sequence[str], changes: dict[str, Any]) -> dict[str, Found]:
    """Train each family on one of two ranks, by each of two ranks for every other family, and in stages."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    found = {family: Found() for family in families}
    for index, family in enumerate(families):
        if index % world == rank:
            found[family].plain = losses_of(lambda family=family: by_a_plain_loop(config_of(family, **changes)))
    for family, one in found.items():
        for schedule in SCHEDULES:
            one.staged[schedule] = losses_of(
                lambda family=family, schedule=schedule: in_stages(config_of(family, **changes), schedule)
            )
    return found


def trained(families: Sequence[str] = FAMILIES, **changes: Any) -> dict[str, Found]:
    """Train families on two ranks; ``changes`` are those of each config.

    Raises:
        AssertionError: two ranks disagree: one raised an error, or their losses differ.
    """
    found: dict[str, Found] = {}
    for begin in range(0, len(families), CHUNK):
        part = families[begin : begin + CHUNK]
        ranks = run_ranks(train, 2, part, changes)
        for index, family in enumerate(part):
            one, other = ranks[0][family], ranks[1][family]
            for schedule in SCHEDULES:
                lengths = {type(rank[family].staged[schedule]) for rank in ranks}
                assert len(lengths) == 1, f"{family} under {schedule}: {one.staged[schedule]}; {other.staged[schedule]}"
                if not isinstance(one.staged[schedule], str):
                    assert one.staged[schedule] == other.staged[schedule], f"{family} under {schedule}: losses differ"
            found[family] = Found(ranks[index % 2][family].plain, one.staged)
    return found


def outcome(found: Found, schedule: str) -> str:
    """Empty if losses are equal, otherwise the reason why there are none, or the difference."""
    staged = found.staged[schedule]
    if isinstance(found.plain, str):
        return f"not built by transformers: {_first_sentence(found.plain)}"
    if isinstance(staged, str):
        return ("" if staged.startswith("SetupError: ") else "FAILED ") + _reason(staged.removeprefix("SetupError: "))
    difference = max(abs(one - two) for one, two in zip(staged, found.plain, strict=True))
    return "" if difference < WITHIN else f"DIFFERENT by {difference:.1e}"


def _reason(error: str) -> str:
    for pattern in (
        r"cannot be cut into stages[^:]*: ([^;]*?)(?:; expected|\. Cut it|$)",
        r"(has .*, in none of the modules)",
        r"(has operations of its own .* layer), which only",
        r"(stage \d of \d ran no layer after its own)",
        r"rank 0: (.* are one parameter)",
    ):
        if match := re.search(pattern, error.replace("\n", " ")):
            return match[1]
    return _first_sentence(error)


def _first_sentence(error: str) -> str:
    return " ".join(re.split(r"(?<=[^.])\. |\n\n", error.strip())[0].split()).strip(" .")


def tables(found: dict[str, Found]) -> str:
    """Markdown of the page's tables."""
    first, second = ({family: outcome(one, schedule) for family, one in found.items()} for schedule in SCHEDULES)
    equal = [family for family in found if not first[family] and not second[family]]
    partly = [family for family in found if not first[family] and second[family]]
    lacking = [family for family in found if isinstance(found[family].plain, str)]
    refused = [family for family in found if first[family] and family not in lacking]
    lines = [
        f"Of {len(found)} families, {len(equal)} are equal under both schedules (transformers"
        f" {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}):",
        "",
        textwrap.fill(f"{', '.join(map(_code, equal))}.", 120, break_on_hyphens=False),
    ]
    for families, title, results in (
        (partly, "equal under 1F1B, refused under ZBV zero bubble", second),
        (refused, "refused", first),
        (lacking, "not tried", first),
    ):
        lines += ["", f"| {title} | reason |", "| --- | --- |"]
        lines += [f"| {_code(family)} | {_escaped(results[family])} |" for family in families]
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`{text}`"


def _escaped(text: str) -> str:
    names = r"(?<!')\b(\w+\.)*\w+_\w+(\.\w+)*|(?<!')\b\w+(\.\w+)+"
    return re.sub(names, lambda match: _code(match[0]), text.replace("|", "\\|"))


if __name__ == "__main__":
    print(tables(trained()))
