"""The strategy that chooses: what it chose trains as if it had been named, and choosing trains nothing."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.measure import layer_profile
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_profile import LayerWork
from lightning_pipe.llm.split import stage_split
from lightning_pipe.strategies.language_model import stage_choice
from lightning_pipe.strategies.language_model.auto import AutoLLMPipelineStrategy
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
from tests.distributed import InParts, run_ranks
from tests.strategies.llm_cases import (
    SEED,
    Tiny,
    TinyHF,
    Trained,
    fit,
    hf_config,
    llm,
    packed_batches,
    row_batches,
    trainer,
    unequal,
    values_of,
)
from tests.tiers import sampled

# ---------------------------------------------------------------------- on one rank


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "gpipe"}, "schedule='gpipe'"),
        ({"stages_per_rank": 1}, "stages_per_rank=1"),
        ({"split": {"layers_per_stage": [2, 2]}}, r"split.layers_per_stage=\[2, 2\]"),
        ({"split": {"balance": "time", "input_weight": 2}}, "split.balance='time' and split.input_weight=2"),
    ],
    ids=str,
)
def test_what_is_chosen_cannot_be_given(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=f"{words} is given to the automatic strategy, which chooses it"):
        AutoLLMPipelineStrategy(**given)


def test_defaults_of_what_is_chosen_may_be_given_as_lightnings_cli_does() -> None:
    AutoLLMPipelineStrategy(schedule="1f1b", stages_per_rank=None, split={"tied_embeddings": "refuse"})


@pytest.mark.parametrize(
    "wrong",
    [{"memory_limit": 0}, {"memory_limit": "80GB"}, {"trials": -1}, {"trials": None}, {"batch_size": 0}],
    ids=str,
)
def test_numbers_that_are_too_small_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=rf"{next(iter(wrong))} is .*; expected a whole number"):
        AutoLLMPipelineStrategy(**wrong)


def test_one_rank_has_nothing_to_choose() -> None:
    with pytest.raises(SetupError, match=r"a pipeline of at least 2 ranks.* got 1\. Use at least 2 devices"):
        fit(Tiny(), AutoLLMPipelineStrategy(), row_batches(1))


# ---------------------------------------------------------------------- on two

ROWS = 8  # of a batch: each of its divisors is a number of micro-batches to measure and to simulate


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of a batch; notes what was asked for."""

    def __init__(self, fails: bool = False) -> None:
        (self.batch,) = row_batches(1)
        self.fails = fails

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.fails:
            raise OSError("the disk is gone")
        torch.rand(1)
        return {key: value[index] for key, value in self.batch.items()}


class Broken(Tiny):
    """Has a loss on the first rank only."""

    def summed_loss(self, output: Tensor, micro_batch: Any) -> Tensor:
        if dist.get_rank():
            raise KeyError("labels")
        return super().summed_loss(output, micro_batch)


def trained(
    module: Any, strategy: LLMPipelineStrategy, batches: Any, **options: Any
) -> tuple[Trained, LLMPipelineStrategy]:
    fit(module, strategy, batches, **options)
    return Trained(module.losses, module.gradients, values_of(module.model)), strategy


def refusal(module: Any, strategy: LLMPipelineStrategy, batches: Any) -> str:
    try:
        fit(module, strategy, batches)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def arguments_of(strategy: LLMPipelineStrategy) -> dict[str, Any]:
    plan = strategy.plan
    return {
        "schedule": plan.spec.name,
        "stages_per_rank": plan.stages_per_rank,
        "num_microbatches": plan.num_microbatches,
        "split": {"layers_per_stage": list(plan.split.layers_per_stage or ())},
    }


def as_named(
    make: Callable[[], Any], strategy: AutoLLMPipelineStrategy, batches: Any, **options: Any
) -> dict[str, Any]:
    """Train with a choice, and again with its arguments."""
    (one, used) = trained(make(), strategy, batches)
    found = arguments_of(used)
    (other, _) = trained(make(), LLMPipelineStrategy(**{**found, **options}), batches)
    assert strategy.choice is not None
    tried = [each.measured_seconds is not None for each in strategy.choice.predictions]
    return {"arguments": found, "unequal": unequal(one, other), "tried": sum(tried)}


def uneven_clock(rank: int) -> Callable[..., Any]:
    """The second rank finds that everything takes five times as long."""
    measure = layer_profile.measure_layer_times

    def slower(*args: Any, **options: Any) -> ModelPieceResults[LayerWork]:
        found = measure(*args, **options)
        if rank == 0:
            return found

        def scaled(one: LayerWork) -> LayerWork:
            return LayerWork(*(5.0 * number for number in one))

        first = None if found.input is None else scaled(found.input)
        return ModelPieceResults(scaled(found.empty), first, tuple(map(scaled, found.layers)), scaled(found.output))

    return slower


def out_of_memory_once(rank: int) -> Callable[..., None]:
    """The second rank has no memory for the first stages it is to hold."""
    stand_in, calls = vars(stage_split)["randomize_module_tensors"], itertools.count()

    def called(*args: Any) -> None:
        if rank == 1 and next(calls) == 0:
            raise torch.OutOfMemoryError("no 2 GiB")
        stand_in(*args)

    return called


def refused_on_two_ranks(rank: int, world: int) -> dict[str, Any]:
    rows = row_batches(3)
    vars(stage_choice)["measure_layer_times"] = uneven_clock(rank)
    refused = {
        "fixed": refusal(Tiny(), AutoLLMPipelineStrategy(num_microbatches=3), rows),
        "memory": refusal(Tiny(), AutoLLMPipelineStrategy(memory_limit=1000, num_microbatches=4), rows),
        "data": refusal(Tiny(), AutoLLMPipelineStrategy(), DataLoader(Rows(fails=rank == 1), 16)),
        "loss": refusal(Broken(), AutoLLMPipelineStrategy(num_microbatches=4), rows),
        "layers": refusal(Tiny(1), AutoLLMPipelineStrategy(num_microbatches=4), rows),
        "ranks": refusal(Tiny(), AutoLLMPipelineStrategy(trials=rank), rows),
    }
    return {"refused": refused}


def by_steps(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Chosen by steps, among several numbers of micro-batches."""
    found: dict[str, Any] = {}
    rows, path = row_batches(2, ROWS), Path(folder) / "made" / "choice.yaml"
    stage_choice._SECONDS, stage_choice._ROUNDS = 0.0, 2  # as few steps as can be: the rest is no matter of time
    torch.manual_seed(SEED)
    auto = AutoLLMPipelineStrategy(trials=2, save_plan=path, batching={"max_length": 12})
    found["steps"] = as_named(Tiny, auto, rows, batching={"max_length": 12})
    found["report"] = auto.choice

    # A limit leaves out what is too large.
    assert auto.choice is not None
    peaks = sorted(one.peak for one in auto.choice.predictions if one.candidate.num_microbatches == 4)
    limited = AutoLLMPipelineStrategy(trials=0, num_microbatches=4, memory_limit=peaks[len(peaks) // 2])
    trained(Tiny(), limited, rows)
    found["limited"] = limited.choice
    found["saved"] = yaml.safe_load(path.read_text())
    return found


def by_simulation(rank: int, world: int) -> dict[str, Any]:
    """By simulation alone, among all numbers of micro-batches."""
    return {"simulated": as_named(lambda: Tiny(3), AutoLLMPipelineStrategy(trials=0), row_batches(3))}


def of_other_kinds(rank: int, world: int) -> dict[str, Any]:
    """For a model of Hugging Face's, for packed documents, and with a number of micro-batches that is given."""
    stage_choice._SECONDS, stage_choice._ROUNDS = 0.0, 1
    rows = row_batches(2, ROWS)
    hugging = as_named(lambda: TinyHF(hf_config("llama")), AutoLLMPipelineStrategy(trials=1, num_microbatches=4), rows)
    full = AutoLLMPipelineStrategy(trials=0, activation_checkpoint={"mode": "full"}, num_microbatches=8)
    return {
        "hugging": hugging,
        "packed": as_named(Tiny, AutoLLMPipelineStrategy(trials=1), packed_batches(4, 2)),
        "fixed": as_named(Tiny, full, rows, activation_checkpoint={"mode": "full"}),
    }


def around_a_choice(rank: int, world: int) -> dict[str, Any]:
    """What a choice does not depend on, and what it leaves as it was."""
    found: dict[str, Any] = {}
    stage_choice._SECONDS, stage_choice._ROUNDS = 0.0, 1
    rows = row_batches(1)

    # Reading rows draws random numbers, which training then draws again.
    states = []
    for strategy in (AutoLLMPipelineStrategy(trials=1, num_microbatches=4), llm("1f1b", 4)):
        torch.manual_seed(SEED)
        module = Tiny(early=True)  # what is built later begins with the random state that was recorded
        trainer(strategy).fit(module, DataLoader(Rows(), 16))
        states.append((torch.get_rng_state(), module.initial))
    (state, initial), (other_state, other) = states
    names = set(initial) & set(other)
    found["random"] = torch.equal(state, other_state), all(torch.equal(initial[one], other[one]) for one in names)

    # A model that was evaluated first has its stages already.
    used_trainer, module = trainer(AutoLLMPipelineStrategy(trials=0)), Tiny()
    used_trainer.validate(module, DataLoader(rows, batch_size=None), verbose=False)  # type: ignore[arg-type]
    found["evaluated"] = used_trainer.strategy.schedule_spec.name  # type: ignore[attr-defined]

    # What ranks measured differently, they choose alike. This comes last, since the clock stays as it is.
    vars(stage_choice)["measure_layer_times"] = uneven_clock(rank)
    _, used = trained(Tiny(), AutoLLMPipelineStrategy(trials=0, num_microbatches=4), rows)
    found["uneven"] = arguments_of(used)
    return found


PART_OF = {
    **dict.fromkeys(("steps", "report", "limited", "saved"), "steps"),
    **dict.fromkeys(("hugging", "packed", "fixed"), "kinds"),
    **dict.fromkeys(("random", "evaluated", "uneven"), "around"),
    "simulated": "simulated",
    "refused": "refused",
}


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        run = {
            "steps": lambda: run_ranks(by_steps, 2, folder),
            "simulated": lambda: run_ranks(by_simulation, 2),
            "kinds": lambda: run_ranks(of_other_kinds, 2),
            "around": lambda: run_ranks(around_a_choice, 2),
            "refused": lambda: run_ranks(refused_on_two_ranks, 2),
        }
        yield InParts(lambda part: run[part](), PART_OF.__getitem__).of_ranks(2)


# The case "fixed" is chosen by simulation alone, too.
@pytest.mark.parametrize(
    "case", sampled(["steps", "simulated", "hugging", "packed", "fixed"], lambda case: case != "simulated")
)
def test_a_choice_trains_to_the_bit_what_the_same_arguments_train(case: str, found: Any) -> None:
    assert [one[case]["unequal"] for one in found] == [[], []]
    assert found[0][case]["arguments"] == found[1][case]["arguments"]


def test_as_many_are_run_for_real_as_are_asked_for(found: Any) -> None:
    assert {case: found[0][case]["tried"] for case in ("steps", "fixed", "hugging")} == {
        "steps": 2,
        "fixed": 0,
        "hugging": 1,
    }


def test_the_fastest_is_chosen_of_those_that_ran(found: Any) -> None:
    choice = found[0]["report"]
    rounds = max(len(one.measured_round_seconds) for one in choice.predictions)
    to_the_end = [one for one in choice.predictions if len(one.measured_round_seconds) == rounds]
    assert choice.chosen.measured_seconds == min(one.measured_seconds for one in to_the_end)


def test_micro_batches_divide_the_batch_or_are_those_that_are_given(found: Any) -> None:
    assert ROWS % found[0]["steps"]["arguments"]["num_microbatches"] == 0
    assert found[0]["packed"]["arguments"]["num_microbatches"] == 4
    assert found[0]["fixed"]["arguments"]["num_microbatches"] == 8


def test_ranks_that_measure_different_times_choose_alike(found: Any) -> None:
    assert found[0]["uneven"] == found[1]["uneven"]


def test_what_does_not_fit_the_memory_is_left_out(found: Any) -> None:
    choice = found[0]["limited"]
    assert choice.too_large > 0
    assert max(one.peak for one in choice.predictions) <= choice.memory_limit


def with_full_memory(rank: int, world: int) -> tuple[tuple[str, ...], dict[str, Any]]:
    strategy = AutoLLMPipelineStrategy(trials=1, num_microbatches=4)
    stage_choice._SECONDS, stage_choice._ROUNDS = 0.0, 1
    with mock.patch.object(stage_split, "randomize_module_tensors", out_of_memory_once(rank)):
        trained(Tiny(), strategy, row_batches(1))
    assert strategy.choice is not None
    return strategy.choice.notes, arguments_of(strategy)


def test_a_way_that_one_rank_has_no_memory_for_is_left_out_on_all() -> None:
    (notes, arguments), other = run_ranks(with_full_memory, 2)
    assert (notes, arguments) == other
    (note,) = notes
    assert "could not be run" in note
    assert "rank 1: the stages cannot be moved to device 'cpu': OutOfMemoryError: no 2 GiB" in note


def test_random_numbers_and_initial_values_are_those_of_training_without_a_choice(found: Any) -> None:
    assert [one["random"] for one in found] == [(True, True)] * 2


def test_the_choice_can_be_read_as_the_named_strategy(found: Any) -> None:
    saved = found[0]["saved"]
    assert saved["class_path"] == "lightning_pipe.strategies.LLMPipelineStrategy"
    assert saved["init_args"] == {**found[0]["steps"]["arguments"], "batching": {"max_length": 12}}
    LLMPipelineStrategy(**saved["init_args"])


def test_evaluation_chooses_nothing(found: Any) -> None:
    assert found[0]["evaluated"] == "1f1b"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("fixed", "SetupError: `num_microbatches` must divide the rows of a batch, got 3 for 16 row(s)"),
        ("memory", "candidate schedules fits into 1,000 bytes per rank"),
        ("data", "no batch is available for measurements: the disk is gone"),
        ("loss", "the layers cannot be measured: KeyError: 'labels'"),
        ("layers", "No schedule supports 4 micro-batches with this number of ranks and layers"),
        ("ranks", "the pipeline's configuration differs between ranks: rank 0 has 'trials' = '0'"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused_on_every_rank(case: str, says: str, found: Any) -> None:
    assert [one["refused"][case] for one in found if says not in one["refused"][case]] == []
