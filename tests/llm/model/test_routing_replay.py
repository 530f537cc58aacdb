"""Choices of experts are recorded in one forward and replayed in later ones, or come with the batch."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2Moe

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.losses.router_losses import RouterLosses
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.moe import MoE
from lightning_pipe.llm.model.routing_replay import (
    MoEBlockInfo,
    RoutingReplay,
    check_routed_experts,
    find_moe_blocks,
    install_moe_block_tracking,
)
from lightning_pipe.llm.model.stage_module import make_stage_module
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from tests.distributed import run_ranks
from tests.scenarios.language_models.test_hf_documents import attention_of, config_of
from tests.scenarios.language_models.test_hf_families import COUNT, MIXTURES, WITHIN, Noting, batches, save_model
from tests.strategies.llm_cases import SEED, fit, llm
from tests.tiers import sampled

EXPERTS, CHOSEN, LAYERS = 4, 2, 4


def family_model(family: str) -> Any:
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(HFCausalLM(config_of(family), attention=attention_of(family)).config)
    install_moe_block_tracking(model, derive_pp_module_config(model).layer_fqns)
    return model.train()


def routers(model: nn.Module) -> list[nn.Parameter]:
    return [one for name, one in model.named_parameters() if ".gate.weight" in name or ".router." in name]


@pytest.mark.parametrize("family", sampled(MIXTURES, lambda family: family in ("deepseek_v3", "qwen3_moe")))
def test_recorded_choices_are_replayed_by_a_router_that_has_changed(family: str) -> None:
    model, ids = family_model(family), batches()[0][0]["input_ids"]

    def logits(replay: RoutingReplay) -> Tensor:
        with replay:
            return model(input_ids=ids, use_cache=False).logits

    plain = model(input_ids=ids, use_cache=False).logits
    recorded = RoutingReplay()
    assert torch.equal(logits(recorded), plain)
    layers = recorded.recorded_choices
    assert layers
    assert all(one.shape == (*ids.shape, one.shape[-1]) for one in layers.values())
    with torch.no_grad():
        for router in routers(model):
            router.copy_(router.flip(0))
    other = RoutingReplay()
    natural = logits(other)
    assert any(not torch.equal(one, layers[index]) for index, one in other.recorded_choices.items())
    replayed = logits(recorded)
    assert not torch.equal(replayed, natural)
    # The same choices, given as an inference engine gives them: for all layers.
    k = next(iter(layers.values())).shape[-1]
    given = torch.full((*ids.shape, max(layers) + 1, k), -1)
    for index, one in layers.items():
        given[:, :, index] = one
    assert torch.equal(logits(RoutingReplay(given)), replayed)
    replayed.square().sum().backward()
    if k > 1:  # with one expert, weights that add up to 1 do not depend on the router
        assert all(one.grad is not None and one.grad.any() for one in routers(model))


def test_replayed_experts_are_not_masked_by_a_router_that_limits_its_choice_to_groups() -> None:
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "n_group": 2,
        "topk_group": 1,
        "hidden_size": 8,
    }
    sizes |= {"moe_intermediate_size": 8, "n_shared_experts": 1, "num_attention_heads": 2}
    block: Any = DeepseekV2Moe(DeepseekV2Config(topk_method="group_limited_greedy", **sizes))
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    model, x = nn.Sequential(block), torch.randn(3, 5, 8)
    install_moe_block_tracking(model, ["0"])
    # Each token has the two experts of one group.
    group = torch.randint(2, (3, 5, 1, 1), generator=torch.Generator().manual_seed(3))
    given = torch.cat([2 * group, 2 * group + 1], -1)
    with RoutingReplay(given):
        limited = model(x)
    block.gate.topk_method = "greedy"
    with RoutingReplay(given):
        assert torch.equal(limited, model(x))


class Contrary(nn.Linear):
    """A router that prefers other experts in its second call, as a kernel that is not deterministic might."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores = super().forward(x)
        return scores if self.calls == 1 else scores - 100 * F.one_hot(scores.argmax(-1), scores.shape[-1])


@pytest.mark.parametrize("within", [True, False])
def test_a_recomputed_layer_replays_the_choices_of_its_forward(within: bool) -> None:
    torch.manual_seed(1)
    layer = MoE(6, 10, EXPERTS, 1)
    router = layer.router = Contrary(6, EXPERTS, bias=False)
    model = nn.Sequential(layer)
    config = PPModuleConfig(1, "")
    stage = make_stage_module(model, config, ["0"], 0, 1)
    StageParallelism(activation_checkpoint=ActivationCheckpoint()).apply(stage, config, {})
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2), requires_grad=True)
    replay = RoutingReplay()
    with replay if within else nullcontext():
        output = stage(x)
    output.sum().backward()
    assert router.calls == 2
    used = set(F.linear(x, router.weight).argmax(-1).tolist())
    assert not within or used == set(replay.recorded_choices[0].flatten().tolist())
    assert 0 < len(used) < EXPERTS
    gradient = layer.experts.down.grad
    assert gradient is not None
    with_gradient = {index for index, one in enumerate(gradient) if one.any()}
    assert with_gradient == used


class Several(nn.Module):
    """A layer with two mixtures, or with one that it calls twice."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(MoE(6, 10, EXPERTS, CHOSEN) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        return self.mixtures[-1](x.flip(-2) + self.mixtures[0](x))


class OneByOne(nn.Module):
    """A mixture that chooses an expert twice, with other scores the second time (GShard, arXiv 2006.16668)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weight, first = scores.topk(1)
        other, second = scores.scatter(-1, first, -1.0).topk(1)
        results = torch.stack([expert(x) for expert in self.experts], -2)
        chosen = results.take_along_dim(torch.cat([first, second], -1)[..., None], -2)
        return (chosen * torch.cat([weight, other], -1)[..., None]).sum(-2)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("layer", [Several(2), Several(1), OneByOne()], ids=["two", "called twice", "one by one"])
def test_a_layer_of_any_mixtures_is_recomputed_to_the_bit(layer: nn.Module, mode: Any) -> None:
    torch.manual_seed(2)
    x = torch.randn(7, 6)
    plain, model = nn.Sequential(deepcopy(layer)), nn.Sequential(deepcopy(layer))
    config = PPModuleConfig(1, "")
    stage = make_stage_module(model, config, ["0"], 0, 1)
    StageParallelism(activation_checkpoint=ActivationCheckpoint(mode)).apply(stage, config, {})
    for whole in (plain, stage):
        with RouterLosses(7):
            output = whole(x)
        output.square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_choices_recorded_in_inference_mode_are_replayed_in_training() -> None:
    model = nn.Sequential(MoE(6, 10, EXPERTS, CHOSEN))
    install_moe_block_tracking(model, ["0"])
    replay, x = RoutingReplay(), torch.randn(3, 6)
    with torch.inference_mode(), replay:
        before = model(x)
    with replay:
        after = model(x)
    after.sum().backward()
    assert torch.equal(before, after)


class Unusual(nn.Module):
    """A mixture whose router compares scores by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        best = self.router(x).argmax(-1)
        return torch.stack([self.experts[int(one)](row) for one, row in zip(best, x, strict=True)])


def test_choices_that_do_not_fit_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), MoE(6, 10, EXPERTS, CHOSEN))
    mixtures = install_moe_block_tracking(model, ["0", "1"])
    assert mixtures == find_moe_blocks(model, ["0", "1"]) == [MoEBlockInfo("1", 1, EXPERTS, CHOSEN)]
    x, given = torch.randn(3, 5, 6), torch.zeros(3, 5, 2, CHOSEN, dtype=torch.long)
    size = "here \\(3, 5, at least 2, 2\\)"
    for wrong, message in (
        (given[:, :, :1], rf"shape \(3, 5, 1, 2\).* {size}"),
        (given.float(), r"torch.float32; expected integers"),
        (given.tolist(), r"has a list; expected integers"),
        (given + EXPERTS, r"experts 4 to 4 for 1; expected numbers from 0 to 3"),
        (given[:, :4], rf"shape \(3, 4, 2, 2\).* {size}"),
    ):
        with pytest.raises(InputError, match=message):
            check_routed_experts({"routed_experts": wrong}, mixtures, (3, 5))
    for kind in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int64):
        check_routed_experts({"routed_experts": given.to(kind)}, mixtures, (3, 5))
        with RoutingReplay(given.to(kind)):
            model(x)
    recorded = RoutingReplay()
    with recorded:
        model(x)
    with pytest.raises(InputError, match=r"shape \(3, 5, 2\); expected \(3, 4, 2\)"), recorded:
        model(x[:, :4])
    check_routed_experts({}, [], (3, 5))
    with pytest.raises(InputError, match="no layer of the model can replay choices"):
        check_routed_experts({"routed_experts": given}, [], (3, 5))
    unusual = nn.Sequential(Unusual())
    install_moe_block_tracking(unusual, ["0"])
    with pytest.raises(InputError, match="0 does not choose its experts by a topk"), RoutingReplay():
        unusual(x[0])
    for several in (Several(2), Several(1)):
        ambiguous = nn.Sequential(several)
        install_moe_block_tracking(ambiguous, ["0"])
        with pytest.raises(InputError, match="is not the first call of a mixture in its layer"), RoutingReplay():
            ambiguous(x)


# ---------------------------------------------------------------------- in stages


def with_choices() -> list[list[dict[str, Tensor]]]:
    """Batches with random choices of different experts for each token and layer."""
    generator = torch.Generator().manual_seed(9)
    steps = batches()
    for step in steps:
        for batch in step:
            shape = (*batch["input_ids"].shape, LAYERS, EXPERTS)
            batch["routed_experts"] = torch.rand(shape, generator=generator).argsort(-1)[..., :CHOSEN].to(torch.int16)
    return steps


def trained_by_a_plain_loop(folder: Path) -> list[float]:
    """Transformers' model, with routers that are told what to choose, without any of this package."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, eps=1e-3)
    losses = []
    for step in with_choices():
        tokens = sum(batch["labels"].numel() for batch in step)
        total = 0.0
        for batch in step:
            for index, layer in enumerate(model.model.layers):
                told = batch["routed_experts"][:, :, index].flatten(0, 1).long()

                def forward(x: Tensor, router: Any = layer.mlp.gate, told: Tensor = told) -> tuple[Tensor, ...]:
                    scores = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
                    weights = scores.softmax(-1).gather(1, told)
                    return scores, weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, told

                layer.mlp.gate.forward = forward
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")
            (loss / tokens).backward()
            total += float(loss.detach()) / tokens
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def trained(rank: int, world: int, folder: Path, schedule: str, options: dict[str, Any]) -> list[float]:
    module = Noting(folder, attention="sdpa")
    strategy: Any = "auto" if world == 1 else llm(schedule, COUNT, **options)
    fit(module, strategy, with_choices(), use_distributed_sampler=False)
    return module.losses


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "whole": (1, "", {}),
    "two parts of the backward, computed again": (2, "zbv_zero_bubble", {"activation_checkpoint": {"mode": "full"}}),
    "computed again": (2, "1f1b", {"activation_checkpoint": {"mode": "full"}}),
    "sequences shared in a ring, and experts": (2, "gpipe", {"pp": 1, "cp": 2, "cp_method": "ring", "ep": 2}),
}


@pytest.mark.parametrize("case", sampled(CASES, lambda case: case in ("whole", "computed again")))
def test_choices_of_the_batch_train_as_a_plain_loop_with_these_choices(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", num_hidden_layers=LAYERS)
    world, schedule, options = CASES[case]
    expected = trained_by_a_plain_loop(tmp_path)
    for losses in run_ranks(trained, world, tmp_path, schedule, options):
        assert losses == pytest.approx(expected, abs=WITHIN)


def one_wrong(rank: int) -> list[list[dict[str, Any]]]:
    steps: Any = with_choices()
    if rank:
        steps[1][1]["routed_experts"][0, 3, 2, 1] = EXPERTS
    return steps


def one_with_a_key(rank: int) -> list[list[dict[str, Any]]]:
    return with_choices() if rank else batches()


def one_object(rank: int) -> list[dict[str, Any]]:
    return [{**batch, "routed_experts": RoutingReplay()} for step in batches() for batch in step]


def refused(rank: int, world: int, family: str, data: Any, options: dict[str, Any]) -> str:
    torch.manual_seed(SEED)
    module = Noting(config_of(family) | {"num_hidden_layers": LAYERS}, attention="sdpa")
    with pytest.raises(InputError) as error:
        fit(module, llm("1f1b", COUNT, **options), data(rank), use_distributed_sampler=False)
    return str(error.value)


REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "no mixture on either": ("llama", one_with_a_key, {"pp": 1, "dp_shard": 2}, "can replay choices"),
    "compiled": ("qwen3_moe", one_with_a_key, {"compile_layers": {"backend": "eager"}}, "can replay choices"),
    "a number": ("qwen3_moe", one_wrong, {"pp": 1, "dp_shard": 2, "ep": 2}, "experts 0 to 4 for model.layers.2.mlp"),
    "one object for two": ("qwen3_moe", one_object, {}, "2 micro-batches have the same RoutingReplay"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_choices_that_a_rank_cannot_replay_are_refused_on_all_ranks(case: str) -> None:
    family, data, options, message = REFUSED[case]
    first, second = run_ranks(refused, 2, family, data, options)
    assert message in second
    assert message in first or "rank(s) 1 could not use their batch" in first


def test_a_model_without_a_way_to_replay_refuses_choices() -> None:
    steps = [step[0] for step in with_choices()]
    with pytest.raises(InputError, match="no layer of the model can replay choices"):
        fit(Noting(config_of("llama"), attention="sdpa"), "auto", steps)
    module = Noting(config_of("qwen3_moe") | {"num_hidden_layers": LAYERS}, attention="sdpa")
    module.configure_model()
    model: Any = module.model
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(InputError, match="which recomputes layers without these choices"):
        fit(module, "auto", steps)


def test_one_device_refuses_one_object_for_two_micro_batches_too() -> None:
    replay = RoutingReplay()
    step = [{**batch, "routed_experts": replay} for batch in batches()[0][:2]]
    module = Noting(config_of("qwen3_moe") | {"num_hidden_layers": LAYERS}, attention="sdpa")
    with pytest.raises(InputError, match="2 micro-batches have the same RoutingReplay"):
        fit(module, "auto", [step])
