"""Stages whose sequences, matrices or experts are shared by ranks train as one device does with the whole of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.llm.model.moe import MoE
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    VOCABULARY,
    WIDTH,
    Noted,
    TinyHF,
    as_one,
    beyond_rounding,
    fit,
    hf_config,
    llm,
    loader,
    microbatches_of,
    packed_batches,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    train_with_lightning,
    trainer,
)
from tests.tiers import sampled

STEPS, MICRO = 2, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, 12, 4, 2, balance_coefficient=0.1, z_coefficient=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class ExpertsLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Expert() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class Experts(Noted, PipelineModule):
    """A mixture of experts in every layer."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.routers: list[float] = []

    def build_model(self) -> nn.Module:
        return ExpertsLM()

    def get_pp_module_config(self) -> dict[str, Any]:
        return {"num_layers": 4, "layer_prefix": "layers", "input_fqns": ["embedding"], "output_fqns": ["head"]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.routers.append(float(self.trainer.callback_metrics["train_router_balance"]))
        return loss


def masked() -> list[dict[str, Tensor]]:
    """Rows with padding of their own."""
    batches = row_batches(STEPS)
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][::3, -2:] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batches


# model, batches, schedule, strategy's options, trainer's options
Case = tuple[str, str, str, dict[str, Any], dict[str, Any]]
RING = {"cp_method": "ring"}
CASES: dict[str, Case] = {
    "context, padded": ("gpt_neox", "masked", "zbv_zero_bubble", {"cp": 2}, {}),
    "context and shards": ("llama", "rows", "1f1b", {"cp": 2, "dp_shard": 2}, {"gradient_clip_val": 0.1}),
    "ring, packed": ("qwen3", "packed", "interleaved_1f1b", {"cp": 2, **RING}, {}),
    "ring, recomputed": (
        "gpt_neox",
        "rows",
        "zbv_zero_bubble",
        {"cp": 2, **RING, "activation_checkpoint": {"mode": "selective"}},
        {},
    ),
    "tensor": ("qwen3", "rows", "1f1b", {"tp": 2}, {"gradient_clip_val": 0.1}),
    "tensor and shards": ("llama", "rows", "gpipe", {"tp": 2, "dp_shard": 2}, {}),
    "experts": (
        "experts",
        "rows",
        "1f1b",
        {"dp_shard": 2, "ep": 2},
        {"gradient_clip_val": 0.1},
    ),
    "experts, recomputed in two parts of the backward": (
        "experts",
        "rows",
        "zbv_zero_bubble",
        {"dp_shard": 2, "ep": 2, "activation_checkpoint": {"mode": "selective"}},
        {},
    ),
    "some experts": ("experts", "rows", "gpipe", {"dp_shard": 4, "ep": 2, "reshard_after_forward": True}, {}),
    "some experts, in replicas": ("experts", "rows", "gpipe", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {}),
    "replicated experts": ("experts", "rows", "zbv_zero_bubble", {"dp_replicate": 2}, {}),
}


def module_of(kind: str) -> Any:
    if kind == "experts":
        return Experts()
    config = hf_config(kind) if kind == "gpt_neox" else hf_config(kind) | {"num_key_value_heads": 2}
    return TinyHF(config, optimizer="adamw")


def batches_of(kind: str) -> list[Any]:
    if kind == "packed":
        return list(packed_batches(MICRO, STEPS))
    return list(masked() if kind == "masked" else row_batches(STEPS))


def parts_of(options: dict[str, Any]) -> int:
    return options.get("dp_shard", 1) * options.get("dp_replicate", 1)


def share(batches: Sequence[Any], part: int, parts: int) -> Sequence[Any]:
    if parts == 1:
        return batches
    return [{key: value[part::parts] for key, value in batch.items()} for batch in batches]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_case(rank: int, world: int, case: str) -> dict[str, Any]:
    model, batches, schedule, options, of_trainer = CASES[case]
    strategy, module = llm(schedule, MICRO, **options), module_of(model)
    all_batches, parts = batches_of(batches), parts_of(options)
    others = options.get("cp", 1) * options.get("tp", 1)
    mine = share(all_batches, rank // others % parts, parts)
    used = fit(module, strategy, mine, loader(mine), use_distributed_sampler=False, **of_trainer)
    assert module.model is not None
    parameters = dict(module.model.named_parameters())
    predictions: Any = None
    if model != "experts":
        torch.manual_seed(5)
        predicting = trainer(llm(schedule, MICRO, **options), use_distributed_sampler=False)
        predictions = predicting.predict(module_of(model), loader(mine[:1]))
    return {
        "losses": module.losses,
        "val_loss": used.callback_metrics["val_loss"].item(),
        "routers": getattr(module, "routers", []),
        "parameters": {name: whole(value).detach() for name, value in parameters.items()},
        "shared": {name for name, value in parameters.items() if isinstance(value, DTensor)},
        "predictions": predictions,
    }


# One of each dimension.
OFTEN = ("ring, packed", "tensor", "experts")


@cache
def ranks(case: str) -> list[dict[str, Any]]:
    return run_ranks(train_case, 4, case)


@cache
def alone(model: str, kind: str, parts: int, clip: float | None) -> Reference:
    """One device: for experts, whose losses are each micro-batch's own, with the very micro-batches."""
    batches = batches_of(kind)
    given: list[Any] = list(batches) if kind == "packed" else [as_one(batch) for batch in batches]
    if model == "experts":
        shares = [share(batches, part, parts) for part in range(parts)]
        given = [[one for each in shares for one in microbatches_of(each[step], MICRO)] for step in range(STEPS)]

    def trained() -> dict[str, Any]:
        module = module_of(model)
        results = results_of(train_with_lightning(module, given, gradient_clip_val=clip), steps=0)
        (metrics,) = trainer("auto").validate(module, loader(given), verbose=False)
        return results | {"val_loss": metrics["val_loss"], "routers": getattr(module, "routers", [])}

    return Reference.of(trained)


@cache
def predicted_alone(model: str, kind: str, part: int, parts: int) -> Reference:
    def predicted() -> dict[str, Tensor]:
        torch.manual_seed(5)
        predictions = trainer("auto").predict(module_of(model), loader(share(batches_of(kind), part, parts)[:1]))
        assert predictions is not None
        return by_name(predictions[0])

    return Reference.of(predicted)


def by_name(prediction: Any) -> dict[str, Tensor]:
    """A list of micro-batches gives a list."""
    parts = prediction if isinstance(prediction, list) else [prediction]
    return {f"prediction {place}": part for place, part in enumerate(parts)}


@pytest.mark.parametrize("case", sampled(CASES, OFTEN.__contains__))
def test_training_comes_to_what_one_device_comes_to(case: str) -> None:
    model, kind, _, options, of_trainer = CASES[case]
    expected = alone(model, kind, parts_of(options) if model == "experts" else 1, of_trainer.get("gradient_clip_val"))
    found = [{key: rank[key] for key in ("losses", "val_loss", "routers")} for rank in ranks(case)]
    found = [one | rank["parameters"] for one, rank in zip(found, ranks(case), strict=True)]
    assert not ranks_beyond_rounding(found, expected)


@pytest.mark.parametrize("case", sampled([case for case in CASES if "experts" not in case], OFTEN.__contains__))
def test_predictions_are_whole_on_every_rank(case: str) -> None:
    model, kind, _, options, _ = CASES[case]
    parts = parts_of(options)
    others = options.get("cp", 1) * options.get("tp", 1)
    for index, rank in enumerate(ranks(case)):
        (found,) = rank["predictions"]
        assert not beyond_rounding(by_name(found), predicted_alone(model, kind, index // others % parts, parts))


@pytest.mark.parametrize(
    ("case", "cut"),
    [("tensor", "model.layers.0.self_attn.q_proj.weight"), ("experts", "layers.0.moe.experts.up")],
)
def test_what_is_shared_is_not_whole_on_any_rank(case: str, cut: str) -> None:
    assert cut in ranks(case)[0]["shared"]
