"""The train pipeline as a user of TorchRec's meets it: the same calls, the same numbers, and what goes wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from lightning_pipe.engine import InputError, PipelineTask, PlanError, SetupError, TaskError
from lightning_pipe.recsys import TrainPipeline
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import (
    DEPTHS,
    STEPS,
    Case,
    adam,
    difference,
    grouped,
    mixed_batches,
    sharded,
    train,
    values_of,
)
from tests.recsys.rewrite_cases import Bags, Batch
from tests.recsys.sharding_cases import CPU
from tests.recsys.train_pipeline_cases import (
    EVERYTHING,
    PLACES,
    POOLED,
    WRONG,
    around_tasks,
    hooks,
    immovable,
    on_rank,
    pipeline_of,
    replaced,
)

# A part of what is tried on two ranks, to what it found on each.
TwoRanks = Callable[[str], list[Any]]


# Each bad batch in one place, and so that each place has one.
WRONG_CASES = [(name, PLACES[index % len(PLACES)]) for index, name in enumerate(WRONG)]
# For each part two plans that differ.
CASES_OF: dict[str, Sequence[Any]] = {
    "detached": ("base", "fused_sparse_dist"),
    "reset": ("serial", "prefetch"),
    "closed": ("threaded_input", "prefetch"),
    "end of data": ("base", "fused_sparse_dist"),
    "failed step": ("base", "prefetch"),
    "missing losses": ("prefetch", "fused_sparse_dist"),
    "evaluated": ("serial", "fused_sparse_dist"),
    "evaluation": ("prefetch", "fused_sparse_dist", "semi_sync"),
    "accumulation": ("base", "prefetch"),
    "wrong": WRONG_CASES,
}


@pytest.fixture(scope="module")
def two_ranks() -> TwoRanks:
    """What holds on each rank in a part."""
    return cache(lambda part: run_ranks(on_rank, 2, part, CASES_OF.get(part, []), False))


def holds(two_ranks: TwoRanks, name: str, part: str) -> None:
    assert [[what for what, is_true in found[part].items() if not is_true] for found in two_ranks(name)] == [[], []]


@pytest.mark.parametrize("case", ["Bags, table_wise", "Bags, column_wise", "Sequences, row_wise"])
def test_every_plan_trains_torchrecs_model_to_the_bit_as_torchrecs_pipeline_does(
    two_ranks: TwoRanks, case: str
) -> None:
    holds(two_ranks, "like torchrec", case)


def test_trained_feature_processors_inside_ddp_are_refused(two_ranks: TwoRanks) -> None:
    assert all("model.a hold trained feature processors" in found for found in two_ranks("processors"))


@pytest.mark.parametrize("plan", CASES_OF["detached"])
def test_a_detached_model_can_be_evaluated_and_training_goes_on_with_the_batches_in_flight(
    two_ranks: TwoRanks, plan: str
) -> None:
    holds(two_ranks, "detached", plan)


@pytest.mark.parametrize("plan", CASES_OF["reset"])
def test_reset_gives_up_what_is_in_flight_and_training_goes_on(two_ranks: TwoRanks, plan: str) -> None:
    holds(two_ranks, "reset", plan)


@pytest.mark.parametrize("plan", CASES_OF["closed"])
def test_close_leaves_no_thread_no_forward_and_no_hook_behind(two_ranks: TwoRanks, plan: str) -> None:
    holds(two_ranks, "closed", plan)


@pytest.mark.parametrize("plan", CASES_OF["end of data"])
def test_the_end_of_the_data_stops_each_time_and_another_iterator_goes_on(two_ranks: TwoRanks, plan: str) -> None:
    holds(two_ranks, "end of data", plan)


@pytest.mark.parametrize(("name", "place"), WRONG_CASES)
def test_a_batch_that_is_wrong_on_one_rank_is_an_input_error_on_every_rank(
    two_ranks: TwoRanks, name: str, place: tuple[str, int, str]
) -> None:
    for found in two_ranks("wrong"):
        kinds, text, clean = found[name, place]
        assert kinds[0] == "InputError"
        assert WRONG[name][2] in text
        assert clean


def test_between_machines_a_wrong_batch_is_an_input_error_on_every_rank_too() -> None:
    case = ("no features", PLACES[1])
    for found in run_ranks(on_rank, 2, "wrong", [case], True):
        kinds, text, clean = found[case]
        assert (kinds[0], WRONG["no features"][2] in text, clean) == ("InputError", True, True)


def test_plans_that_differ_between_ranks_are_an_error_on_every_rank(two_ranks: TwoRanks) -> None:
    for found in two_ranks("differing plans"):
        for (first, second), (kinds, text) in found.items():
            assert kinds[0] == "PlanError"
            assert f"rank 0 has 'name' = '{first}', but rank 1 has 'name' = '{second}'" in text


@pytest.mark.parametrize("plan", CASES_OF["failed step"])
def test_a_step_that_raises_closes_the_pipeline_and_another_can_follow(two_ranks: TwoRanks, plan: str) -> None:
    holds(two_ranks, "failed step", plan)


@pytest.mark.parametrize("plan", CASES_OF["missing losses"])
def test_a_rank_without_a_loss_keeps_nobody_waiting_and_counts_as_zero(two_ranks: TwoRanks, plan: str) -> None:
    holds(two_ranks, "missing losses", plan)


@pytest.mark.parametrize("plan", CASES_OF["evaluated"])
def test_in_evaluation_mode_progress_trains_nothing(two_ranks: TwoRanks, plan: str) -> None:
    holds(two_ranks, "evaluated", plan)


@pytest.mark.parametrize("plan", CASES_OF["evaluation"])
def test_an_evaluation_in_between_leaves_batches_in_flight_and_gives_what_a_drained_run_gives(
    two_ranks: TwoRanks, plan: str
) -> None:
    holds(two_ranks, "evaluation", plan)


def test_learning_rates_set_between_batches_reach_tables_and_layers_under_every_plan_alike(
    two_ranks: TwoRanks,
) -> None:
    for found in two_ranks("schedules"):
        assert [what for what, is_true in found.items() if not is_true] == []


@pytest.mark.parametrize("plan", CASES_OF["accumulation"])
def test_gradients_accumulate_over_batches_under_every_plan_as_in_a_loop(two_ranks: TwoRanks, plan: str) -> None:
    assert [found[plan] for found in two_ranks("accumulation")] == [True, True]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"accumulate": 0}, "accumulate is 0; expected a whole number"),
        ({"accumulate": 2, "max_norm": 1.0}, "max_norm is 1.0, .* accumulate is 2"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_replaced(arguments: dict[str, Any], says: str) -> None:
    model = sharded(POOLED)
    with pytest.raises(SetupError, match=says):
        TrainPipeline(model, adam(model), CPU, **grouped(arguments))
    assert not replaced(model.module)


# What one rank shows.


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("plan", DEPTHS)
def test_the_memory_of_a_batch_is_freed_when_it_is_trained(plan: str) -> None:
    alive: dict[int, list[tuple[str, weakref.ref[Any]]]] = {}
    seen: set[str] = set()

    def run(task: PipelineTask, ctx: Any) -> None:
        task.fn(ctx)
        seen.update(vars(ctx))
        refs = alive.setdefault(ctx.iter_idx, [])
        tensors = [ctx.batch.dense, ctx.batch.sparse.values()]
        if task.name == "EmbForward":
            tensors += [cut.source for cut in ctx.embeddings.iterate_autograd_cuts()]
        refs += [("tensor", weakref.ref(tensor)) for tensor in tensors]
        refs += [
            (name, weakref.ref(value))
            for name, value in [("context", ctx), *vars(ctx).items()]
            if name in ("context", "batch", "splits", "input_requests", "features", "embeddings", "loss")
            and value is not None
        ]

    def data() -> Iterator[Any]:
        made = mixed_batches(STEPS)
        while made:
            yield made.pop(0)

    model = sharded(EVERYTHING)
    with around_tasks(run), pipeline_of(model, plan) as pipeline:
        feed = data()
        for step in range(STEPS):
            pipeline.progress(feed)
            left = {name for index, refs in alive.items() if index <= step for name, ref in refs if ref() is not None}
            assert left == set()
            in_flight = [index for index, refs in alive.items() if any(ref() is not None for _, ref in refs)]
            assert in_flight == list(range(step + 1, min(step + DEPTHS[plan], STEPS)))[: len(in_flight)]
            assert len(in_flight) <= DEPTHS[plan] - 1
    assert {"splits", "input_requests", "features", "embeddings", "loss"} <= seen


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("plan", "trained"), [("serial", STEPS), ("base", STEPS - 2), ("prefetch", STEPS - 2)])
def test_batches_in_flight_at_the_end_of_the_data_can_be_abandoned(plan: str, trained: int) -> None:
    model = sharded(POOLED)
    with pipeline_of(model, plan, execute_all_batches=False) as pipeline:
        outputs, _ = train(pipeline, POOLED.data(STEPS))
        assert len(outputs) == trained
        assert pipeline.pipeline.in_flight == ()
        more, _ = train(pipeline, POOLED.data(STEPS))
        assert len(more) == trained


@pytest.mark.usefixtures("one_rank")
def test_losses_of_several_samples_are_summed_as_in_torchrec() -> None:
    class Split(Bags):
        def forward(self, batch: Batch) -> Any:
            return torch.stack([super().forward(batch) / 2] * 2), torch.tensor(0.0)

    one, two = sharded(Case(Split)), sharded(POOLED)
    for model in (one, two):
        with pipeline_of(model) as pipeline:
            train(pipeline, POOLED.data(STEPS))
    wholes = {name.replace("model.", ""): value for name, value in values_of(two).items()}
    assert difference(values_of(one), wholes) == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("returned", "training"), [(torch.tensor(1.0), True), ({"loss": 1}, False)])
def test_a_model_that_returns_no_pair_is_refused(returned: Any, training: bool) -> None:
    class Other(Bags):
        def forward(self, batch: Batch) -> Any:
            super().forward(batch)
            return returned

    model = sharded(Case(Other))
    model.module.train(training)
    with pipeline_of(model) as pipeline, pytest.raises(SetupError, match=r"\(losses, output\)"):
        pipeline.progress(iter(POOLED.data(1)))


@pytest.mark.usefixtures("one_rank")
def test_what_cannot_be_built_leaves_nothing_behind() -> None:
    model = sharded(POOLED)
    with pytest.raises(PlanError, match="neither one of"):
        TrainPipeline(model, adam(model), CPU, "prefetched")
    assert not replaced(model.module)
    with pipeline_of(model) as pipeline:
        with pytest.raises(SetupError, match="replaced already"):
            TrainPipeline(model, adam(model), CPU)
        assert hooks(model) == 0
        train(pipeline, POOLED.data(STEPS))


@pytest.mark.usefixtures("one_rank")
def test_an_evaluation_that_is_not_over_keeps_training_waiting_until_it_is_closed() -> None:
    model = sharded(POOLED)
    with pipeline_of(model) as pipeline:
        feed = iter(POOLED.data(STEPS))
        pipeline.progress(feed)
        outputs = pipeline.evaluate(iter(POOLED.data(3)))
        next(outputs)
        assert not model.module.training
        for call in (lambda: pipeline.progress(feed), lambda: next(pipeline.evaluate(iter([])))):
            with pytest.raises(SetupError, match=r"evaluation .* is still running.*close"):
                call()
        outputs.close()
        assert model.module.training
        assert len(train(pipeline, feed)[0]) == STEPS - 1


@pytest.mark.usefixtures("one_rank")
def test_an_evaluation_that_fails_closes_the_pipeline_and_leaves_the_model_as_it_was() -> None:
    model = sharded(POOLED)
    with pipeline_of(model) as pipeline:
        pipeline.progress(iter(POOLED.data(STEPS)))
        with pytest.raises(InputError, match="Opaque"):
            list(pipeline.evaluate(iter([immovable(POOLED.data(1)[0])])))
        assert model.module.training
        assert not replaced(model.module)
        with pytest.raises(SetupError, match="closed"):
            pipeline.progress(iter(POOLED.data(1)))


@pytest.mark.usefixtures("one_rank")
def test_an_iterator_that_raises_is_named_and_closes_the_pipeline() -> None:
    def failing() -> Iterator[Any]:
        yield from POOLED.data(3)
        raise OSError("no such shard")

    model = sharded(POOLED)
    with pipeline_of(model) as pipeline:
        with pytest.raises(TaskError, match=r"'data iterator' of iteration 3 .* OSError: no such shard"):
            train(pipeline, failing())
        assert not replaced(model.module)
        with pytest.raises(SetupError, match="closed"):
            pipeline.progress(iter(POOLED.data(1)))
