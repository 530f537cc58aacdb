"""The fine-tuning example: the module in stages trains, validates and resumes as the plain module on one device."""

from __future__ import annotations

import difflib
import inspect
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from examples.llm_finetune import module as staged
from examples.llm_finetune import plain
from examples.llm_finetune.data import PackedTopics, documents
from tests.distributed import run_ranks
from tests.strategies.llm_cases import llm, trainer, values_of
from tests.tiers import sampled_rows

STEPS, SAVED = 30, 12
CLOSE = 1e-5  # of float32 losses below 6, whose sums have other orders
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@dataclass
class Progress(pl.Callback):
    """Losses and learning rates by step, and the results of each validation."""

    losses: list[float] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    perplexities: list[float] = field(default_factory=list)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.learning_rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.validation_losses.append(float(trainer.callback_metrics["val_loss"]))
        self.perplexities.append(float(trainer.callback_metrics["val_perplexity"]))


def train(
    kind: type[pl.LightningModule], strategy: Any, arguments: dict[str, Any], folder: Path, **options: Any
) -> tuple[Progress, dict[str, Tensor]]:
    """Train from the same initial values in each call; also the final parameters of this rank."""
    precision, ckpt_path = options.get("precision", "32-true"), options.get("ckpt_path")
    pl.seed_everything(1, verbose=False)
    module, progress = kind(**arguments), Progress()
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    used = trainer(
        strategy,
        max_epochs=-1,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        val_check_interval=10,
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        precision=precision,
        enable_checkpointing=True,
        callbacks=[progress, saves],
    )
    used.fit(module, datamodule=PackedTopics(length=64, batch_size=8), ckpt_path=ckpt_path)
    return progress, values_of(module.model)


def in_stages(
    rank: int, world: int, schedule: str, arguments: dict[str, Any], folder: Path, precision: str
) -> tuple[Progress, Progress, bool]:
    """Train without an interruption and after one; also whether the final parameters are equal to the bit."""
    whole, values = train(staged.FineTuning, llm(schedule), arguments, folder, precision=precision)
    (saved,) = folder.glob(f"step={SAVED}.ckpt")
    resumed, again = train(
        staged.FineTuning, llm(schedule), arguments, folder / "resumed", precision=precision, ckpt_path=saved
    )
    return whole, resumed, all(torch.equal(value, again[name]) for name, value in values.items())


def pretrained(folder: Path) -> str:
    """A folder of ``save_pretrained``."""
    pl.seed_everything(0, verbose=False)
    plain.FineTuning(CONFIG).model.save_pretrained(folder)
    return str(folder)


def test_a_module_moves_into_stages_with_five_changed_lines() -> None:
    sources = [[line for line in inspect.getsource(one).splitlines() if line] for one in (plain, staged)]
    changed = [line[0] for line in difflib.ndiff(*sources) if line[0] in "+-"]
    assert (changed.count("-"), changed.count("+")) == (5, 5)


@pytest.mark.parametrize(
    ("schedule", "lora", "precision"),
    sampled_rows(
        [
            (schedule, lora, precision)
            for schedule in ("1f1b", "interleaved_zero_bubble")
            for lora in (None, LORA)
            for precision in ("32-true", "bf16-mixed")
        ],
        lambda case: case in (("1f1b", None, "32-true"), ("interleaved_zero_bubble", LORA, "32-true")),
        lambda case: f"{case[0]}-{'lora' if case[1] else 'full'}-{case[2]}",
    ),
)
def test_the_module_in_stages_trains_as_the_plain_one_and_resumes_within_an_epoch_to_the_bit(
    schedule: str, lora: dict[str, Any] | None, precision: str, tmp_path: Path
) -> None:
    model = CONFIG if lora is None else pretrained(tmp_path / "pretrained")
    close = 1e-5 if precision == "32-true" else 1e9
    arguments = {"model": model, "warmup_steps": 5, "lora": lora}
    expected, _ = train(plain.FineTuning, "auto", arguments, tmp_path / "plain", precision=precision)
    import sys
    for whole, resumed, equal in run_ranks(in_stages, 2, schedule, arguments, tmp_path / "stages", precision):
        print(max(abs(a-b) for a,b in zip(whole.losses, expected.losses)), max(abs(a-b) for a,b in zip(whole.validation_losses, expected.validation_losses)),expected.losses[::5], whole.perplexities, expected.perplexities, file=sys.stderr)
        assert whole.losses == pytest.approx(expected.losses, abs=close)
        assert whole.validation_losses == pytest.approx(expected.validation_losses, abs=close)
        assert whole.perplexities == pytest.approx(expected.perplexities, rel=close)
        assert whole.learning_rates == expected.learning_rates
        assert equal
        assert resumed.losses == whole.losses[SAVED:]
        assert resumed.learning_rates == whole.learning_rates[SAVED:]
        assert resumed.validation_losses == whole.validation_losses[1:]
        assert resumed.perplexities == whole.perplexities[1:]
