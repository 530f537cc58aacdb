"""Arguments of former versions are refused with the YAML that has replaced them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import yaml

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.batches.batching import Batching
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint
from lightning_pipe.llm.parallel.dimensions import ParallelDims
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.strategies.language_model.auto import AutoLLMPipelineStrategy
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
from lightning_pipe.strategies.recommender.strategy import RecsysPipelineStrategy
from lightning_pipe.strategies.refused_arguments import LANGUAGE_MODEL

FORMER: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "data_parallel_shard_size": 4,
    "layer_ranges": ((0, 1), (1, 4)),
    "activation_checkpointing": "selective",
    "max_length": 128,
}


@pytest.mark.parametrize("strategy", [LLMPipelineStrategy, AutoLLMPipelineStrategy])
def test_the_error_has_the_yaml_of_the_same_values(strategy: Any) -> None:
    with pytest.raises(SetupError, match=r"^pipeline_parallel_size, data_parallel_shard_size, .* are given") as error:
        strategy(**FORMER)
    replaced = yaml.safe_load(str(error.value).partition("\n")[2])
    assert replaced == {
        "parallel": {"pp": 2, "dp_shard": 4},
        "split": {"layer_ranges": [[0, 1], [1, 4]]},
        "activation_checkpoint": {"mode": "selective"},
        "batching": {"max_length": 128},
    }
    LLMPipelineStrategy(**replaced)


def test_every_former_argument_has_a_field_of_an_option_group() -> None:
    groups = {"parallel": ParallelDims, "split": SplitOptions, "batching": Batching}
    every: dict[str, Any] = {**groups, "activation_checkpoint": ActivationCheckpoint}
    assert set(LANGUAGE_MODEL.values()) <= {
        f"{name}.{one.name}" for name, group in every.items() for one in fields(group)
    }


@pytest.mark.parametrize(
    ("strategy", "wrong", "near"),
    [
        (LLMPipelineStrategy, "shcedule", "schedule"),
        (AutoLLMPipelineStrategy, "microbatches", "num_microbatches"),
        (RecsysPipelineStrategy, "sharing", "sharding"),
        (RecsysPipelineStrategy, "time_out", "timeout"),
        (RecsysPipelineStrategy, "transfer_on_workers", "transfer_on_worker"),
    ],
)
def test_other_unknown_arguments_are_refused_with_the_nearest_one(strategy: Any, wrong: str, near: str) -> None:
    with pytest.raises(TypeError, match=rf"^{strategy.__name__}\(\) got .*'{wrong}'; did you mean '{near}'\?"):
        strategy(**{wrong: "1f1b"})


def test_values_that_were_defaults_are_left_out_of_the_yaml() -> None:
    with pytest.raises(SetupError) as error:
        LLMPipelineStrategy(pipeline_parallel_size=None, activation_checkpointing_every=1, max_length=64)
    assert yaml.safe_load(str(error.value).partition("\n")[2]) == {"batching": {"max_length": 64}}
    with pytest.raises(SetupError, match=r"pad_values is given, but option groups are expected. .* leave them out"):
        LLMPipelineStrategy(pad_values=None)


def test_an_argument_that_was_removed_says_what_does_its_work() -> None:
    with pytest.raises(SetupError, match=r"copy_in_place is given, but it has been removed: .* Remove it"):
        RecsysPipelineStrategy(copy_in_place=True)
