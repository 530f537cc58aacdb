"""The page on migration names what TorchRec and this project have, by their own names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

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
    for function in (split_batch, MicroBatches.merge_outputs, strategies.LLMPipelineStrategy.print_stages):
        assert function.__name__ in words(FROM_PYTORCH)
