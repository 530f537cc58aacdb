"""Attention over cut sequences is that of the whole ones: alone, recomputed, and in pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.model.deferred import fake_copy
from lightning_pipe.llm.model.derived_config import derive_config
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import StageModule, make_stage, shallow_copy
from lightning_pipe.llm.parallel.attention_mode import CheckedAttention
from lightning_pipe.llm.parallel.context_parallel import cut_sequence, join_sequence
from lightning_pipe.llm.parallel.data_parallel import parallelise_stage
from lightning_pipe.llm.parallel.ulysses import Ulysses
from lightning_pipe.llm.run.runner import PipelineRunner, StageInputs
from lightning_pipe.llm.schedules.named import SCHEDULES, count_stages, stages_of_rank
from lightning_pipe.llm.split.by_name import split_evenly
from tests.distributed import run_ranks
from tests.llm.attention_cases import (
    CASES,
    Plain,
    Results,
    deviations,
    gradients,
    hugging_face,
    on_one_device,
    over_ranks,
    packed,
)

# ---------------------------------------------------------------------- two ranks


OF_PLAIN: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": True},
    "within itself": {"entered": 2},
    "not entered": {"entered": 0},
}


def on_two_ranks(rank: int, size: int) -> dict[str, Results]:
    found = {name: over_ranks(model_of, batch_of) for name, (model_of, batch_of) in CASES.items()}
    return found | {name: over_ranks(Plain, packed, **options) for name, options in OF_PLAIN.items()}


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Results]:
    return run_ranks(on_two_ranks, 2)[0]


@pytest.mark.parametrize("case", [*CASES, "recomputed", "within itself"])
def test_outputs_and_gradients_over_two_ranks_are_those_of_one_device(two_ranks: dict[str, Results], case: str) -> None:
    assert deviations(*CASES.get(case, (Plain, packed)), two_ranks[case]) == []


def test_without_it_chunks_do_not_see_each_other(two_ranks: dict[str, Results]) -> None:
    differing = deviations(Plain, packed, two_ranks["not entered"])
    assert [one for one in differing if one.startswith("output 0")] != []


# ---------------------------------------------------------------------- stages of a pipeline


class InContext(StageModule):
    """A stage, run within what the micro-batch says."""

    def forward(
        self,
        *args: Any,
        result_of: Callable[[Any], Any] | None = None,
        context: Callable[[], Any] = nullcontext,
        **kwargs: Any,
    ) -> Any:
        with context():
            return super().forward(*args, result_of=result_of, **kwargs)


class WithoutContext(CheckedAttention):
    """Where there are no data, no other ranks are asked for theirs."""

    def forward(self, *args: Any, context: Callable[[], Any], **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def staged() -> tuple[nn.Module, list[dict[str, Any]]]:
    """The model that is cut into stages, and its micro-batches."""
    torch.manual_seed(3)
    return hugging_face("llama", layers=4), [packed(seed) for seed in range(4)]


def on_four_ranks(rank: int, size: int) -> dict[str, dict[str, Tensor]]:
    """For each schedule losses, outputs and gradients of this rank's stages."""
    meshes = {
        name: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", name)) for name in ("replicate", "shard")
    }
    return {
        f"{schedule}, {name}": in_stages(schedule, meshes[name]["pipeline"], meshes[name][name])
        for schedule, name in (("1f1b", "replicate"), ("zbv_zero_bubble", "replicate"), ("1f1b", "shard"))
    }


def in_stages(schedule: str, pipeline: DeviceMesh, context: DeviceMesh) -> dict[str, Tensor]:
    model, batches = staged()
    spec = SCHEDULES[schedule]
    count = 2 * count_stages(spec, 2)
    config = derive_config(model)
    fqns = split_evenly(config, count)
    fake, mode = fake_copy(model)
    shapes = StageShapes(
        [
            WithoutContext(make_stage(shallow_copy(fake), config, names, index, count).eval(), config.layers, 2)
            for index, names in enumerate(fqns)
        ],
        mode,
    )
    stages = {}
    for index in stages_of_rank(spec, pipeline.get_local_rank(), 2, count // 2):
        stage = make_stage(shallow_copy(model), config, fqns[index], index, count)
        stages[index] = InContext(stage.module, index, count)
        stages[index].zero_grad()
        parallelise_stage(stages[index], config.layers, context)
    runner = PipelineRunner(stages, count, spec, pipeline.get_group(), torch.device("cpu"), shapes)

    group = context.get_group()
    inputs = []
    for batch in batches:
        local, attention = cut_sequence(batch, group.rank(), group.size())
        within = {"context": partial(Ulysses, group, attention), "position_ids": local["position_ids"]}
        inputs.append(StageInputs((local["input_ids"],), within, local))

    found = {}
    parts = runner.train(inputs, lambda output, target: summed_cross_entropy(output, target["labels"]))
    for index, part in enumerate(parts):
        dist.all_reduce(part, group=group)
        found[f"loss {index}"] = part
    for stage in stages.values():
        for name, gradient in gradients(stage).items():
            assert isinstance(gradient, DTensor)
            found[name.removeprefix("module.")] = gradient.full_tensor()
    assert len(found) == len(parts) + sum(1 for stage in stages.values() for _ in stage.parameters())
    results = runner.evaluate(inputs, lambda output, target: output)
    for index, part in enumerate(results):
        found[f"output {index}"] = join_sequence(part, group)
    return found


def test_stages_over_two_context_ranks_train_and_evaluate_as_one_device() -> None:
    ranks, expected = run_ranks(on_four_ranks, 4), on_one_device(*staged())
    for schedule in ranks[0]:
        found = {name: value for rank in ranks for name, value in rank[schedule].items()}
        assert expected.differences(found) == []
