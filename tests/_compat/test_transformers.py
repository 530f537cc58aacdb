"""Contracts with transformers 5: files become a model's tensors as ``from_pretrained`` makes them.

A failure means that transformers has changed: look for a public way first, then adapt
``lightning_pipe/_compat/transformers.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.masking_utils
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from lightning_pipe._compat.transformers import (
    disable_packed_sequence_detection,
    filter_ignored_keys,
    find_weight_conversions,
    is_pretrained_model,
    skip_weight_init,
)

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def mixture() -> Any:
    return model_of(MixtralConfig(**SIZES, num_local_experts=3))


def stored(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_experts_whose_parts_have_other_numbers_are_refused(mixture: Any, tmp_path: Path) -> None:
    tensors = {re.sub(r"experts\.1\.w1", "experts.9.w1", name): one for name, one in stored(mixture, tmp_path).items()}
    conversions, _ = find_weight_conversions(mixture, tensors)
    wrong = next(one for one in conversions if any("experts.9" in name for name in one.sources))
    with pytest.raises(ValueError, match="other numbers in some of their parts"):
        wrong.convert_tensors(tensors, mixture)


def test_models_of_transformers_are_known() -> None:
    assert is_pretrained_model(model_of(LlamaConfig(**SIZES)))
    assert not is_pretrained_model(nn.Linear(2, 2))


def test_without_initializers_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    with skip_weight_init():
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert torch.equal(torch.get_rng_state(), before)


def test_experts_that_are_stored_one_by_one_become_one_tensor_of_the_model(mixture: Any, tmp_path: Path) -> None:
    files = stored(mixture, tmp_path)
    experts = [name for name in files if ".experts.0." in name]
    assert len(experts) == 2 * 3, "transformers stores the experts of a mixture together: conversions are not needed"
    conversions, unexpected = find_weight_conversions(mixture, files)
    assert unexpected == []
    found: dict[str, Tensor] = {}
    for conversion in conversions:
        found |= conversion.convert_tensors({name: files[name] for name in conversion.sources}, mixture)
    state = mixture.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_conversion_runs_without_data_and_more_than_once(mixture: Any, tmp_path: Path) -> None:
    files = {name: one.to("meta") for name, one in stored(mixture, tmp_path).items()}
    conversions, _ = find_weight_conversions(mixture, files)
    shapes = {name: one.shape for name, one in mixture.state_dict().items()}
    for _ in range(2):
        for conversion in conversions:
            results = conversion.convert_tensors({name: files[name] for name in conversion.sources}, mixture)
            assert {name: one.shape for name, one in results.items()} == {name: shapes[name] for name in results}


def test_names_that_a_model_does_not_have_are_unexpected(mixture: Any) -> None:
    names = ["model.norm.weight", "model.other.weight", "model.layers.7.block_sparse_moe.experts.0.w1.weight"]
    conversions, unexpected = find_weight_conversions(mixture, names)
    assert [one.first for one in conversions] == ["model.norm.weight"]
    assert unexpected[0] != "model.norm.weight"
    assert len(unexpected) >= 2


def test_names_that_a_class_ignores_are_left_out() -> None:
    model = model_of(LlamaConfig(**SIZES))
    older = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert filter_ignored_keys(model, ["a"], ["b", older]) == (["a"], ["b"])


def test_without_data_rows_are_taken_for_one_document_and_afterwards_no_more() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    find: Any = transformers.masking_utils.find_packed_sequence_indices
    assert find(positions).tolist() == [[0, 0, 1, 1, 1]]
    with disable_packed_sequence_detection():
        inside: Any = transformers.masking_utils.find_packed_sequence_indices
        assert inside(positions) is None
    assert transformers.masking_utils.find_packed_sequence_indices is find
