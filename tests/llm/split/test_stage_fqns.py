"""Which modules each stage holds: how a model's layers are dealt out."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.split.stage_fqns import (
    split_by_cost,
    split_by_layer_counts,
    split_by_layer_ranges,
    split_layers_evenly,
)


def layers(count: int, inputs: tuple[str, ...] = ("embed",), outputs: tuple[str, ...] = ("head",)) -> PPModuleConfig:
    return PPModuleConfig(count, "layers", inputs, outputs)


def counts(stages: list[list[str]]) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


# Evenly


def test_qwen3_8b_over_two_stages_has_18_layers_on_each() -> None:
    config = PPModuleConfig(
        36, "model.layers", ("model.embed_tokens",), ("model.norm", "lm_head"), ("model.rotary_emb",)
    )
    first, last = split_layers_evenly(config, 2)
    assert first == ["model.embed_tokens", *(f"model.layers.{index}" for index in range(18))]
    assert last == [*(f"model.layers.{index}" for index in range(18, 36)), "model.norm", "lm_head"]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "weights", "expected"),
    [
        (4, 1, (1, 1), [4]),
        (4, 2, (1, 1), [2, 2]),
        (5, 2, (1, 1), [3, 2]),
        (4, 4, (1, 1), [1, 2, 1, 0]),
        (7, 3, (1, 1), [2, 3, 2]),
        (8, 3, (1, 1), [3, 3, 2]),
        (9, 3, (2, 0), [2, 4, 3]),
        (6, 3, (0, 3), [3, 3, 0]),
        (8, 4, (0, 0), [2, 2, 2, 2]),
    ],
)
def test_input_and_output_count_as_layers(
    num_layers: int, num_stages: int, weights: tuple[int, int], expected: list[int]
) -> None:
    assert counts(split_layers_evenly(layers(num_layers), num_stages, *weights)) == expected


def test_a_model_without_input_and_output_modules_has_none_to_count() -> None:
    assert split_layers_evenly(PPModuleConfig(4, ""), 4) == [["0"], ["1"], ["2"], ["3"]]
    assert split_layers_evenly(PPModuleConfig(5, ""), 4) == [["0", "1"], ["2"], ["3"], ["4"]]


def test_every_split_holds_each_module_once_and_in_order() -> None:
    config = layers(11)
    for num_stages, weights in product(range(1, 6), product(range(3), repeat=2)):
        stages = split_layers_evenly(config, num_stages, *weights)
        assert [name for stage in stages for name in stage] == list(config.module_fqns)
        assert len(stages) == num_stages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4), "3 layers cannot go to 4 stages; expected 1 to 3 stage(s)"),
        ((3, 0), "3 layers cannot go to 0 stages"),
        ((4, 4, 3, 3), "leave -1 layers for stage 3; expected 0 or more for each stage"),
        ((4, 4, 9, 0), "leave -5 layers for stage 0"),
        ((4, 2, -1, 0), "input_weight is -1; expected a whole number, 0 or more"),
        ((4, 2, 0, 1.5), "output_weight is 1.5; expected a whole number, 0 or more"),
    ],
)
def test_what_cannot_be_split_evenly_is_refused(arguments: Any, message: str) -> None:
    num_layers, *others = arguments
    with pytest.raises(SetupError) as caught:
        split_layers_evenly(layers(num_layers), *others)
    assert message in str(caught.value)


# By layer counts and ranges


def test_layers_are_dealt_out_as_counted() -> None:
    assert split_by_layer_counts(layers(3), [0, 3, 0]) == [["embed"], ["layers.0", "layers.1", "layers.2"], ["head"]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [2, 2],
            "layers_per_stage is [2, 2]; expected whole numbers, 0 or more, that add up to the model's 3 layers",
        ),
        ([4, -1], "layers_per_stage is [4, -1]"),
        ([1.0, 2.0], "layers_per_stage is [1.0, 2.0]"),
        ([2, 0, 1], "[2, 0, 1] leaves stage 1 empty"),
        ([], "3 layers cannot go to 0 stages"),
        ([1, 1, 1, 0], "3 layers cannot go to 4 stages"),
    ],
)
def test_layer_counts_that_do_not_fit_are_refused(given: Any, message: str) -> None:
    with pytest.raises(SetupError) as caught:
        split_by_layer_counts(layers(3), given)
    assert message in str(caught.value)


@pytest.mark.parametrize(("inputs", "outputs", "stage"), [((), ("head",), 0), (("embed",), (), 1)])
def test_a_stage_without_modules_of_its_own_needs_a_layer(
    inputs: tuple[str, ...], outputs: tuple[str, ...], stage: int
) -> None:
    given = [3, 3]
    given[stage] = 0
    with pytest.raises(SetupError, match=f"leaves stage {stage} empty"):
        split_by_layer_counts(layers(3, inputs, outputs), given)


def test_layers_are_dealt_out_by_ranges() -> None:
    assert split_by_layer_ranges(layers(3), [(0, 2), (2, 3)]) == split_by_layer_counts(layers(3), [2, 1])


@pytest.mark.parametrize(
    "given",
    [
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
        [(0, 1), (1, 2)],
        [(1, 2), (2, 3)],
        [(0, 4)],
        [(0, 1, 3)],
        [()],
        [],
    ],
)
def test_ranges_that_leave_out_or_repeat_a_layer_are_refused(given: Any) -> None:
    with pytest.raises(SetupError, match=r"split.layer_ranges is .* from 0 to the model's 3 layers"):
        split_by_layer_ranges(layers(3), given)


@pytest.mark.parametrize("given", [[(0, 4), (4, 1), (1, 3)], [(0, 2.0), (2.0, 3)]])
def test_ranges_that_are_no_counts_are_refused(given: Any) -> None:
    with pytest.raises(SetupError, match="layers_per_stage"):
        split_by_layer_ranges(layers(3), given)


# By cost


def all_counts(num_layers: int, num_stages: int, first_empty: bool, last_empty: bool) -> list[list[int]]:
    found = []
    for ends in product(range(num_layers + 1), repeat=num_stages - 1):
        split = [end - first for first, end in pairwise((0, *ends, num_layers))]
        least = [1] * num_stages
        least[0], least[-1] = int(not first_empty), int(not last_empty)
        if all(count >= needed for count, needed in zip(split, least, strict=True)):
            found.append(split)
    return found


def stage_costs(split: list[int], costs: list[float], ends: tuple[float, float]) -> list[float]:
    parts = [sum(costs[sum(split[:stage]) : sum(split[: stage + 1])]) for stage in range(len(split))]
    parts[0] += ends[0]
    parts[-1] += ends[1]
    return parts


@pytest.mark.parametrize("modules", [(("embed",), ("head",)), ((), ()), (("embed",), ())])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_split_has_a_cheaper_worst_stage(num_stages: int, modules: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    generator = torch.Generator().manual_seed(num_stages)
    for _ in range(20):
        *costs, before, after = (float(cost) for cost in torch.randint(0, 9, (8,), generator=generator))
        ends = (before if modules[0] else 0.0, after if modules[1] else 0.0)
        possible = all_counts(6, num_stages, *(bool(names) for names in modules))
        best = min(
            (max(parts), sum(part * part for part in parts), split)
            for split in possible
            for parts in [stage_costs(split, costs, ends)]
        )
        assert counts(split_by_cost(layers(6, *modules), num_stages, costs, *ends)) == best[2]


def test_layers_of_one_cost_are_dealt_out_evenly_and_the_first_stages_get_fewer() -> None:
    assert counts(split_by_cost(layers(5), 2, [0.1] * 5)) == [2, 3]
    assert counts(split_by_cost(layers(8), 4, [0.1] * 8)) == [2, 2, 2, 2]


def test_an_expensive_layer_does_not_make_the_others_uneven() -> None:
    assert counts(split_by_cost(layers(7), 3, [1, 1, 1, 1, 1, 1, 100])) == [3, 3, 1]


def test_an_expensive_head_stands_alone() -> None:
    assert split_by_cost(layers(4), 3, [1] * 4, output_cost=9)[-1] == ["head"]


@pytest.mark.parametrize(
    ("costs", "others", "message"),
    [
        ([1, 1], {}, "has 2 numbers"),
        ([1, -1, 1], {}, "from -1 to 1"),
        ([1, 1, float("inf")], {}, "to inf"),
        ([1, 1, 1], {"output_cost": float("nan")}, "expected one for each of the model's 3 layers, all finite"),
    ],
)
def test_costs_that_are_none_are_refused(costs: list[float], others: dict[str, float], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        split_by_cost(layers(3), 2, costs, **others)
    assert message in str(caught.value)


def test_fewer_layers_than_stages_are_refused_by_cost_too() -> None:
    with pytest.raises(SetupError, match="3 layers cannot go to 4 stages"):
        split_by_cost(layers(3), 4, [1] * 3)
