"""Plans of tensor parallelism: read from Hugging Face's configs, and refused where ranks could not follow them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.stage_module import replace_modules_of_other_stages
from lightning_pipe.llm.parallel.tensor_plan import derive_tensor_plan, resolve_parallel_styles
from tests.strategies.llm_cases import hf_config

ATTENTION = "model.layers.*.self_attn"
LLAMA = {
    f"{ATTENTION}.q_proj": "colwise",
    f"{ATTENTION}.k_proj": "colwise",
    f"{ATTENTION}.v_proj": "colwise",
    f"{ATTENTION}.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def known(kind: str, **changes: Any) -> tuple[Any, PPModuleConfig]:
    """A model without memory, and what it is made of."""
    heads = {"num_attention_heads": 4} | ({} if kind == "gpt_neox" else {"num_key_value_heads": 2})
    config: Any = AutoConfig.for_model(**hf_config(kind) | heads | changes)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    return model, derive_pp_module_config(model)


def of_every_layer(pattern: str, config: PPModuleConfig) -> list[str]:
    return [pattern.replace("*", str(index)) for index in range(config.num_layers)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", LLAMA),
        ("qwen3", LLAMA | {f"{ATTENTION}.{name}_norm": "partial_gradient" for name in "qk"}),
        (
            "gpt_neox",
            {
                "gpt_neox.layers.*.attention.query_key_value": "colwise",
                "gpt_neox.layers.*.attention.dense": "rowwise",
                "gpt_neox.layers.*.mlp.dense_h_to_4h": "colwise",
                "gpt_neox.layers.*.mlp.dense_4h_to_h": "rowwise",
            },
        ),
    ],
)
def test_hugging_faces_plan_is_taken_with_the_norms_between_its_matrices(kind: str, expected: Any) -> None:
    model, config = known(kind)
    plan = derive_tensor_plan(model, config)
    assert plan == expected
    resolved = resolve_parallel_styles(model, config, plan, 2)
    assert resolved.keys() == {name for pattern in plan for name in of_every_layer(pattern, config)}


def test_entries_of_hugging_faces_plan_for_other_kinds_of_layers_are_left_out() -> None:
    model, config = known("llama")
    more = {"layers.*.mlp.experts.*.up_proj": "colwise", "norm": "sequence_parallel", "embed_tokens": "rowwise"}
    model.config.base_model_tp_plan = model.config.base_model_tp_plan | more
    assert derive_tensor_plan(model, config) == LLAMA


def test_a_model_that_says_nothing_is_told_how() -> None:
    model, config = known("llama")
    model.config.base_model_tp_plan = None
    with pytest.raises(SetupError, match=r"get_tensor_parallel_plan\(\).*'model\.layers\.\*\.mlp\.up_proj'"):
        derive_tensor_plan(model, config)
    model.config.base_model_tp_plan = {"norm": "replicate"}
    with pytest.raises(SetupError, match=r"has no plan for tensor parallelism of its layers, got \{\}"):
        derive_tensor_plan(model, config)
    model.get_tensor_parallel_plan = lambda: None
    with pytest.raises(SetupError, match="got None"):
        derive_tensor_plan(model, config)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"model.layers.*.mlp.up_proj": "sideways"},
            "'sideways' for model.layers.*.mlp.up_proj; expected one of colwise",
        ),
        (
            {"model.layers.*.mlp.upward": "colwise"},
            "LlamaForCausalLM does not have; expected names of modules in its layers. Use names such as"
            " model.layers.*.self_attn.q_proj",
        ),
        ({"layers.*.mlp.up_proj": "colwise"}, "which LlamaForCausalLM does not have"),
        ({"model.embed_tokens": "rowwise"}, "cuts model.embed_tokens, which is in no layer"),
        ({"model.layers.*.input_layernorm": "colwise"}, "a LlamaRMSNorm; expected an nn.Linear or nn.Embedding"),
        ({"model.layers.*.mlp": RowwiseParallel()}, "a LlamaMLP; expected an nn.Linear or nn.Embedding"),
        (
            {"model.layers.*.mlp.up_proj": "colwise", "model.layers.1.mlp.up_proj": "colwise"},
            "two entries for model.layers.1.mlp.up_proj",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Any, message: str) -> None:
    model, config = known("llama")
    with pytest.raises(SetupError) as caught:
        resolve_parallel_styles(model, config, plan, 2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_key_value_heads": 1}, 2, "num_key_value_heads is 1, and model.layers.0.self_attn.q_proj is cut among 2"),
        ({}, 8, "num_attention_heads is 4, and model.layers.0.self_attn.q_proj is cut among 8"),
        ({"intermediate_size": 33}, 2, "model.layers.0.mlp.gate_proj has 33 columns, which 2 ranks cannot share"),
    ],
)
def test_widths_and_heads_that_ranks_cannot_share_are_refused(changes: Any, size: int, message: str) -> None:
    model, config = known("llama", **changes)
    with pytest.raises(SetupError, match=message):
        resolve_parallel_styles(model, config, derive_tensor_plan(model, config), size)


def test_heads_may_be_any_number_where_the_parts_are_gathered() -> None:
    model, config = known("llama", num_key_value_heads=1)
    gathered = {"colwise": "colwise_rep", "rowwise": "rowwise_rep"}
    plan = {name: gathered[str(word)] for name, word in LLAMA.items()}
    resolved = resolve_parallel_styles(model, config, plan, 2)
    kinds = {"colwise_rep": ColwiseParallel, "rowwise_rep": RowwiseParallel}
    assert {name: type(style) for name, style in resolved.items()} == {
        name: kinds[word] for pattern, word in plan.items() for name in of_every_layer(pattern, config)
    }


def test_a_stage_may_lack_the_layers_that_an_entry_is_for() -> None:
    model, config = known("llama")
    replace_modules_of_other_stages(model, config, ["model.layers.0"])
    other = {"model.layers.3.mlp.up_proj": "colwise"}
    assert resolve_parallel_styles(model, config, other, 2) == {}
    both = {**other, "model.layers.0.mlp.up_proj": "colwise"}
    assert resolve_parallel_styles(model, config, both, 2).keys() == {"model.layers.0.mlp.up_proj"}
