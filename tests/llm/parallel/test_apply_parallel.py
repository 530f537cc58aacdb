"""What cannot be done to stages together is refused before anything is done to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims
from tests.scenarios.language_models.test_llm_dimensions import ExpertsLM
from tests.strategies.llm_cases import TinyLM


def parallelism(dimensions: ParallelDims, expert_data: object = None, **options: Any) -> StageParallelism:
    meshes: Any = SimpleNamespace(dimensions=dimensions, expert_data=expert_data)
    return StageParallelism(meshes, **options)


@pytest.mark.parametrize(
    ("mode", "expert_data", "refused"),
    [("selective", "others", True), ("selective", None, False), ("full", "others", False), (None, "others", False)],
)
def test_experts_that_other_ranks_share_too_are_not_recomputed_selectively(
    mode: Any, expert_data: object, refused: bool
) -> None:
    model = ExpertsLM()
    config = PPModuleConfig(4, "layers", ("embedding",), ("head",))
    checkpoint = None if mode is None else ActivationCheckpoint(mode)
    asked = parallelism(ParallelDims(dp_shard=4, ep=2), expert_data, activation_checkpoint=checkpoint)
    if not refused:
        assert asked.check_model(model, config) == {}
        return
    with pytest.raises(SetupError, match=r"activation_checkpoint.mode is 'selective'.*Use mode 'full'"):
        asked.check_model(model, config)


def test_experts_are_asked_for_where_there_are_none() -> None:
    model = TinyLM()
    with pytest.raises(SetupError, match=r"parallel.ep is 2, but TinyLM has no experts"):
        parallelism(ParallelDims(dp_shard=2, ep=2)).check_model(model, derive_pp_module_config(model))
