"""The fine-tuning example: the module in stages trains, validates and resumes as the plain module on one device."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples.llm_finetune import module as staged
from examples.llm_finetune import plain
from examples.llm_finetune.data import PackedTopics, documents
from tests.distributed import run_ranks
from tests.patience import HANG
from tests.strategies.llm_cases import llm, loader, trainer, values_of
from tests.tiers import sampled_rows

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED = 30, 12
# Losses are below 6. In float32, sums have other orders. In bfloat16, a loss is the mean over 300 tokens or more, each
# of which one rounding moves by up to 2^-8 of its logits.
CLOSE = {"32-true": 1e-5, "bf16-mixed": 1e-3}
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
    kind: Any, strategy: Any, arguments: dict[str, Any], folder: Path, **options: Any
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
    plain.FineTuning(CONFIG).model.save_pretrained(str(folder))
    return str(folder)


def test_a_module_moves_into_stages_with_five_changed_lines_which_the_guide_shows() -> None:
    before, after = ([line for line in inspect.getsource(one).splitlines() if line] for one in (plain, staged))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    changed = [line for line in changed if '"""' not in line]  # the lines that say what each file is
    assert [sum(line[0] == sign for line in changed) for sign in "-+"] == [5, 5]
    shown = (ROOT / "docs" / "llm_guide.md").read_text().split("```diff\n")[1].split("```")[0].splitlines()
    assert [line for line in shown if line[:1] in ("+", "-")] == changed


def test_rows_hold_several_sections_and_no_section_is_both_trained_on_and_validated_with() -> None:
    data = PackedTopics(length=64, batch_size=8)
    data.trainer = trainer("auto")
    assert sum(map(len, documents())) > 400_000
    loaders = data.train_dataloader(), data.val_dataloader()
    training, validation = (list(loader.dataset.documents) for loader in loaders)
    assert len(training) + len(validation) == len(documents())
    assert max(validation, key=len) not in training
    starts = next(iter(loaders[0]))["position_ids"] == 0
    assert int(starts.sum()) > 8


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
    close = CLOSE[precision]
    arguments = {"model": model, "warmup_steps": 5, "lora": lora}
    expected, _ = train(plain.FineTuning, "auto", arguments, tmp_path / "plain", precision=precision)
    assert expected.losses[0] - expected.losses[-1] > 0.01, "wrong gradients would not be noticed"
    for whole, resumed, equal in run_ranks(in_stages, 2, schedule, arguments, tmp_path / "stages", precision):
        assert whole.losses == pytest.approx(expected.losses, abs=close)
        assert whole.validation_losses == pytest.approx(expected.validation_losses, abs=close)
        assert whole.perplexities == pytest.approx(expected.perplexities, rel=close)
        assert whole.learning_rates == expected.learning_rates
        assert equal
        assert resumed.losses == whole.losses[SAVED:]
        assert resumed.learning_rates == whole.learning_rates[SAVED:]
        assert resumed.validation_losses == whole.validation_losses[1:]
        assert resumed.perplexities == whole.perplexities[1:]


def test_the_moved_module_trains_under_lightnings_own_strategy_as_well(tmp_path: Path) -> None:
    arguments = {"model": CONFIG, "warmup_steps": 5, "lora": None}
    expected, _ = train(plain.FineTuning, "auto", arguments, tmp_path / "plain")
    found, _ = train(staged.FineTuning, "auto", arguments, tmp_path / "moved")
    assert found.losses == pytest.approx(expected.losses, abs=CLOSE["32-true"])
    assert found.perplexities == pytest.approx(expected.perplexities, rel=CLOSE["32-true"])


def validation_batches() -> list[dict[str, Tensor]]:
    """Batches of one row with fewer and fewer labels."""
    rows = torch.randint(256, (4, 1, 33), generator=torch.Generator().manual_seed(2))
    batches = [{"input_ids": row[:, :-1], "labels": row[:, 1:].clone()} for row in rows]
    for place, batch in enumerate(batches):
        batch["labels"][:, 31 - 10 * place :] = -100
    return batches


def validated(rank: int, world: int) -> float:
    pl.seed_everything(1, verbose=False)
    batches = validation_batches()
    used = trainer("auto" if world == 1 else llm("gpipe", 1, pp=1, dp_replicate=2), use_distributed_sampler=False)
    module = (plain if world == 1 else staged).FineTuning(CONFIG)
    used.validate(module, loader(batches if world == 1 else batches[rank::2]), verbose=False)
    return float(used.callback_metrics["val_loss"])


def test_the_validation_of_two_pipelines_is_the_mean_over_all_their_labels() -> None:
    expected = validated(0, 1)
    assert run_ranks(validated, 2) == pytest.approx([expected] * 2, abs=CLOSE["32-true"])


def command_line(name: str, folder: Path, *options: str) -> list[str]:
    """Train a few steps; return the lines that the command prints."""
    command = [sys.executable, "-m", "lightning_pipe.cli", "fit", f"--config=examples/llm_finetune/{name}.yaml"]
    command += ["--data.length=64", "--data.batch_size=8", "--trainer.max_steps=4", "--trainer.val_check_interval=2"]
    command += ["--trainer.limit_val_batches=1", f"--trainer.logger.save_dir={folder}", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert run.returncode == 0, run.stderr
    assert not re.findall(r"\.py:\d+: .*", run.stdout + run.stderr)  # warnings
    return run.stdout.splitlines()


@pytest.mark.exhaustive
def test_the_last_line_has_the_checkpoint_and_the_command_that_exports_it(tmp_path: Path) -> None:
    for name, target, options in (
        ("full", "pretrained", ()),
        ("lora", "adapters", (f"--model.model={tmp_path / 'pretrained'}",)),
    ):
        *_, line = command_line(name, tmp_path, *options)
        said, python = line.split("; export: ")
        assert said.startswith("Checkpoint with a validation perplexity of ")
        assert Path(said.split(": ")[1]).is_dir()
        export = [sys.executable, *shlex.split(python)[1:]]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(export, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=HANG)
        assert (tmp_path / target).is_dir()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    assert any(parameter.any() for name, parameter in adapted.named_parameters() if "lora_B" in name)


@pytest.mark.exhaustive
def test_the_plain_module_runs_from_the_same_file(tmp_path: Path) -> None:
    kind, strategy = "--model=examples.llm_finetune.plain.FineTuning", "--trainer.strategy=auto"
    *_, line = command_line("full", tmp_path, kind, strategy, "--trainer.devices=1")
    assert line.startswith("Checkpoint with a validation perplexity of ")
    assert Path(line.split(": ")[1]).is_file()
