"""Stages of a model: run one after the other they are the model, to the bit, under the model's own names."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.slots import PassThroughLayer, PassThroughNonLayerModule, StageHiddenStates
from lightning_pipe.llm.model.stage_module import (
    PassThroughModule,
    StageModule,
    check_no_ops_outside_modules,
    copy_model_sharing_tensors,
    make_stage_module,
    tied_parameters,
)
from lightning_pipe.llm.split.stage_fqns import split_layers_evenly

VOCABULARY, LENGTH, WIDTH = 32, 7, 16
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.out(mixed)


class Transformer(nn.Module):
    """A model of a user's own; ``container`` is what its layers are in."""

    def __init__(self, container: Callable[[list[nn.Module]], nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = container([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_pp_module_config(self) -> dict[str, Any]:
        return {
            "num_layers": 4,
            "layer_prefix": "layers",
            "input_fqns": ["embed"],
            "output_fqns": ["norm", "head"],
        }

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:  # type: ignore[union-attr]
            x = layer(x, mask)
        y: torch.Tensor = self.head(self.norm(x))
        return y


def sequential() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers)


def by_name(layers: list[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})


def llama(**given: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 2, **given}))


def qwen3(**given: Any) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "num_key_value_heads": 1, "head_dim": 8, **given}))


def sliding_qwen3() -> nn.Module:
    return qwen3(use_sliding_window=True, sliding_window=2, max_window_layers=2)


def gpt_neox(**given: Any) -> nn.Module:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**SMALL, **given}))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": sequential,
    "own": Transformer,
    "own, layers in a dictionary": lambda: Transformer(by_name),
    "llama": llama,
    "qwen3": qwen3,
    "qwen3 with layers of two kinds": sliding_qwen3,
    "gpt_neox": gpt_neox,
}
HUGGING_FACE = [name for name in MODELS if name.startswith(("llama", "qwen3", "gpt_neox"))]

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCABULARY
# Two documents in each row.
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4]])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def backward_of(output: torch.Tensor) -> None:
    output.backward(torch.linspace(-1.0, 1.0, output.numel()).view_as(output))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def whole(model: nn.Module, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    # With a cache, Hugging Face's masks know nothing of documents that begin in the middle of a row.
    output = model(TOKENS, **({"use_cache": False} if hasattr(model, "config") else {}), **kwargs)
    output = output if isinstance(output, torch.Tensor) else output.logits
    backward_of(output)
    return output.detach(), gradients(model)


def stages_of(model: nn.Module, num_stages: int) -> list[StageModule]:
    config = derive_pp_module_config(model)
    parts = split_layers_evenly(config, num_stages)
    return [
        make_stage_module(copy_model_sharing_tensors(model), config, part, index, num_stages)
        for index, part in enumerate(parts)
    ]


def staged(model: nn.Module, stages: list[StageModule], **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Forward and backward stage by stage, each with a graph of its own, as in a pipeline."""
    runs: list[tuple[torch.Tensor, torch.Tensor]] = []
    passed = TOKENS
    for stage in stages:
        given = passed.detach().requires_grad_(passed.is_floating_point())
        passed = stage(given, **kwargs)
        runs.append((given, passed))
    backward_of(passed)
    for (given, _), (_, before) in zip(runs[:0:-1], runs[-2::-1], strict=True):
        before.backward(given.grad)
    return passed.detach(), gradients(model)


def assert_same(model: nn.Module, num_stages: int, **kwargs: Any) -> None:
    stages = stages_of(model, num_stages)
    torch.manual_seed(1)
    wanted, wanted_gradients = whole(model, **kwargs)
    torch.manual_seed(1)
    found, found_gradients = staged(model, stages, **kwargs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(wanted_gradients) == len(list(model.parameters()))
    assert found_gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=0, atol=0, msg=name)


# One after the other


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_stages_one_after_the_other_are_the_model(name: str, num_stages: int) -> None:
    assert_same(MODELS[name](), num_stages)


@pytest.mark.parametrize("name", ["own", *HUGGING_FACE])
def test_every_stage_goes_by_the_mask_and_the_positions_that_it_is_given(name: str) -> None:
    model = MODELS[name]()
    own = name == "own"
    mask = torch.eye(LENGTH, dtype=torch.bool).expand(*(() if own else (2, 1)), LENGTH, LENGTH)
    given: list[dict[str, Any]] = [{"mask": mask}] if own else [{"attention_mask": mask}, {"position_ids": POSITIONS}]
    for keywords in given:
        assert not torch.equal(whole(model, **keywords)[0], whole(model)[0])
        assert_same(model, 3, **keywords)


def test_dropout_after_the_embedding_is_drawn_once() -> None:
    assert_same(gpt_neox(hidden_dropout=0.5, attention_dropout=0.5), 3)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_logits_are_scaled_once(num_stages: int) -> None:
    given = {**SMALL, "num_key_value_heads": 2, "logits_scaling": 8.0}
    assert_same(GraniteForCausalLM(GraniteConfig(**given)), num_stages)


def test_what_forward_and_registration_order_differently_goes_where_forward_has_it() -> None:
    given = {**SMALL, "num_key_value_heads": 2, "embd_pdrop": 0.5, "pad_token_id": 0}
    model = PhiForCausalLM(PhiConfig(**given))
    assert [name for name, _ in model.model.named_children()].index("embed_dropout") > 1
    assert derive_pp_module_config(model).input_fqns == ("model.embed_tokens", "model.embed_dropout")
    assert_same(model, 3)


def test_the_last_stage_gives_logits_whatever_else_the_model_returns() -> None:
    given = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    stages = stages_of(AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **given)), 2)
    assert stages[1](*stages[0](TOKENS)).shape == (2, LENGTH, VOCABULARY)


def test_no_cache_of_keys_and_values_is_kept() -> None:
    model = llama(use_cache=True)
    caches: list[Any] = []
    layers: Any = model.model.layers  # type: ignore[union-attr]
    # The argument has another name in transformers 5.24.
    (cached,) = {"cache", "past_key_values"} & inspect.signature(layers[0].forward).parameters.keys()
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, __, kwargs: caches.append(kwargs[cached]), with_kwargs=True)
    staged(model, stages_of(model, 2))
    assert caches == [None] * 4


# Names


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_each_key_of_the_model_is_on_one_stage_under_its_own_name(name: str, num_stages: int) -> None:
    model = MODELS[name]()
    stages = stages_of(model, num_stages)
    keys = Counter(key for stage in stages for key in stage.module.state_dict())
    assert keys == Counter(model.state_dict().keys())
    unsplit = dict(model.named_parameters())
    for stage in stages:
        assert all(unsplit[key] is parameter for key, parameter in stage.module.named_parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ("model.", ["embed_tokens"], ["norm"], "lm_head", "rotary_emb")),
        ("qwen3", ("model.", ["embed_tokens"], ["norm"], "lm_head", "rotary_emb")),
        ("gpt_neox", ("gpt_neox.", ["embed_in", "emb_dropout"], ["final_layer_norm"], "lm_head", "rotary_emb")),
    ],
)
def test_the_structure_of_hugging_face_models_is_seen(name: str, expected: tuple[str, Any, Any, str, str]) -> None:
    base, before, after, head, rotary = expected
    assert derive_pp_module_config(MODELS[name]()) == PPModuleConfig(
        4,
        f"{base}layers",
        tuple(base + name for name in before),
        (*(base + name for name in after), head),
        (base + rotary,),
    )


def test_experts_are_not_taken_for_layers() -> None:
    given = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **given))
    config = derive_pp_module_config(model)
    assert (config.layer_prefix, config.num_layers) == ("model.layers", 2)


# Pruning


def test_a_stand_in_holds_nothing_and_hands_on_its_first_argument() -> None:
    replaced = nn.Linear(2, 3).eval()
    replaced.attention_type = "sliding"  # type: ignore[assignment]
    replaced.forward = lambda _: torch.zeros(1)  # type: ignore[method-assign, assignment]
    stand_in, x = PassThroughModule(replaced), torch.ones(2)
    assert not list(stand_in.state_dict())
    assert stand_in(x, 1, mask=2) is x
    assert stand_in(hidden=x, mask=2) is x
    assert PassThroughLayer(replaced, 2, StageHiddenStates(), False, False)(x) == (x, None)
    assert vars(stand_in).items() >= {"in_features": 2, "attention_type": "sliding", "training": False}.items()


def test_a_hugging_face_stage_takes_one_positional_argument() -> None:
    with pytest.raises(InputError, match=r"stage 1 was called with 2 positional .* Pass the others as keywords"):
        stages_of(llama(), 2)[1](torch.zeros(1, 2, WIDTH), None)


# Operations of a forward between modules


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=4, n_head=2, n_positions=WIDTH))


def scaled_granite() -> nn.Module:
    return GraniteForCausalLM(GraniteConfig(**{**SMALL, "num_key_value_heads": 2, "embedding_multiplier": 3.0}))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("build", [gpt2, scaled_granite])
def test_operations_before_the_layers_are_those_of_the_first_stage(
    build: Callable[[], nn.Module], num_stages: int
) -> None:
    model = build()
    assert_same(model.eval(), num_stages)


@pytest.mark.parametrize(
    ("held", "index", "ran", "place"),
    [
        (["transformer.wte", "transformer.h.0"], 0, slice(1), "after"),
        (["transformer.h.1", "transformer.h.2"], 1, slice(1, None), "before"),
    ],
)
def test_a_stage_that_runs_no_layer_where_hidden_states_leave_or_enter_is_an_error(
    held: list[str], index: int, ran: slice, place: str
) -> None:
    model = gpt2()
    stage = make_stage_module(copy_model_sharing_tensors(model), derive_pp_module_config(model), held, index, 3)
    stage.module.transformer.h = stage.module.transformer.h[ran]  # type: ignore[union-attr, index]
    with pytest.raises(SetupError, match=rf"stage {index} of 3 ran no layer {place} its own"):
        stage(torch.rand(2, LENGTH, WIDTH) if index else TOKENS)


def test_a_module_that_token_ids_do_not_need_is_an_error_where_it_is_called() -> None:
    slot = PassThroughNonLayerModule(nn.Linear(2, 3), WIDTH, "vision_tower")
    with pytest.raises(InputError, match=r"calls vision_tower, which only stage 0 holds; expected a batch of tokens"):
        slot(torch.ones(2))


# Models of a user's own that cannot be cut


def test_a_model_of_a_user_s_own_can_be_tried() -> None:
    class Scaled(Transformer):
        def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return 2 * super().forward(tokens, mask)

    hidden = torch.rand(2, LENGTH, WIDTH)
    model = Transformer()
    check_no_ops_outside_modules(model, derive_pp_module_config(model), hidden, mask=None)
    with pytest.raises(SetupError, match=r"Scaled cannot be cut.*changes its input"):
        check_no_ops_outside_modules(Scaled(), derive_pp_module_config(model), hidden, mask=None)


@pytest.mark.parametrize("multiplies", [True, False])
def test_trying_a_model_sees_a_buffer_on_the_hidden_states(multiplies: bool) -> None:
    class Buffered(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Buffer(torch.rand(1))

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            hidden = super().forward(tokens, mask)
            return hidden * self.extra if multiplies else hidden + self.extra

    model = Buffered()
    with pytest.raises(SetupError, match=r"Buffered cannot be cut.*changes its input"):
        check_no_ops_outside_modules(model, derive_pp_module_config(model), torch.rand(2, LENGTH, WIDTH))


class Dropping(Transformer):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return functional.dropout(super().forward(tokens, mask), 0.5, self.training)


def test_trying_a_model_sees_what_only_training_does_and_draws_no_random_numbers_from_it() -> None:
    model = Dropping().eval()
    random = torch.get_rng_state()
    with pytest.raises(SetupError, match=r"Dropping cannot be cut.*changes its input"):
        check_no_ops_outside_modules(
            model, derive_pp_module_config(model), torch.rand(2, LENGTH, WIDTH, generator=torch.Generator())
        )
    assert torch.equal(torch.get_rng_state(), random)


def test_trying_a_model_does_not_change_it() -> None:
    for model, config in ((gpt_neox().eval(), None), (Transformer().eval(), derive_pp_module_config(Transformer()))):
        before = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
        if config is None:
            derive_pp_module_config(model)
        else:
            check_no_ops_outside_modules(model, config, torch.rand(2, LENGTH, WIDTH))
        assert not any(module.training or module._forward_pre_hooks for module in model.modules())
        assert not any(isinstance(module, PassThroughModule) for module in model.modules())
        after = dict([*model.named_parameters(), *model.named_buffers()])
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())


# Copies and ties


def test_a_shallow_copy_has_modules_of_its_own_over_the_same_tensors() -> None:
    model = llama(tie_word_embeddings=True)
    model.note = torch.ones(1)
    model.register_buffer("table", torch.ones(1))
    copied = copy_model_sharing_tensors(model)
    assert not {id(module) for module in copied.modules()} & {id(module) for module in model.modules()}
    for kind in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(model, kind)(remove_duplicate=False))
        copies = dict(getattr(copied, kind)(remove_duplicate=False))
        assert tensors.keys() == copies.keys()
        assert all(copies[name] is tensor for name, tensor in tensors.items())
    assert copied.note is model.note


def test_tied_parameters_are_named_together() -> None:
    assert tied_parameters(llama()) == []
    assert tied_parameters(llama(tie_word_embeddings=True)) == [["model.embed_tokens.weight", "lm_head.weight"]]
