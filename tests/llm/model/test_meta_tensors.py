"""Models on the meta device: the same initial values in every part, and shapes without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.meta_tensors import fake_copy, initialize_modules, parameters_on_meta
from lightning_pipe.llm.model.module_config import is_inside
from lightning_pipe.llm.model.stage_module import named_parameters_and_buffers

NAMES = ("embed", "layers.0", "layers.1", "layers.2", "head")


class Decoder(nn.Module):
    """A tied head, attention with parameters of its own, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.head.bias.no_weight_decay = True  # type: ignore[attr-defined]
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8)))


class Initialized(Decoder):
    """Initializes linear layers and embeddings again, as models of Hugging Face do."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def llama() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    config = AutoConfig.for_model("llama", num_attention_heads=2, tie_word_embeddings=True, **sizes)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def initialized(kind: Any, *kept: str, seed: int = 0) -> Any:
    """A model of which the kept modules are initialized (default: all)."""
    with parameters_on_meta():
        model = kind()
    config = derive_pp_module_config(model) if kind is llama else None
    names = NAMES if config is None else (*config.module_fqns, *config.always_keep_fqns)
    initialize_modules(model, names, lambda name: not kept or is_inside(name, set(kept)), seed)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(named_parameters_and_buffers(model))


@pytest.mark.parametrize("kind", [Decoder, Initialized, llama])
def test_parts_have_the_values_of_the_whole_model_to_the_bit(kind: Any) -> None:
    whole, outright = tensors_of(initialized(kind)), tensors_of(kind())
    base = "model." if kind is llama else ""
    embed, head = ("model.embed_tokens", "lm_head") if kind is llama else ("embed", "head")
    for part in [(embed, f"{base}layers.0"), (f"{base}layers.1",), (f"{base}layers.2", head)]:
        found = tensors_of(initialized(kind, *part))
        made = {name for name, one in found.items() if not one.is_meta}
        assert {name for name in found if is_inside(name, set(part))} <= made
        assert not any(is_inside(name, {f"{base}layers.{index}" for index in range(3)} - {*part}) for name in made)
        assert all(torch.equal(found[name], whole[name]) for name in made)
    assert not any(one.isnan().any() for one in whole.values())
    kinds = [
        [(name, type(one), one.shape, one.dtype, one.requires_grad, one.stride()) for name, one in tensors.items()]
        for tensors in (whole, outright)
    ]
    assert kinds[0] == kinds[1]


def test_values_are_those_of_the_initializers() -> None:
    plain, normal = initialized(Decoder), initialized(Initialized)
    assert plain.embed.weight is plain.head.weight
    assert plain.head.bias.no_weight_decay
    assert plain.embed.weight[2].eq(0).all()
    assert plain.embed.weight.std() > 0.5 > 0.05 > normal.embed.weight.std()
    assert plain.layers[0].norm1.weight.eq(1).all()
    assert normal.layers[0].linear1.weight.abs().max() < 0.1 < plain.layers[0].linear1.weight.abs().max()
    assert not torch.equal(plain.layers[0].linear1.weight, plain.layers[2].linear1.weight)
    assert not torch.equal(plain.embed.weight, initialized(Decoder, seed=1).embed.weight)
    assert torch.equal(plain.inv_freq, tensors_of(Decoder())["inv_freq"])


def test_initializing_draws_no_numbers_of_the_caller() -> None:
    with parameters_on_meta():
        model = Decoder()
    state = torch.get_rng_state()
    initialize_modules(model, NAMES, lambda name: True, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parameter_that_no_initializer_sets_is_an_error() -> None:
    class Scaled(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].scale = nn.Parameter(torch.ones(8))

    initialized(Scaled, "layers.1")
    with pytest.raises(SetupError, match=r"layers\.2\.scale of the Scaled .* no values: neither reset_parameters"):
        initialized(Scaled, "layers.2")


def test_buffers_on_the_meta_device_are_an_error() -> None:
    with torch.device("meta"):
        model = Decoder()
    with pytest.raises(SetupError, match=r"inv_freq of the Decoder .* Build the model inside parameters_on_meta"):
        initialize_modules(model, NAMES, lambda name: True, 0)


@pytest.mark.parametrize("real", [True, False])
def test_a_fake_copy_tells_output_shapes_without_memory(real: bool) -> None:
    if real:
        model = Decoder()
    else:
        with parameters_on_meta():
            model = Decoder()
    fake: Any
    fake, mode = fake_copy(model)
    with mode:
        output = fake.head(fake.layers[0](fake.embed(torch.zeros(2, 5, dtype=torch.long))))
    assert output.shape == (2, 5, 11)
    found, given = tensors_of(fake), tensors_of(model)
    assert all(isinstance(one, FakeTensor) for one in found.values())
    assert found["head.weight"] is found["embed.weight"]
    for name, one in found.items():
        assert isinstance(one, nn.Parameter) == isinstance(given[name], nn.Parameter)
        assert (one.shape, one.dtype, one.requires_grad) == (
            given[name].shape,
            given[name].dtype,
            given[name].requires_grad,
        )
