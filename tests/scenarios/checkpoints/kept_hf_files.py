"""Writes the checkpoints of ``kept_hf/``: training of Hugging Face's models with an older release of transformers.

python -m tests.scenarios.checkpoints.kept_hf_files FOLDER   # with the release that is to be kept
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from tests.distributed import run_ranks
from tests.strategies.llm_cases import SEED, fit, llm

_SMALL = {
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neox": {**_SMALL, "tie_word_embeddings": False},
    "mixtral": {**_SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}
STEP, COUNT = 3, 2


def batches(steps: int) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 19, (2, 9), generator=generator) for _ in range(steps * COUNT)]
    cut = [{"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in rows]
    return [cut[step * COUNT : (step + 1) * COUNT] for step in range(steps)]


def module_of(kind: str) -> HFCausalLM:
    return HFCausalLM({"model_type": kind, **CONFIGS[kind]}, learning_rate=0.01)


def state_of(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Values of this rank: its stages, and the states of their optimizer under the names of the parameters."""
    module = trainer.lightning_module
    values = {name: value.detach().clone() for name, value in module.state_dict().items()}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter, state in trainer.optimizers[0].state.items():
        values |= {f"{names[id(parameter)]} {key}": value.detach().clone() for key, value in state.items()}
    return values


def train(rank: int, world_size: int, folder: Path) -> None:
    for kind in CONFIGS:
        torch.manual_seed(SEED)
        trainer = fit(module_of(kind), llm("1f1b", COUNT), batches(STEP))
        trainer.save_checkpoint(folder / kind / "checkpoint")
        torch.save(state_of(trainer), folder / kind / f"values_{rank}.pt")


def main(folder: Path) -> None:
    for kind in CONFIGS:
        (folder / kind).mkdir(parents=True)
    run_ranks(train, 2, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
