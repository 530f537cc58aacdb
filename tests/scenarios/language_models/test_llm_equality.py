"""In stages or on one device: the same losses, gradients and parameters, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.schedules.specs import SCHEDULES
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    MAX_LENGTH,
    SEED,
    Tiny,
    TinyHF,
    TinyLM,
    Trained,
    as_one,
    backward_orders,
    differing,
    fit,
    hf_config,
    join,
    llm,
    packed_batches,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    train_alone,
    unequal,
    values_of,
)


class Case(NamedTuple):
    """One way to train."""

    schedule: str
    ranks: int
    microbatches: int
    packed: bool
    static: bool
    optimizer: str

    def __str__(self) -> str:
        kind, lengths = "packed" if self.packed else "rows", "static" if self.static else "variable"
        return f"{self.schedule} P={self.ranks} m={self.microbatches} {kind} {lengths} {self.optimizer}"


# Both numbers of micro-batches, both kinds of batches and of lengths, both optimizers.
WAYS: list[tuple[int, bool, bool, str]] = [
    (4, False, False, "sgd"),
    (8, True, False, "adamw"),
    (4, False, True, "adamw"),
    (8, True, True, "sgd"),
    (4, True, False, "sgd"),
    (8, False, False, "adamw"),
    (4, False, True, "sgd"),
]
CASES = [
    *(Case(schedule, 2, *way) for schedule, way in zip(SCHEDULES, cycle(WAYS), strict=False)),
    Case("1f1b", 4, 4, True, True, "adamw"),
    Case("looped_bfs", 4, 8, True, False, "sgd"),
    Case("zbv_zero_bubble", 4, 8, False, False, "adamw"),
]


# All lengths of the batches, and the first one again, after the parameters have changed.
STEPS = 5


class HFCase(NamedTuple):
    model_type: str
    schedule: str
    ranks: int
    layers: int


HF_CASES = [
    HFCase("llama", "1f1b", 2, 3),
    HFCase("qwen3", "interleaved_zero_bubble", 2, 4),
    HFCase("gpt_neox", "dualpipev", 2, 4),
    HFCase("llama", "interleaved_1f1b", 4, 8),
]


def of_two_ranks_often(cases: Sequence[Any]) -> list[Any]:
    """Parameters of a test: four ranks take longest."""
    return [
        pytest.param(case, id=str(case), marks=(pytest.mark.exhaustive,) if case.ranks == 4 else ()) for case in cases
    ]


def layers_of(ranks: int) -> int:
    """As many as the most stages are."""
    return 2 * ranks


@cache
def batches(packed: bool, count: int) -> list[Any]:
    return packed_batches(count, STEPS) if packed else row_batches(STEPS)


def run_with_trainer(case: Case) -> Trained:
    module = Tiny(layers_of(case.ranks), optimizer=case.optimizer)
    options = {"variable_lengths": False, "max_length": MAX_LENGTH} if case.static else {}
    fit(module, llm(case.schedule, case.microbatches, **options), batches(case.packed, case.microbatches))
    return Trained(module.losses, module.gradients, values_of(module.model))


def run_hf(case: HFCase) -> tuple[Trained, dict[str, torch.Tensor]]:
    module = TinyHF(hf_config(case.model_type, case.layers), chunk_tokens=8, optimizer="adamw")
    fit(module, llm(case.schedule, 8 if case.schedule == "dualpipev" else 4), row_batches(4))
    return Trained(module.losses, module.gradients, values_of(module.model)), module.initial


def run_all(rank: int, world: int, way: Any, cases: Sequence[Any]) -> dict[Any, Any]:
    return {case: way(case) for case in cases}


@cache
def _of_ranks(way: Any, world: int) -> list[dict[Any, Any]]:
    cases: Sequence[Any] = CASES if way is run_with_trainer else HF_CASES
    return run_ranks(run_all, world, way, [case for case in cases if case.ranks == world])


def found(way: Any, case: Case | HFCase) -> list[Any]:
    """What each rank has come to; the cases of a number of ranks are run when a test first asks for one."""
    return [one[case] for one in _of_ranks(way, case.ranks)]


@cache
def alone(layers: int, orders: tuple[tuple[str, tuple[int, ...]], ...], case: Case) -> Trained:
    data = batches(case.packed, case.microbatches)
    length = MAX_LENGTH if case.static else None
    return train_alone(Tiny(layers), case.optimizer, data, case.microbatches, dict(orders), length)


def expected(case: Case) -> Trained:
    layers = layers_of(case.ranks)
    orders = backward_orders(case.schedule, case.ranks, case.microbatches, derive_pp_module_config(TinyLM(layers)))
    # Most schedules have the same order, so the same result.
    fixed = tuple((name, tuple(order)) for name, order in orders.items())
    return alone(layers, fixed, case._replace(schedule="", ranks=0))


@cache
def whole(layers: int, packed: bool, optimizer: str, count: int) -> Reference:
    """Each batch at once, without padding and micro-batches: losses, the first gradients and the last parameters."""
    data = [as_one(batch) for batch in batches(packed, count)]
    return Reference.of(lambda: results_of(train_alone(Tiny(layers), optimizer, data, 1), steps=1))


@pytest.mark.parametrize("case", of_two_ranks_often(CASES))
def test_a_pipeline_trains_as_one_device_that_accumulates_the_same_micro_batches_to_the_bit(case: Case) -> None:
    assert not unequal(join(found(run_with_trainer, case)), expected(case))


@pytest.mark.parametrize("case", of_two_ranks_often(CASES))
def test_a_pipeline_trains_as_one_device_with_the_whole_batch_within_rounding(case: Case) -> None:
    # Batches of rows do not depend on the number of micro-batches.
    count = case.microbatches if case.packed else 0
    reference = whole(layers_of(case.ranks), case.packed, case.optimizer, count)
    results = [results_of(one, steps=1) for one in found(run_with_trainer, case)]
    assert not ranks_beyond_rounding(results, reference)


# A schedule with options trains as without.
OPTIONS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "deferred receives": ("interleaved_zero_bubble", 2, {"schedule_options": {"defer_pp_recv": True}}),
    "deferred receives in a V": ("dualpipev", 2, {"schedule_options": {"defer_pp_recv": True}}),
    "few gathered stages": (
        "interleaved_1f1b",
        4,
        {"schedule_options": {"max_active_stages": 1, "defer_pp_recv": True}, "dp_shard": 2, "stages_per_rank": 4},
    ),
}


def run_with_options(rank: int, world: int, name: str) -> list[bool]:
    schedule, _, options = OPTIONS[name]
    without = {key: value for key, value in options.items() if key != "schedule_options"}
    results = []
    for arguments in (without, options):
        module = Tiny(8, optimizer="adamw")
        fit(module, llm(schedule, 8, **arguments), row_batches(3, rows=8))
        # The parts on this rank: `torch.equal` of DTensors is a collective of all ranks, whose stages differ.
        parts = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in values_of(module.model).items()
        }
        results.append((module.losses, parts))
    (losses, values), (other_losses, other_values) = results
    return [losses == other_losses, *(torch.equal(values[key], other_values[key]) for key in values)]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_schedule_change_no_value(name: str) -> None:
    for equal in run_ranks(run_with_options, OPTIONS[name][1], name):
        assert len(equal) > 1
        assert all(equal)


@pytest.mark.parametrize("case", of_two_ranks_often(HF_CASES))
def test_models_of_hugging_face_train_split_and_untouched(case: HFCase) -> None:
    module = TinyHF(hf_config(case.model_type, case.layers), chunk_tokens=8, optimizer="adamw")
    torch.manual_seed(SEED)
    module.configure_model()
    assert module.model is not None
    assert type(module.model).__module__.startswith("transformers.")
    initial = values_of(module.model)
    count = 8 if case.schedule == "dualpipev" else 4
    orders = backward_orders(case.schedule, case.ranks, count, derive_pp_module_config(module.model))
    reference = train_alone(module, "adamw", row_batches(4), count, orders)
    trained, begun = zip(*found(run_hf, case), strict=True)
    assert not differing({name: value for one in begun for name, value in one.items()}, initial)
    assert not unequal(join(trained), reference)
