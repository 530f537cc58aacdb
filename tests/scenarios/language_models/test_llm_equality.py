"""In stages or on one device: the same losses, gradients and parameters, to the bit.

The whole matrix runs straight over the parts that the strategy is made of; a share of it, and the models of Hugging
Face, run under a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.llm.batches.batching import Batching
from lightning_pipe.llm.model.derived_config import derive_config
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.parallel.gradients import scale_gradients
from lightning_pipe.llm.run.preparation import BatchPreparation
from lightning_pipe.llm.run.runner import PipelineRunner
from lightning_pipe.llm.schedules.named import SCHEDULES, count_stages, stages_of_rank
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.llm.split.stage_split import split_model
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    MAX_LENGTH,
    OPTIMIZERS,
    SEED,
    Tiny,
    TinyHF,
    TinyLM,
    Trained,
    as_one,
    backward_orders,
    differing,
    fit,
    gradients_of,
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
from tests.tiers import sampled, wanted


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


# With two ranks each schedule and number of micro-batches has both optimisers, with both kinds of batches and both of
# lengths; with four, where a step takes longest, a half of these. DualPipeV needs a micro-batch for each stage.
CASES = [
    Case(schedule, ranks, count, packed, static, "sgd" if packed == static else "adamw")
    for schedule, ranks, count, packed, static in product(SCHEDULES, (2, 4), (4, 8), (False, True), (False, True))
    if ranks == 2 or static == (packed == (count == 4))
    if schedule != "dualpipev" or count >= 2 * ranks
]
TRAINER_CASES = [
    Case("gpipe", 2, 4, False, False, "sgd"),
    Case("1f1b", 2, 8, True, False, "adamw"),
    Case("looped_bfs", 2, 4, False, True, "adamw"),
    Case("interleaved_1f1b", 2, 8, True, True, "sgd"),
    Case("interleaved_zero_bubble", 2, 4, True, False, "sgd"),
    Case("zbv_zero_bubble", 2, 8, False, False, "adamw"),
    Case("dualpipev", 2, 4, False, True, "sgd"),
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
    HFCase("llama", "zbv_zero_bubble", 2, 4),
    HFCase("qwen3", "interleaved_zero_bubble", 2, 4),
    HFCase("qwen3", "gpipe", 2, 3),
    HFCase("gpt_neox", "dualpipev", 2, 4),
    HFCase("gpt_neox", "looped_bfs", 2, 4),
    HFCase("llama", "interleaved_1f1b", 4, 8),
    HFCase("qwen3", "1f1b", 4, 4),
]


def layers_of(ranks: int) -> int:
    """As many as the most stages are."""
    return 2 * ranks


@cache
def batches(packed: bool, count: int) -> list[Any]:
    return packed_batches(count, STEPS) if packed else row_batches(STEPS)


def run_directly(
    rank: int, schedule: str, ranks: int, cases: Sequence[Any], shapes: dict[int, StageShapes]
) -> Iterator[tuple[Case, Trained]]:
    """All cases of a schedule over the same stages, which begin anew with the same values.

    *shapes* are of earlier schedules, by their number of stages.
    """
    spec, group = SCHEDULES[schedule], dist.group.WORLD
    assert group is not None
    torch.manual_seed(SEED)
    module = Tiny(layers_of(ranks))
    module.configure_model()
    assert module.model is not None
    stages, cpu = ranks * count_stages(spec, ranks), torch.device("cpu")
    split = split_model(
        module.model,
        None,
        config=None,
        num_stages=stages,
        mine=stages_of_rank(spec, rank, ranks),
        options=SplitOptions(),
        device=cpu,
        parallelism=StageParallelism(),
    )
    runner = PipelineRunner(split.stages, stages, spec, group, cpu, shapes.setdefault(stages, split.shapes))
    parameters, initial = list(split.kept.parameters()), values_of(split.kept)
    for case in [case for case in CASES if case in cases and (case.schedule, case.ranks) == (schedule, ranks)]:
        lengths = Batching(variable_lengths=not case.static, max_length=MAX_LENGTH)
        preparation = BatchPreparation(module, lengths, group, [list(range(ranks))], case.microbatches)
        with torch.no_grad():
            for name, parameter in split.kept.named_parameters():
                parameter.copy_(initial[name])
        optimizer, trained = OPTIMIZERS[case.optimizer](parameters), Trained()
        for batch in batches(case.packed, case.microbatches):
            step = preparation.finish(preparation.begin(batch))
            optimizer.zero_grad()
            losses = runner.train(step.micro_batches, module.summed_loss)
            scale_gradients(parameters, 1 / step.tokens)
            trained.losses += [float(torch.stack(losses).sum() / step.tokens)] if losses else []
            trained.gradients.append(gradients_of(split.kept))
            optimizer.step()
        trained.parameters = values_of(split.kept)
        yield case, trained


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
    if way is not run_directly:
        return {case: way(case) for case in cases}
    found: dict[Any, Any] = {}
    shapes: dict[int, StageShapes] = {}
    for schedule in dict.fromkeys(case.schedule for case in cases):
        found |= run_directly(rank, schedule, world, cases, shapes)
    return found


def often(case: Case | HFCase) -> bool:
    """On two ranks: each schedule once, and models of Hugging Face under two of them.

    From one schedule to the next the number of micro-batches, the kind of the batches and that of their lengths change,
    so that all values occur.
    """
    if case.ranks != 2 or isinstance(case, HFCase):
        return case.ranks == 2 and case.schedule in ("1f1b", "dualpipev")
    turn = [*SCHEDULES].index(case.schedule)
    return (case.microbatches, case.packed, case.static) == ((4, 8)[turn // 2 % 2], turn % 2 == 1, turn % 3 == 0)


# Under a trainer: both numbers of micro-batches, both kinds of batches and of lengths, both optimisers.
UNDER_A_TRAINER = ("gpipe", "1f1b", "interleaved_1f1b", "dualpipev")


def often_under_a_trainer(case: Case) -> bool:
    return case.ranks == 2 and case.schedule in UNDER_A_TRAINER


class Found:
    """What each rank has come to, by case. The cases of a way to train are run when a test first asks for one.

    Args:
        config: says which cases this run of pytest has tests of.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._cases: dict[Any, Sequence[Any]] = {
            run_directly: wanted(config, CASES, often),
            run_with_trainer: wanted(config, TRAINER_CASES, often_under_a_trainer),
            run_hf: wanted(config, HF_CASES, often),
        }
        self._of_ranks = cache(self._run)

    def __call__(self, way: Any, case: Case | HFCase) -> list[Any]:
        return [one[case] for one in self._of_ranks(way, case.ranks)]

    def _run(self, way: Any, world: int) -> list[dict[Any, Any]]:
        return run_ranks(run_all, world, way, [case for case in self._cases[way] if case.ranks == world])


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    return Found(request.config)


@cache
def alone(layers: int, orders: tuple[tuple[str, tuple[int, ...]], ...], case: Case) -> Trained:
    data = batches(case.packed, case.microbatches)
    length = MAX_LENGTH if case.static else None
    return train_alone(Tiny(layers), case.optimizer, data, case.microbatches, dict(orders), length)


def expected(case: Case) -> Trained:
    layers = layers_of(case.ranks)
    orders = backward_orders(case.schedule, case.ranks, case.microbatches, derive_config(TinyLM(layers)))
    # Most schedules have the same order, so the same result.
    fixed = tuple((name, tuple(order)) for name, order in orders.items())
    return alone(layers, fixed, case._replace(schedule="", ranks=0))


@cache
def whole(layers: int, packed: bool, optimizer: str, count: int) -> Reference:
    """Each batch at once, without padding and micro-batches: losses, the first gradients and the last parameters."""
    data = [as_one(batch) for batch in batches(packed, count)]
    return Reference.of(lambda: results_of(train_alone(Tiny(layers), optimizer, data, 1), steps=1))


@pytest.mark.parametrize("case", sampled(CASES, often, str))
def test_a_pipeline_trains_as_one_device_that_accumulates_the_same_micro_batches_to_the_bit(
    case: Case, found: Found
) -> None:
    ranks: list[Trained] = found(run_directly, case)
    losses = next(one.losses for one in ranks if one.losses)
    for one in ranks:
        one.losses = losses
    assert not unequal(join(ranks), expected(case))


@pytest.mark.parametrize("case", sampled(TRAINER_CASES, often_under_a_trainer, str))
def test_a_trainer_trains_as_one_device_that_accumulates_the_same_micro_batches_to_the_bit(
    case: Case, found: Found
) -> None:
    assert not unequal(join(found(run_with_trainer, case)), expected(case))


def test_each_way_to_train_occurs_under_a_trainer() -> None:
    for values in zip(*TRAINER_CASES, strict=True):
        assert set(values) in ({*SCHEDULES}, {2, 4}, {4, 8}, {False, True}, {*OPTIMIZERS})


@pytest.mark.parametrize("case", sampled(CASES, often, str))
def test_a_pipeline_trains_as_one_device_with_the_whole_batch_within_rounding(case: Case, found: Found) -> None:
    # Batches of rows do not depend on the number of micro-batches.
    count = case.microbatches if case.packed else 0
    reference = whole(layers_of(case.ranks), case.packed, case.optimizer, count)
    # Only the rank of the last stage has losses.
    results = [results_of(one, steps=1) for one in found(run_directly, case)]
    results = [{name: value for name, value in one.items() if name != "losses" or value} for one in results]
    assert not ranks_beyond_rounding(results, reference)


@pytest.mark.parametrize("case", sampled(HF_CASES, often, str))
def test_models_of_hugging_face_train_split_and_untouched(case: HFCase, found: Found) -> None:
    module = TinyHF(hf_config(case.model_type, case.layers), chunk_tokens=8, optimizer="adamw")
    torch.manual_seed(SEED)
    module.configure_model()
    assert module.model is not None
    assert type(module.model).__module__.startswith("transformers.")
    initial = values_of(module.model)
    count = 8 if case.schedule == "dualpipev" else 4
    orders = backward_orders(case.schedule, case.ranks, count, derive_config(module.model))
    reference = train_alone(module, "adamw", row_batches(4), count, orders)
    trained, begun = zip(*found(run_hf, case), strict=True)
    assert not differing({name: value for one in begun for name, value in one.items()}, initial)
    assert not unequal(join(trained), reference)
