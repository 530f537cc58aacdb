"""Hugging Face's mixtures of experts, whose experts several ranks share beside other dimensions, as by a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_pipe.strategies.language_model.pretrained_export import export_pretrained
from tests.distributed import run_ranks
from tests.scenarios.language_models.test_hf_documents import attention_of
from tests.scenarios.language_models.test_hf_families import (
    COUNT,
    WITHIN,
    Noting,
    batches,
    module_of,
    save_model,
    trained_by_a_plain_loop,
)
from tests.strategies.llm_cases import fit, llm
from tests.tiers import sampled_rows

SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("1f1b", {"pp": 2, "dp_shard": 2, "ep": 2}),
    "sharded, two parts of the backward": ("zbv_zero_bubble", {"pp": 2, "dp_shard": 2, "ep": 2}),
    "ulysses": ("1f1b", {"pp": 2, "cp": 2, "ep": 2}),
    "ring": ("1f1b", {"pp": 2, "cp": 2, "cp_method": "ring", "ep": 2}),
    "tensors": ("1f1b", {"pp": 1, "dp_shard": 2, "tp": 2, "ep": 2}),
}
# Eight ranks.
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded data and sequences": ("1f1b", {"pp": 2, "dp_shard": 2, "cp": 2, "ep": 4}),
    "tensors and sequences": ("zbv_zero_bubble", {"pp": 2, "tp": 2, "cp": 2, "ep": 2}),
}
OFTEN = [("qwen3_moe", "ring"), ("llama4_text", "sharded")]
CASES = [
    *OFTEN,
    ("gpt_oss", "sharded"),
    ("deepseek_v3", "sharded, two parts of the backward"),
    ("granitemoe", "sharded, two parts of the backward"),
    ("glm4_moe", "ulysses"),
    ("deepseek_v3", "ring"),
    ("olmoe", "tensors"),
]


def rows_of(part: int) -> list[list[dict[str, Tensor]]]:
    """Every other row of each micro-batch, for one of two data-parallel ranks."""
    return [[{key: value[part : part + 1] for key, value in batch.items()} for batch in step] for step in batches()]


def trained(
    rank: int, world: int, folder: Path, family: str, schedule: str, options: dict[str, Any]
) -> tuple[int, list[float]]:
    """Rank's part of the data, and the losses of its rows."""
    module = Noting(folder / "before", attention=attention_of(family))
    of_a_stage = world // options["pp"]
    parts = options.get("dp_shard", 1)
    part = rank % of_a_stage // (of_a_stage // parts)
    rows = rows_of(part) if parts == 2 else batches()
    trainer = fit(module, llm(schedule, COUNT, **options), rows, use_distributed_sampler=False)
    trainer.save_checkpoint(folder / "stages")
    return part, module.losses


def compare(folder: Path, family: str, ranks: int, schedule: str, options: dict[str, Any]) -> None:
    layers = 2 if schedule == "1f1b" else 4
    saved = save_model(folder / "before", family, num_hidden_layers=layers)
    expected = trained_by_a_plain_loop(folder / "before", family)
    found = run_ranks(trained, ranks, folder, family, schedule, options)
    parts = [[losses for of, losses in found if of == part] for part in {part for part, _ in found}]
    for one in zip(*parts, strict=True):
        means = [sum(losses) / len(parts) for losses in zip(*one, strict=True)]
        assert means == pytest.approx(expected, abs=WITHIN)
    export_pretrained(folder / "stages", saved, folder / "after")
    names = [set(module_of(folder / name, family).pretrained_weights().tensors) for name in ("before", "after")]  # type: ignore[union-attr]
    assert names[0] == names[1]


@pytest.mark.parametrize(("family", "shared"), sampled_rows(CASES, OFTEN.__contains__))
def test_experts_on_two_ranks_each_are_trained_as_by_a_plain_loop(family: str, shared: str, tmp_path: Path) -> None:
    compare(tmp_path, family, 4, *SHARED[shared])


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", LARGE)
def test_experts_on_eight_ranks_are_trained_as_by_a_plain_loop(shared: str, tmp_path: Path) -> None:
    schedule, options = LARGE[shared]
    compare(tmp_path, "qwen3_moe", 8, schedule, options)
