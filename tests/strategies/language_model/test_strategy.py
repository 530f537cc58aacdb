"""What a trainer does around a pipeline of stages, and what it refuses: as Lightning on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from tests.distributed import InParts, run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    SEED,
    VOCABULARY,
    Counting,
    Tiny,
    TinyHF,
    Trained,
    differing,
    fit,
    gradients_of,
    hf_config,
    llm,
    loader,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    sgd,
    train_with_lightning,
    trainer,
    values_of,
)

# ---------------------------------------------------------------------- modules


class Scheduled(Tiny):
    """Has a learning rate that halves every two steps, and notes it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


class Clipped(Tiny):
    """Notes gradients when they are clipped."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        model = self.model
        assert model is not None
        self.clipped = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


class VectorLoss(Tiny):
    def summed_loss(self, output: Tensor, micro_batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), micro_batch["labels"].flatten(), reduction="none")


class FailingPrediction(Tiny):
    def prediction(self, output: Tensor, micro_batch: Any) -> Tensor:
        raise KeyError("no such answer")


class ByHand(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Other(pl.LightningModule):
    """Not a PipelineModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch["input_ids"].float()).sum()

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


# ---------------------------------------------------------------------- what a trainer is asked for

UNEVEN: Any = {"steps": 4, "rows": 7, "lengths": (9, 5, 7)}  # 7 rows fill no number of micro-batches but one and seven
RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "max_steps": lambda: {"max_steps": 3},
    "limits": lambda: {"limit_train_batches": 2, "max_epochs": 2},
    "validation in mid-epoch": lambda: {"val_check_interval": 2, "max_epochs": 2},
    "early stopping": lambda: {
        "max_epochs": 5,
        "callbacks": [EarlyStopping("val_loss", mode="max", patience=0, min_delta=1.0)],
        "num_sanity_val_steps": 0,
    },
}
SCHEDULE_OF = dict(zip(RUNS, ("gpipe", "looped_bfs", "dualpipev", "zbv_zero_bubble"), strict=True))
# Models built early and late, and schedules with one stage and with two stages on a rank.
INITIAL = (("1f1b", True), ("looped_bfs", False), ("dualpipev", True))
# Under the second, one rank has two stages, the first and the last.
AROUND = ("1f1b", "zbv_zero_bubble")


def run(strategy: Any, **options: Any) -> dict[str, Any]:
    """Train with validation, and say where everything stands."""
    module = Scheduled()
    used = fit(module, strategy, row_batches(**UNEVEN), loader(row_batches(2, 6)), **options)
    return {
        "losses": module.losses,
        "rates": module.rates,
        "steps": (used.global_step, used.current_epoch, used.fit_loop.epoch_loop.batch_progress.total.completed),
        "metrics": {name: float(value) for name, value in used.callback_metrics.items()},
        "parameters": values_of(module.model),
    }


def numbers(ran: dict[str, Any]) -> dict[str, Any]:
    """Those that rounding may change, by name."""
    metrics = {f"metric {name}": value for name, value in ran["metrics"].items()}
    return {"losses": ran["losses"]} | metrics | ran["parameters"]


def evaluate(strategy: Any) -> dict[str, Any]:
    """Validation, test and prediction without training before."""
    module, data = Tiny(), loader(row_batches(3, 7))
    used = trainer(strategy)
    torch.manual_seed(SEED)
    (validated,) = used.validate(module, data, verbose=False)
    (tested,) = used.test(module, data, verbose=False)
    predictions = enumerate(used.predict(module, data) or [])
    return {**validated, **tested} | {f"prediction {index}": value for index, value in predictions}


def accumulate(strategy: Any) -> dict[str, Any]:
    """Two batches a step; they differ in how many tokens count."""
    module = Clipped()
    used = fit(module, strategy, row_batches(5, 8), accumulate_grad_batches=2)
    return {"gradients": module.gradients, "parameters": values_of(module.model), "steps": used.global_step}


def clip(strategy: Any, **options: Any) -> dict[str, Any]:
    module = Clipped()
    fit(module, strategy, row_batches(4, 8), **options)
    return {"gradients": module.clipped, "parameters": values_of(module.model)}


def clipped_results(clipped: dict[str, Any]) -> dict[str, Any]:
    """By name, the last step's gradients and the parameters."""
    return results_of(Trained([], [clipped["gradients"]], clipped["parameters"]))


def train_around_validation(strategy: Any, validate: bool) -> dict[str, Any]:
    module = Counting()
    options = {"val_check_interval": 1} if validate else {"limit_val_batches": 0}
    # Where all processes are joined by Gloo, Lightning itself has no inference mode.
    with mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=False):
        data = loader(row_batches(2, 8))
        used = fit(module, strategy, row_batches(3, 8), data, num_sanity_val_steps=0, **options)
        if validate:
            used.validate(module, data, verbose=False)
            used.predict(module, data)
        used.fit_loop.max_epochs = 2
        used.fit(module, loader(row_batches(3, 8)), data)
    return {
        "losses": module.losses,
        "forwards": {index: module.forwards.count(index) for index in set(module.forwards)},
        "inference": module.inference_modes,
        "parameters": values_of(module.model),
    }


def initial_values(rank: int, early: bool, schedule: str) -> dict[str, Tensor]:
    used = trainer(llm(schedule), limit_train_batches=1)
    torch.manual_seed(SEED + rank)  # the first rank's draws are everybody's
    module = Tiny(early=early)
    used.fit(module, loader(row_batches(1)))
    return module.initial


# ---------------------------------------------------------------------- what is refused


def tied() -> TinyHF:
    return TinyHF(hf_config("llama") | {"tie_word_embeddings": True})


def of_rank(rank: int, first: Any, second: Any) -> Any:
    return first if rank == 0 else second


GOOD = row_batches(3)
# By name: the strategy's arguments, the module and the batches, each for a rank.
Refusal = tuple[Callable[[int], Any], Callable[[], Any], Callable[[int], Any]]
REFUSALS: dict[str, tuple[Refusal, type[Exception], list[str]]] = {
    "too few micro-batches": (
        (lambda _: llm("1f1b", 1), Tiny, lambda _: GOOD),
        SetupError,
        ["num_microbatches is 1", "at least one for each of the 2 stages", "Use 2 or more"],
    ),
    "fewer layers than stages": (
        (lambda _: llm("zbv_zero_bubble", 4), partial(Tiny, 3), lambda _: GOOD),
        SetupError,
        ["3 layers cannot go to 4 stages", "Lower parallel.pp"],
    ),
    "another module": (
        (lambda _: llm(), Other, lambda _: GOOD),
        SetupError,
        ["PipelineModule, got Other"],
    ),
    "tied embeddings, where they are to be refused": (
        (lambda _: llm(tied_embeddings="refuse"), tied, lambda _: GOOD),
        SetupError,
        ["lm_head.weight", "embed_tokens.weight", "tie_word_embeddings=False", "'sum'"],
    ),
    "optimization by hand": (
        (lambda _: llm(), ByHand, lambda _: GOOD),
        SetupError,
        ["automatic_optimization is False", "Use automatic optimization"],
    ),
    "ranks with different configurations": (
        (lambda rank: llm("gpipe", 4 + rank), Tiny, lambda _: GOOD),
        SetupError,
        ["num_microbatches", "rank 0 has", "rank 1 has"],
    ),
    "too long a sequence": (
        (lambda _: llm(max_length=8), Tiny, lambda _: GOOD),
        InputError,
        ["9 tokens", "maximum is 8", "Cut the sequences"],
    ),
    "different batches": (
        (lambda _: llm(), Tiny, lambda rank: row_batches(3, 8 + 8 * rank)),
        InputError,
        ["different batches", "on rank 0", "on rank 1", "distributed_sampler_kwargs"],
    ),
    "one rank's batch that is none": (
        (lambda _: llm(), Tiny, lambda rank: of_rank(rank, GOOD, [GOOD[0], "words", GOOD[2]])),
        InputError,
        [],
    ),
    "a loss for each token": ((lambda _: llm(), VectorLoss, lambda _: GOOD), InputError, []),
    "a token outside the vocabulary": (
        (lambda _: llm(), Tiny, lambda _: [GOOD[0], GOOD[1] | {"input_ids": GOOD[1]["input_ids"] + VOCABULARY}]),
        InputError,
        [],
    ),
    "a label outside the vocabulary": (
        (lambda _: llm("zbv_zero_bubble"), Tiny, lambda _: [GOOD[0] | {"labels": GOOD[0]["labels"] + 2 * VOCABULARY}]),
        InputError,
        [],
    ),
}
# What the rank says whose own mistake it is; the others say that it made one.
OF_ONE_RANK = {
    "one rank's batch that is none": (1, ["the batch is a str", "expected a mapping"], ["rank(s) 1"]),
    "a loss for each token": (1, ["shape (36,)", "scalar"], ["rank 1: ", "sum over its tokens"]),
    "a token outside the vocabulary": (0, ["index out of range"], ["rank 0: ", "could not be run: IndexError: index"]),
    "a label outside the vocabulary": (0, ["out of bounds"], ["rank 0: ", "could not be run: IndexError: Target"]),
}
# Where that rank's error is PyTorch's.
PYTORCHS = ("a token outside the vocabulary", "a label outside the vocabulary")


def fit_on(rank: int, strategy: Callable[[int], Any], module: Callable[[], Any], batches: Callable[[int], Any]) -> None:
    fit(module(), strategy(rank), batches(rank))


def refusal(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", "was raised"


def on_two_ranks(rank: int, world: int, part: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    if part == "run":
        for name in RUNS:
            found["run", name] = run(llm(SCHEDULE_OF[name]), **RUNS[name]())
    elif part == "evaluate":
        for schedule in AROUND:
            found["evaluate", schedule] = evaluate(llm(schedule))
        for schedule in AROUND[1:]:
            found["around", schedule] = [train_around_validation(llm(schedule), validate) for validate in (True, False)]
    elif part == "initial":
        for schedule, early in INITIAL:
            found["initial", schedule, early] = initial_values(rank, early, schedule)
    elif part == "refusal":
        for name, ((strategy, module, batches), _, _) in REFUSALS.items():
            found["refusal", name] = refusal(partial(fit_on, rank, strategy, module, batches))
        predict = trainer(llm()).predict
        found["refused prediction"] = refusal(lambda: predict(FailingPrediction(), loader(row_batches(1))))
        # After all these errors, a run still goes well.
        found["last"] = run(llm())["losses"]
    else:
        found["accumulate"] = accumulate(llm("interleaved_1f1b"))
        found["clip norm"] = clip(llm("1f1b"), gradient_clip_val=0.05)
    return found


def part_of(key: Any) -> str:
    name = key[0] if isinstance(key, tuple) else key
    parts = {"run": "run", "evaluate": "evaluate", "around": "evaluate", "initial": "initial", "refusal": "refusal"}
    return {**parts, "refused prediction": "refusal", "last": "refusal"}.get(name, "others")


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    """What each of two ranks has come to."""
    return InParts(lambda part: run_ranks(on_two_ranks, 2, part), part_of).of_ranks(2)


def joined(ranks: list[dict[Any, Any]], key: Any, *within: Any) -> dict[str, Tensor]:
    """The parts that ranks hold."""
    together: dict[str, Tensor] = {}
    for rank in ranks:
        part = rank[key]
        for name in within:
            part = part[name]
        together |= part
    return together


# ---------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", RUNS)
def test_a_trainers_options_mean_what_they_mean_on_one_device(name: str, found: list[dict[Any, Any]]) -> None:
    runs: list[dict[str, Any]] = []

    def alone() -> dict[str, Any]:
        runs.append(run("auto", **RUNS[name]()))
        return numbers(runs[-1])

    expected = Reference.of(alone)
    for rank in found:
        got = rank["run", name]
        assert (got["rates"], got["steps"]) == (runs[0]["rates"], runs[0]["steps"])
    assert not ranks_beyond_rounding((numbers(rank["run", name]) for rank in found), expected)


@cache
def evaluated_alone() -> Reference:
    return Reference.of(lambda: evaluate("auto"))


@pytest.mark.parametrize("schedule", AROUND)
def test_evaluation_gives_every_rank_what_one_device_gives(schedule: str, found: list[dict[Any, Any]]) -> None:
    expected = evaluated_alone()
    assert expected.values["prediction 0"].shape == (7, 9, VOCABULARY)
    for rank in found:
        assert rank["evaluate", schedule].keys() == expected.values.keys()
        assert not expected.differences(rank["evaluate", schedule])


@pytest.mark.parametrize("schedule", AROUND[1:])
def test_validation_between_steps_changes_nothing_and_no_forward_is_run_for_shapes(
    schedule: str, found: list[dict[Any, Any]]
) -> None:
    held: set[int] = set()
    for rank in found:
        validated, plain = rank["around", schedule]
        assert validated["losses"] == plain["losses"]
        assert not differing(validated["parameters"], plain["parameters"])
        assert not held & set(plain["forwards"])
        held |= set(plain["forwards"])
        # Six steps of four micro-batches; and after each, and twice more after three, two batches of evaluation.
        assert set(plain["forwards"].values()) == {6 * 4}
        assert set(validated["forwards"].values()) == {6 * 4 + (6 + 2) * 2 * 4}
        assert validated["inference"] == {False}
    assert held == {0, 1, 2, 3}


def test_accumulated_gradients_are_divided_once_by_the_tokens_of_all_batches(found: list[dict[Any, Any]]) -> None:
    batches = row_batches(5, 8)
    for rank in found:
        assert rank["accumulate"]["steps"] == 3  # two batches, two batches, one

    def alone() -> dict[str, Any]:
        torch.manual_seed(SEED)
        module = Tiny()
        module.configure_model()
        model = module.model
        assert model is not None
        optimizer, gradients = sgd(model.parameters()), []
        for parts in (batches[:2], batches[2:4], batches[4:]):
            optimizer.zero_grad()
            losses = [module.summed_loss(module._compute_unsplit_output(part), part) for part in parts]
            total = torch.stack(losses).sum() / sum(module.loss_tokens(part) for part in parts)
            total.backward()
            gradients.append(gradients_of(model))
            optimizer.step()
        return results_of(Trained([], gradients, values_of(model)))

    ranks = (Trained([], rank["accumulate"]["gradients"], rank["accumulate"]["parameters"]) for rank in found)
    assert not ranks_beyond_rounding(map(results_of, ranks), Reference.of(alone))


def test_gradients_are_clipped_by_the_norm_of_all_stages(found: list[dict[Any, Any]]) -> None:
    gradients = joined(found, "clip norm", "gradients")
    # PyTorch divides by the norm and 1e-6 more, which is at most 2e-5 of a norm that is clipped.
    assert torch.nn.utils.get_total_norm(gradients.values()) == pytest.approx(0.05, rel=2.1e-5)
    alone = Reference.of(lambda: clipped_results(clip("auto", gradient_clip_val=0.05)))
    assert not ranks_beyond_rounding((clipped_results(rank["clip norm"]) for rank in found), alone)


@pytest.mark.parametrize(("schedule", "early"), INITIAL)
def test_initial_values_are_those_of_one_device_to_the_bit(
    schedule: str, early: bool, found: list[dict[Any, Any]]
) -> None:
    torch.manual_seed(SEED)
    module = Tiny()
    module.configure_model()
    expected = values_of(module.model)
    assert not differing(joined(found, ("initial", schedule, early)), expected)
    assert all(0 < len(rank["initial", schedule, early]) < len(expected) for rank in found)


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_on_every_rank_with_what_is_needed(name: str, found: list[dict[Any, Any]]) -> None:
    _, error, words = REFUSALS[name]
    own, own_words, others_words = OF_ONE_RANK.get(name, (None, [], []))
    for index, rank in enumerate(found):
        kind, message = rank["refusal", name]
        assert kind == ("IndexError" if name in PYTORCHS and index == own else error.__name__), message
        for word in words + (own_words if index == own else others_words):
            assert word in message


def test_a_prediction_that_fails_is_an_error_on_every_rank(found: list[dict[Any, Any]]) -> None:
    kinds, messages = zip(*(rank["refused prediction"] for rank in found), strict=True)
    assert kinds == ("InputError", "KeyError")
    assert "rank 1: the batch could not be run: KeyError: 'no such answer'" in messages[0]


def test_ranks_go_on_after_errors(found: list[dict[Any, Any]]) -> None:
    assert all(rank["last"] == found[0]["last"] and len(rank["last"]) == 4 for rank in found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "2f2b"}, ["'2f2b'", "1f1b", ".csv"]),
        ({"variable_lengths": False}, ["max_length is None", "variable_lengths is", "False"]),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SetupError) as error:
        llm(**given)
    assert all(word in str(error.value) for word in words)


def test_averaging_by_a_copy_from_before_the_model_is_built_is_refused_on_one_rank() -> None:
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    with pytest.raises(SetupError, match=r"StochasticWeightAveraging .* \(1 here\).* or EMAWeightAveraging"):
        fit(Tiny(), llm("gpipe"), row_batches(1), callbacks=[averaging])


# ---------------------------------------------------------------------- hooks; one process is a pipeline, too


def test_a_module_is_its_own_again_after_training() -> None:
    module = Tiny()
    fit(module, llm("gpipe"), row_batches(1))
    assert module._run_in_stages is None
    assert module._predict_in_stages is None
    batch = row_batches(1)[0]
    loss = module.run_batch(batch).loss
    assert isinstance(module, PipelineModule)
    assert loss.requires_grad


def test_a_step_that_a_hook_skips_trains_nothing_and_the_next_one_goes_on() -> None:
    class Skipping(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    module, data = Skipping(), row_batches(4)
    assert fit(module, llm("gpipe"), data, max_epochs=2).global_step == 2 * 2
    alone = Reference.of(lambda: {"losses": train_with_lightning(Skipping(), data, max_epochs=2).losses})
    assert not alone.differences({"losses": module.losses})
