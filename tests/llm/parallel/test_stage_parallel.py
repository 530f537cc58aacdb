"""What cannot be done to stages together is refused before anything is done to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.derived_config import derive_config
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.parallel.dimensions import Dimensions
from lightning_pipe.llm.parallel.stage_parallel import StageParallelism
from tests.scenarios.language_models.test_llm_dimensions import ExpertsLM
from tests.strategies.llm_cases import TinyLM


def parallelism(dimensions: Dimensions, expert_data: object = None, **options: Any) -> StageParallelism:
    meshes: Any = SimpleNamespace(dimensions=dimensions, expert_data=expert_data)
    return StageParallelism(meshes, **options)


@pytest.mark.parametrize("name", ["tensor", "context", "expert"])
def test_a_traced_model_is_refused_where_its_own_modules_are_needed(name: str) -> None:
    with pytest.raises(SetupError, match=rf"{name}_parallel_size is 2.*get_pp_module_config"):
        parallelism(Dimensions(**{name: 2})).refuse_traced()
    parallelism(Dimensions(shard=2, replicate=2)).refuse_traced()


@pytest.mark.parametrize(
    ("activations", "expert_data", "refused"),
    [("selective", "others", True), ("selective", None, False), ("full", "others", False), (None, "others", False)],
)
def test_experts_that_other_ranks_share_too_are_not_recomputed_selectively(
    activations: Any, expert_data: object, refused: bool
) -> None:
    model = ExpertsLM()
    config = ModuleConfig(4, "layers", ("embedding",), ("head",))
    asked = parallelism(Dimensions(shard=4, expert=2), expert_data, activations=activations)
    if not refused:
        assert asked.check(model, config) == {}
        return
    with pytest.raises(SetupError, match=r"activation_checkpointing is 'selective'.*use 'full'"):
        asked.check(model, config)


def test_experts_are_asked_for_where_there_are_none() -> None:
    model = TinyLM()
    with pytest.raises(SetupError, match=r"expert_parallel_size is 2, but TinyLM has no experts"):
        parallelism(Dimensions(shard=2, expert=2)).check(model, derive_config(model))
