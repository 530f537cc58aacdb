"""The page on migration names what TorchRec and this project have, by their own names."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import pipelining
from torchrec.distributed.train_pipeline import train_pipelines

import lightning_pipe.strategies as strategies
from lightning_pipe.llm.batches.microbatches import MicroBatches, split_batch

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
FROM_TORCHREC, FROM_NEMO, FROM_PYTORCH = (
    PAGE[PAGE.index(f"\n## {heading}") : PAGE.index(f"\n## {after}")]
    for heading, after in (
        ("From TorchRec's train pipelines", "From TorchTNT"),
        ("From NeMo and Megatron-LM", "From torch.distributed"),
        ("From torch.distributed", "From xorl"),
    )
)


def words(text: str) -> set[str]:
    """The names in a text's code."""
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}


def last_cells(text: str) -> str:
    return "\n".join(line.strip("|").split("|")[-1] for line in text.splitlines() if line.startswith("| "))


def pipelines_of_torchrec() -> dict[str, type]:
    return {
        name: found
        for name, found in inspect.getmembers(train_pipelines, inspect.isclass)
        if issubclass(found, train_pipelines.TrainPipeline)
        and found.__module__ == train_pipelines.__name__
        and not inspect.isabstract(found)
    }


@pytest.mark.parametrize("name", pipelines_of_torchrec())
def test_every_pipeline_of_torchrec_is_named_with_all_its_arguments(name: str) -> None:
    arguments = set(inspect.signature(pipelines_of_torchrec()[name]).parameters) - {"args", "kwargs"}
    assert {name, *arguments} <= words(FROM_TORCHREC)


def test_all_names_of_pytorchs_pipelining_are_named() -> None:
    own = set(pipelining.__all__) | {"TensorChunkSpec", "split_args_kwargs_into_chunks", "merge_chunks"}
    assert own <= words("\n".join(line.split("|")[1] for line in FROM_PYTORCH.splitlines() if line.startswith("| ")))
    for function in (split_batch, MicroBatches.trim, strategies.LLMPipelineStrategy.describe_stages):
        assert function.__name__ in words(FROM_PYTORCH)


def test_arguments_of_the_strategy_for_language_models_are_its_own() -> None:
    signature: Any = inspect.signature(strategies.LLMPipelineStrategy).parameters
    cells = last_cells(FROM_NEMO)
    assert {"stages_per_rank", "offload_optimizer", "num_microbatches"} <= words(cells) & set(signature)
    groups: dict[str, Any] = {
        "parallel": strategies.ParallelDims,
        "split": strategies.SplitOptions,
        "batching": strategies.Batching,
        "activation_checkpoint": strategies.ActivationCheckpoint,
    }
    assert groups.keys() <= set(signature)
    fields = {f"{name}.{one.name}" for name, group in groups.items() for one in dataclasses.fields(group)}
    field = rf"`((?:{'|'.join(groups)})\.\w+)`"
    named = set(re.findall(field, cells))
    assert {"parallel.pp", "split.layer_ranges", "batching.length_buckets", "activation_checkpoint.mode"} <= named
    assert named <= fields
    others = words(re.sub(field, "", cells)) - set(signature)
    assert not [one for one in others if re.search(r"_(size|stage|layers|weight|buckets)$", one)]
