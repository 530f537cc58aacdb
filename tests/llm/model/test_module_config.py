"""What a model is made of: said by itself, or seen from its structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.split.stage_fqns import split_by_layer_counts

GIVEN: dict[str, Any] = {
    "num_layers": 3,
    "layer_prefix": "decoder.layers",
    "input_fqns": ["embed"],
    "output_fqns": ["norm", "head"],
    "always_keep_fqns": ["rotary"],
}


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(2))


class Model(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.rotary = Rotary()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 4)
        self._given = {**GIVEN, **given}

    def get_pp_module_config(self) -> dict[str, Any]:
        return self._given


def test_a_model_s_own_word_is_taken() -> None:
    config = derive_pp_module_config(Model())
    assert config == PPModuleConfig(3, "decoder.layers", ("embed",), ("norm", "head"), ("rotary",))
    assert config.get_layer_fqn(2) == "decoder.layers.2"
    assert config.module_fqns == (
        "embed", "decoder.layers.0", "decoder.layers.1", "decoder.layers.2", "norm", "head",
    )  # fmt: skip


def test_always_keep_fqns_may_be_left_out() -> None:
    given = {key: value for key, value in GIVEN.items() if key != "always_keep_fqns"}
    assert PPModuleConfig.from_mapping(given).always_keep_fqns == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "returned None. Expected: get_pp_module_config() returns a dict of num_layers"),
        ({**GIVEN, "layers": 3}, "returned the unknown layers. Expected"),
        ({"num_layers": 3, "layer_prefix": "layers"}, "returned no input_fqns, output_fqns. Expected"),
        ({**GIVEN, "input_fqns": "embed"}, "input_fqns='embed'; expected a list of FQNs"),
        ({**GIVEN, "output_fqns": [1]}, "output_fqns=[1]; expected a list of FQNs"),
        ({**GIVEN, "num_layers": 0}, "num_layers of get_pp_module_config() is 0; expected a whole number, 1 or more"),
    ],
)
def test_a_config_of_other_keys_or_types_is_refused(given: Any, message: str) -> None:
    with pytest.raises(SetupError) as caught:
        PPModuleConfig.from_mapping(given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_fqns": ["norm", "lm_head"]}, "names lm_head, which Model does not have; expected names of its"),
        ({"layer_prefix": "layers"}, "names layers, which Model does not have"),
        ({"num_layers": 4}, "has num_layers=4, but decoder.layers holds 3 (0, 1, 2); expected layers"),
        ({"num_layers": 2}, "has num_layers=2, but decoder.layers holds 3"),
        ({"output_fqns": ["norm", "head", "embed"]}, "lists embed twice"),
        ({"input_fqns": ["embed", "decoder"]}, "lists decoder.layers.0, decoder.layers.1, decoder.layers.2 twice"),
        ({"output_fqns": ["norm"]}, "has head.weight, head.bias, in none of the modules"),
        ({"output_fqns": ["norm"], "always_keep_fqns": ["head"]}, "trained parameter head.weight, head.bias in always"),
    ],
)
def test_a_config_that_the_model_does_not_bear_out_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        derive_pp_module_config(Model(**given))
    assert message in str(caught.value)


def test_a_parameter_of_the_model_itself_is_refused() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(
        SetupError, match=r"Model has scale, in none of the modules.*put a bare parameter into a module"
    ):
        derive_pp_module_config(model)


def test_a_frozen_parameter_may_be_on_every_stage() -> None:
    model = Model()
    model.rotary.table = nn.Parameter(torch.ones(1), requires_grad=False)
    assert derive_pp_module_config(model).always_keep_fqns == ("rotary",)


def test_layers_may_be_in_a_dictionary_and_beside_other_modules() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.blocks = nn.ModuleDict({str(index): nn.Linear(2, 2) for index in range(2)})

    PPModuleConfig(2, "blocks", ("first",)).check_against_model(Blocks())
    PPModuleConfig(2, "", ("first",)).check_against_model(
        nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "0", "1")})
    )


def test_the_layers_of_a_sequential_are_its_children() -> None:
    config = derive_pp_module_config(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert config == PPModuleConfig(3, "")
    assert split_by_layer_counts(config, [2, 1]) == [["0", "1"], ["2"]]


def test_a_sequential_with_names_of_its_own_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 2))
    with pytest.raises(SetupError, match=r"holds 1 \(first\); expected layers with the names 0 to num_layers - 1"):
        derive_pp_module_config(model)


def test_a_model_that_says_nothing_is_told_what_to_say() -> None:
    class Own(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for model in (nn.Linear(2, 2), Own(nn.Linear(2, 2))):
        with pytest.raises(SetupError) as caught:
            derive_pp_module_config(model)
        for word in (
            "get_pp_module_config()",
            "num_layers",
            "layer_prefix",
            "input_fqns",
            "output_fqns",
            "always_keep",
        ):
            assert word in str(caught.value)
