"""What option groups refuse, and what a TrainPipeline takes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys import CheckOptions, TrainPipeline, WireOptions
from tests.recsys.pipeline_cases import CASES, adam, sharded
from tests.recsys.sharding_cases import CPU


def test_unknown_precisions_and_integer_types_are_refused() -> None:
    with pytest.raises(SetupError, match="forward of quantized_comms is 'half'; expected one of 'fp32'"):
        WireOptions({"forward": "half"})
    with pytest.raises(SetupError, match=r"wire\.ids is 'int16'; expected one of 'auto', 'int32', 'int64'"):
        WireOptions(ids="int16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire": {"quantized_comms": {"forward": "bf16"}}}, "Pass quantized_comms to shard_model"),
        ({"wire": {"dedup": True}}, r"wire\.dedup cannot be set .* Pass dedup to shard_model"),
        ({"checks": {"validate": True}}, "checks has 'validate'; expected only validate_ids, detect_nan"),
        ({"checks": {"validate_ids": "false"}}, "checks.validate_ids is 'false'; expected True or False"),
        ({"check": {}}, "options has 'check'; expected only rewrite, wire, memory, checks"),
        (
            ["checks"],
            r"options is \['checks'\]; expected a mapping of rewrite, wire, memory, checks, or a SessionOptions",
        ),
    ],
)
def test_a_train_pipeline_refuses_what_it_cannot_follow(one_rank: Any, options: Any, message: str) -> None:
    model = sharded(CASES["pooled, table_wise"])
    with pytest.raises(SetupError, match=message):
        TrainPipeline(model, adam(model), CPU, options=options)


def test_a_group_may_be_a_dataclass_or_a_mapping(one_rank: Any) -> None:
    losses = []
    for checks in (CheckOptions(detect_nan=True), {"detect_nan": True}):
        model = sharded(CASES["pooled, table_wise"])
        pipeline = TrainPipeline(
            model,
            adam(model),
            CPU,
            custom_model_fwd=lambda batch: (torch.tensor([torch.nan]), None),
            options={"checks": checks},
        )
        with pytest.raises(Exception, match="expected a finite loss") as caught:
            pipeline.progress(iter(CASES["pooled, table_wise"].data(3)))
        losses.append(str(caught.value))
    assert len(losses) == 2
