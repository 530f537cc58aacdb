"""Each rank keeps its part of a model: under its own names, with one device's values, and only what can be cut so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.llm.split.stage_split import SplitModel, split_model
from tests.strategies.llm_cases import (
    SEED,
    VOCABULARY,
    WIDTH,
    TinyLM,
    differing,
    packed_batches,
    row_batches,
    values_of,
)

CONFIG = {"layer_prefix": "layers", "input_fqns": ["embedding"], "output_fqns": ["head"]}


class Plain(nn.Module):
    """Embedding, layers and head; what else it does is for its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def layer(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def get_pp_module_config(self) -> dict[str, Any]:
        return {"num_layers": 4, **CONFIG}

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scaling(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) * 0.5


class TupleLayer(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Tuples(Plain):
    def layer(self) -> nn.Module:
        return TupleLayer(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Kept(Plain):
    """Holds what every stage needs."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.BatchNorm1d(3, affine=False)
        self.always.running_mean = torch.rand(3)

    def get_pp_module_config(self) -> dict[str, Any]:
        return {"num_layers": 4, **CONFIG, "always_keep_fqns": ["always"]}


def split(
    kind: type[nn.Module],
    mine: Sequence[int],
    num_stages: int,
    layers: Sequence[int] | None = None,
    *,
    building: Callable[[], AbstractContextManager[None]] = nullcontext,
    **options: Any,
) -> SplitModel:
    torch.manual_seed(SEED)
    with building():
        model = kind()
    names = {one.name for one in fields(SplitOptions)} & options.keys()
    where = SplitOptions(None if layers is None else tuple(layers), **{name: options.pop(name) for name in names})
    settings: dict[str, Any] = {
        "config": None,
        "device": torch.device("cpu"),
        "parallelism": StageParallelism(),
        **options,
    }
    return split_model(model, num_stages=num_stages, local_stages=mine, options=where, **settings)


def whole(kind: type[nn.Module] = TinyLM) -> nn.Module:
    torch.manual_seed(SEED)
    return kind()


@pytest.mark.parametrize(
    "ranks", [[(0,), (1,)], [(0, 2), (1, 3)], [(0, 3), (1, 2)], [(0,), (1,), (2,), (3,)], [(0,)]], ids=str
)
def test_ranks_parts_are_the_model_to_the_bit_under_its_own_names(ranks: list[tuple[int, ...]]) -> None:
    parts = [split(TinyLM, mine, sum(map(len, ranks))) for mine in ranks]
    found = [values_of(part.local_model) for part in parts]
    assert sum(map(len, found)) == len(values_of(whole()))
    assert not differing({name: value for one in found for name, value in one.items()}, values_of(whole()))
    assert {part.names for part in parts} == {tuple(name for name, _ in whole().named_parameters())}


def test_a_model_on_the_meta_device_starts_from_the_same_values_in_every_split() -> None:
    only = values_of(split(Tied, (0,), 1, building=parameters_on_meta).local_model)
    for count in (2, 4):
        for index in range(count):
            part = split(Tied, (index,), count, building=parameters_on_meta)
            found = values_of(part.local_model)
            assert not differing(found, {name: only[name] for name in found})
            assert not any(one.is_meta for stage in part.stages.values() for one in stage.parameters())
    assert not any(value.isnan().any() for value in only.values())


def test_stages_one_after_the_other_are_the_model() -> None:
    (batch,) = packed_batches(1, 1)
    ids, rest = batch[0]["input_ids"], {key: batch[0][key] for key in ("position_ids", "cu_seq_lens_q")}
    first, second = split(TinyLM, (0, 3), 4), split(TinyLM, (1, 2), 4)
    stages = {**first.stages, **second.stages}
    x = ids
    for index in range(4):
        x = stages[index](x, **rest)
    assert torch.equal(x, whole()(ids, **rest))


def test_what_is_kept_and_what_is_run_are_the_same_parameters() -> None:
    part = split(TinyLM, (1, 3), 4)
    kept = {id(parameter) for parameter in part.local_model.parameters()}
    run = {id(parameter) for stage in part.stages.values() for parameter in stage.parameters()}
    assert kept == run
    assert list(part.stages) == [1, 3]


def test_the_memory_of_other_ranks_parts_is_released() -> None:
    foreign: list[weakref.ref[nn.Parameter]] = []

    class Watched(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            foreign.extend(weakref.ref(one) for one in (*self.embedding.parameters(), *self.layers[0].parameters()))

    part = split(Watched, (1,), 2)
    gc.collect()
    assert {name.split(".")[0] for name in values_of(part.local_model)} == {"layers", "norm", "head"}
    assert foreign
    assert all(one() is None for one in foreign)


def test_shapes_of_every_stage_are_known_on_every_rank() -> None:
    ids = row_batches(1)[0]["input_ids"]
    for mine in ((0,), (1,)):
        first, last = split(TinyLM, mine, 2).shapes.infer((ids,), {})
        assert tuple(first.outputs[0].shape) == (*ids.shape, WIDTH)
        assert tuple(last.outputs[0].shape) == (*ids.shape, VOCABULARY)


def test_what_every_stage_needs_is_on_every_rank() -> None:
    expected = whole(Kept).state_dict()
    for mine in ((0,), (1,)):
        state = split(Kept, mine, 2).local_model.state_dict()
        assert torch.equal(state["always.running_mean"], expected["always.running_mean"])


def test_layers_go_where_they_are_told_to() -> None:
    part = split(TinyLM, (0,), 2, layers=[1, 3])
    assert {name.split(".")[1] for name in values_of(part.local_model) if name.startswith("layers")} == {"0"}
    light = split(TinyLM, (0,), 2, input_weight=3, output_weight=1)
    assert {name.split(".")[1] for name in values_of(light.local_model) if name.startswith("layers")} == {"0"}


def test_a_config_that_is_given_goes_before_the_models_own() -> None:
    given = PPModuleConfig(4, "layers", ("embedding",), ("norm", "head"))
    assert len(split(TinyLM, (0,), 2, config=given).stages) == 1
    with pytest.raises(SetupError, match="num_layers=3"):
        split(TinyLM, (0,), 2, config=PPModuleConfig(3, "layers", ("embedding",), ("norm", "head")))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Scaling, r"Scaling cannot be cut.*changes its input.*Move its other operations"),
        (Tuples, r"Tuples cannot be cut.*(changes its input|fails)"),
    ],
)
def test_a_forward_that_a_stage_would_do_again_is_refused_when_shapes_are_first_known(
    kind: type[nn.Module], says: str
) -> None:
    ids = row_batches(1)[0]["input_ids"]
    with pytest.raises(SetupError, match=says):
        split(kind, (0,), 2).shapes.infer((ids,), {})
    split(kind, (0,), 1).shapes.infer((ids,), {})  # a single stage runs it once


def test_tied_parameters_are_refused_with_both_names_where_that_is_asked_for() -> None:
    with pytest.raises(SetupError, match=r"embedding.weight and head.weight are one and the same"):
        split(Tied, (0,), 2, tied_embeddings="refuse")


@pytest.mark.parametrize(("mine", "held"), [((0,), ["embedding"]), ((1,), ["head"])])
def test_every_stage_has_its_copy_of_a_tied_parameter_under_its_first_name(mine: tuple[int], held: list[str]) -> None:
    part = split(Tied, mine, 2)
    assert torch.equal(
        part.local_model.get_parameter("embedding.weight"), whole(Tied).get_parameter("embedding.weight")
    )
    assert "head.weight" not in dict(part.local_model.named_parameters())
    for name in held:
        assert part.local_model.get_submodule(name).weight is part.local_model.get_parameter("embedding.weight")
    assert [one.names for one in part.tied] == [("embedding.weight", "head.weight")]
    assert [one.stages for one in part.tied] == [(0, 1)]


def test_a_rank_with_both_stages_of_a_tied_parameter_has_it_once() -> None:
    part = split(Tied, (0, 3), 4)
    assert part.local_model.get_parameter("embedding.weight") is part.local_model.get_parameter("head.weight")
    assert part.stages[3].module.get_parameter("head.weight") is part.local_model.get_parameter("head.weight")


@pytest.mark.parametrize(
    ("stages", "layers", "says"),
    [
        (2, [1, 1, 2], "layers_per_stage .* has 3 entries, but the schedule has 2 stages"),
        (2, [1, 4], "4"),
        (8, None, "4 layers cannot go to 8 stages"),
    ],
)
def test_layers_that_do_not_fit_the_stages_are_refused(stages: int, layers: list[int] | None, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        split(TinyLM, (0,), stages, layers)
