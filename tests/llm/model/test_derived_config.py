"""What a causal LM does between its modules is found without them, and refused where stages would do something else."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.derived_config import (
    derive_pp_module_config,
    refine_module_config_by_trial_run,
    returns_head_results,
)
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from lightning_pipe.llm.model.module_config import PPModuleConfig

WIDTH, WORDS = 4, 7


class Layer(nn.Module):
    def __init__(self, results: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.results = results

    def forward(self, hidden: Tensor, mask: Tensor | None = None, other: Any = None, *, extra: Any = None) -> Any:
        hidden = hidden + self.inner(hidden)
        return (hidden, hidden * 2, None)[: self.results] if self.results else hidden


class Base(nn.Module):
    """A model that does one more thing than a plain one, by its name."""

    def __init__(self, does: str, layers: int) -> None:
        super().__init__()
        self.does = does
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(3 if "results" in does else 0) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Buffer(torch.ones(1))

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None
    ) -> Any:
        assert use_cache is False
        does = self.does
        embeddings = hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        mask = None
        if does == "masks padding" and input_ids is not None:
            mask = input_ids != 0
        if does == "adds positions":
            hidden = hidden + self.positions(torch.arange(hidden.shape[1])[None])
        if does == "adds a buffer":
            hidden = hidden + self.scale
        if does == "multiplies by a buffer":
            hidden = hidden * self.scale
        if does == "turns rows into columns":
            hidden = hidden.transpose(0, 1)
        if does == "uses the norm before":
            hidden = self.norm(hidden)
        before = hidden
        further = None
        for index, layer in enumerate(self.layers):
            if does == "leaves one out" and index == 1:
                continue
            given = {"extra": embeddings} if does == "sends embeddings" else {}
            given |= {"extra": before} if does == "sends an earlier result" and index == 2 else {}
            before = hidden
            if "results" in does:
                hidden, further, _ = layer(hidden, mask, further if does == "passes results on" else None)
            else:
                hidden = layer(hidden, mask, **given)
            if does == "scales between":
                hidden = hidden * 2
        if does == "repeats":
            hidden = self.layers[0](hidden, mask)
        if does == "reads a weight":
            hidden = hidden + self.tower.weight.sum()
        hidden = self.norm(hidden)
        return (hidden * 3 if does == "scales after" else hidden,)


class CausalLM(nn.Module):
    """In the form of Hugging Face's."""

    base_model_prefix = "model"

    def __init__(self, does: str = "nothing", layers: int = 3) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=0)
        self.does = does
        self.model = Base(does, layers)
        self.lm_head = nn.Linear(WIDTH, WORDS)
        if does == "adds logits of tokens":
            self.of_tokens = nn.Embedding(WORDS, WORDS)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, **given: Any) -> Tensor:
        logits: Tensor = self.lm_head(self.model(**given)[0])
        if self.does == "adds logits of tokens" and "input_ids" in given:
            logits = logits + self.of_tokens(given["input_ids"])
        return logits.tanh() if self.does == "caps logits" else logits


def config_of(does: str) -> PPModuleConfig:
    return derive_pp_module_config(CausalLM(does))


def test_modules_go_where_the_forward_calls_them() -> None:
    config = config_of("adds positions")
    assert config.input_fqns == ("model.embed", "model.positions", "model.tower")  # the tower is not called
    assert config.output_fqns == ("model.norm", "lm_head")
    assert config.trial is not None
    assert "model.tower" not in config.trial.called


@pytest.mark.parametrize(
    ("does", "starts", "ends", "logits"),
    [
        ("nothing", True, True, True),
        ("adds positions", False, True, True),
        ("adds a buffer", False, True, True),
        ("multiplies by a buffer", False, True, True),
        ("scales after", True, False, True),
        ("caps logits", True, True, False),
    ],
)
def test_operations_before_and_after_the_layers_and_on_logits_are_seen(
    does: str, starts: bool, ends: bool, logits: bool
) -> None:
    trial = config_of(does).trial
    assert trial is not None
    assert (trial.starts_plain, trial.ends_plain, trial.logits_plain) == (starts, ends, logits)
    assert returns_head_results(CausalLM(does)) is logits


@pytest.mark.parametrize(("does", "results"), [("nothing", 0), ("takes results", 3)])
def test_the_number_of_a_layers_results_is_found(does: str, results: int) -> None:
    trial = config_of(does).trial
    assert trial is not None
    assert trial.layer_results == results


def test_a_layer_that_token_ids_do_not_need_may_be_left_out() -> None:
    trial = config_of("leaves one out").trial
    assert trial is not None
    assert [name for name in trial.called if "layers" in name] == ["model.layers.0", "model.layers.2"]


REFUSED = {
    "scales between": "changes the hidden states between model.layers.0 and model.layers.1",
    "repeats": "runs model.layers.0, model.layers.1, model.layers.2, model.layers.0; expected",
    "turns rows into columns": "layer model.layers.0 receives (3, 5, 4) for 5 rows of 3 tokens",
    "sends embeddings": "layer model.layers.1 receives extra, which later stages cannot compute",
    "sends an earlier result": "layer model.layers.2 receives extra, which later stages cannot compute",
    "masks padding": "layer model.layers.0 receives mask, which later stages cannot compute",
    "passes results on": "layer model.layers.1 receives a further result of an earlier layer as other",
    "reads a weight": "with its modules replaced, model fails with AttributeError: 'types.SimpleNamespace'",
    "adds logits of tokens": "its forward uses of_tokens or not, by token ids; the last stage has none",
    "uses the norm before": "uses model.norm before and after a layer of model.layers",
}


@pytest.mark.parametrize("does", REFUSED)
def test_what_stages_would_do_otherwise_is_refused_with_the_module(does: str) -> None:
    with pytest.raises(SetupError, match=f"CausalLM cannot be cut into stages.*{re.escape(REFUSED[does])}"):
        config_of(does)
    assert returns_head_results(CausalLM(does)) is False  # it may be trained on one device all the same


def test_layers_that_are_skipped_at_random_are_refused() -> None:
    model = CausalLM()
    model.model.layerdrop = 0.1  # type: ignore[assignment]
    with pytest.raises(SetupError, match=r"skips layers at random, with a layerdrop of 0\.1; .* to 0\.0 in the config"):
        derive_pp_module_config(model)


def test_a_trial_says_how_to_cut_by_hand() -> None:
    with pytest.raises(SetupError, match="return a list of modules from build_model"):
        config_of("repeats")


def test_a_config_of_a_users_own_is_tried_too() -> None:
    given = PPModuleConfig(
        3, "model.layers", ("model.embed", "model.norm", "model.positions", "model.tower"), ("lm_head",)
    )
    config = refine_module_config_by_trial_run(CausalLM(), given)
    assert config.input_fqns == ("model.embed", "model.positions", "model.tower")
    assert config.output_fqns == ("model.norm", "lm_head")
    assert refine_module_config_by_trial_run(CausalLM(), config) is config
    assert refine_module_config_by_trial_run(nn.Sequential(), given) is given


def test_a_trial_takes_no_memory_and_no_random_numbers_and_changes_nothing() -> None:
    with parameters_on_meta():
        model = CausalLM("multiplies by a buffer")
    random = torch.get_rng_state()
    found = derive_pp_module_config(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(one.is_meta for one in model.parameters())
    assert found == derive_pp_module_config(CausalLM())
    assert derive_pp_module_config(CausalLM("multiplies by a buffer")).trial == found.trial
    assert not any(module._forward_hooks for module in model.modules())
