"""Hugging Face's families, dense and mixtures of experts: loaded, trained in stages as by a plain loop, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from lightning_pipe.strategies.language_model.pretrained_export import export_pretrained
from tests.distributed import run_ranks
from tests.scenarios.language_models.test_hf_documents import attention_of, config_of
from tests.strategies.llm_cases import SEED, fit, llm
from tests.tiers import sampled

MIXTURES = ["deepseek_v3", "gpt_oss", "granitemoe", "llama4_text", "mixtral", "qwen3_moe"]
DENSE = ["cohere2", "gemma3_text", "gpt_neox", "phi3", "starcoder2"]
# Layers of several kinds, one matrix for several, experts in one tensor or in several, biases of routers.
OFTEN = ("deepseek_v3", "gemma3_text", "gpt_neox", "gpt_oss")
STEPS, COUNT = 3, 2
# Float32, two layers and losses near 4: rounding of sums over 32 columns stays below.
WITHIN = 1e-5


def batches() -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(3, 60, (2, 9), generator=generator) for _ in range(STEPS * COUNT)]
    cut = [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in rows]
    return [cut[step * COUNT : (step + 1) * COUNT] for step in range(STEPS)]


def module_of(folder: Path, family: str) -> HFCausalLM:
    return HFCausalLM(folder, attention=attention_of(family), learning_rate=0.01)


def save_model(folder: Path, family: str, **options: Any) -> Any:
    """Write a model with random weights in Hugging Face's format, and return its config."""
    torch.manual_seed(SEED)
    config = HFCausalLM(config_of(family) | options, attention=attention_of(family)).config
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return config


def trained_by_a_plain_loop(folder: Path, family: str, steps: Any = None) -> list[float]:
    """Hugging Face's own model and its own weights, without any of this package; by default on :func:`batches`."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention_of(family)
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, eps=1e-3)
    losses = []
    before = [one.detach().clone() for one in model.parameters()]
    for step in steps or batches():
        tokens = sum(batch["labels"].numel() for batch in step)
        total = 0.0
        for batch in step:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")
            (loss / tokens).backward()
            total += float(loss.detach()) / tokens
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    moved = [float((one - first).abs().max()) for one, first in zip(model.parameters(), before, strict=True)]
    assert max(moved) > 100 * WITHIN, "nothing was learned"
    return losses


class Noting(HFCausalLM):
    """AdamW whose steps do not grow rounding noise, and the losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0, eps=1e-3)


def trained_in_stages(rank: int, world: int, folder: Path, family: str) -> list[float]:
    module = Noting(folder / "before", attention=attention_of(family))
    trainer = fit(module, llm("1f1b", COUNT), batches())
    trainer.save_checkpoint(folder / "stages")
    return module.losses


@pytest.mark.parametrize("family", sampled([*DENSE, *MIXTURES], OFTEN.__contains__))
def test_a_family_is_loaded_trained_as_by_a_plain_loop_and_exported(family: str, tmp_path: Path) -> None:
    config = save_model(tmp_path / "before", family)
    expected = trained_by_a_plain_loop(tmp_path / "before", family)
    for losses in run_ranks(trained_in_stages, 2, tmp_path, family):
        assert losses == pytest.approx(expected, abs=WITHIN)
    export_pretrained(tmp_path / "stages", config, tmp_path / "after")
    # In the layout of the files that transformers writes, and read by it again.
    names = [set(module_of(tmp_path / name, family).pretrained_weights().tensors) for name in ("before", "after")]  # type: ignore[union-attr]
    assert names[0] == names[1]
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "after", dtype=torch.float32, attn_implementation=attention_of(family)
    )
    loaded.eval()
    module = module_of(tmp_path / "after", family)
    module.configure_model()
    module.eval()
    batch = batches()[0][0]
    with torch.no_grad():
        logits = loaded(input_ids=batch["input_ids"], use_cache=False).logits
        assert float((module.predict_step([batch], 0)[0] - logits).abs().max()) < WITHIN
