"""Configurations of the page on migration train as a plain loop, on as many ranks but with small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
from tests.distributed import run_ranks
from tests.docs.pages import DOCS, blocks_of
from tests.scenarios.language_models.test_hf_families import WITHIN, Noting, save_model, trained_by_a_plain_loop
from tests.strategies.llm_cases import fit

RANKS, STEPS = 8, 2
FAMILIES = ("qwen3", "qwen3_moe")


def strategies() -> list[dict[str, Any]]:
    """Arguments of the strategies in the section on xorl."""
    page = DOCS / "migration.md"
    text = page.read_text(encoding="utf-8")
    first, last = (text[: text.index(heading)].count("\n") for heading in ("## From xorl", "## From PyTorch's `Pipe`"))
    blocks = [one for one in blocks_of(page) if one.language == "yaml" and first < one.line < last]
    return [yaml.safe_load(one.code)["strategy"]["init_args"] for one in blocks]


def steps_of(options: dict[str, Any]) -> list[list[list[dict[str, Tensor]]]]:
    """Micro-batches of each data-parallel rank in each step, of one row and several lengths."""
    generator = torch.Generator().manual_seed(4)

    def row(step: int, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, 60, (1, 8 + 3 * step + index), generator=generator)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    parts = options["parallel"].get("dp_shard", 1)
    return [[[row(s, i) for i in range(options["num_microbatches"])] for _ in range(parts)] for s in range(STEPS)]


def trained(rank: int, world: int, folder: Path, options: dict[str, Any]) -> list[float]:
    steps = steps_of(options)
    parts = options["parallel"].get("dp_shard", 1)
    part = rank % (RANKS // 2) // (RANKS // 2 // parts)
    module = Noting(folder, attention="sdpa")
    fit(module, LLMPipelineStrategy(**options), [step[part] for step in steps], use_distributed_sampler=False)
    return module.losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(2), ids=["Qwen3-8B", "Qwen3-30B-A3B"])
def test_the_two_configurations_of_xorl_train_as_a_plain_loop(number: int, tmp_path: Path) -> None:
    family, options = FAMILIES[number], strategies()[number]
    save_model(tmp_path, family, max_position_embeddings=1024)
    rows = [[one for part in step for one in part] for step in steps_of(options)]
    expected = trained_by_a_plain_loop(tmp_path, family, rows)
    for losses in run_ranks(trained, RANKS, tmp_path, options):
        assert losses == pytest.approx(expected, abs=WITHIN)


def test_the_page_has_both_configurations() -> None:
    first, second = strategies()
    assert (first["parallel"], second["parallel"]["ep"]) == ({"pp": 2, "dp_shard": 4}, 4)
