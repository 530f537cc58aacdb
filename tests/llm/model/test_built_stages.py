"""Stages built by hand, as lists of modules, PyTorch's stages or its Pipe, train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, PipelineStage, SplitPoint, pipeline

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.llm.model.built_stages import HandBuiltStages
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    VOCABULARY,
    WIDTH,
    Noted,
    PipelineModule,
    differing,
    fit,
    llm,
    loader,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    train_alone,
    train_with_lightning,
    trainer,
    values_of,
)

ROWS, LENGTH = 4, 9


class First(nn.Module):
    """Takes token ids and a keyword, and returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, input_ids: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(input_ids)
        return hidden * scale[:, None, None], hidden.detach()


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, embedded: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(hidden).tanh() + embedded, embedded


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: Tensor, embedded: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.head(hidden + embedded * scale[:, None, None])
        return out


def parts() -> list[nn.Module]:
    return [First(), Middle(), Middle(), Last()]


class ByHand(Noted, PipelineModule):
    """Builds its stages by hand.

    Args:
        built: function that returns them.
        early: build them before the trainer is there, as real tensors.
    """

    def __init__(self, built: Callable[[], Any] = parts, early: bool = False) -> None:
        super().__init__(optimizer="adamw")
        self.built = built
        if early:
            torch.manual_seed(7)
            self.model = built()

    def build_model(self) -> Any:
        return self.built()

    def model_inputs(self, micro_batch: Any) -> Any:
        return (micro_batch["input_ids"],), {key: micro_batch[key] for key in ("scale",) if key in micro_batch}


def on_meta() -> list[nn.Module]:
    with parameters_on_meta():
        return parts()


def pytorch_stages() -> list[PipelineStage]:
    return [PipelineStage(part, index, 4, torch.device("cpu")) for index, part in enumerate(parts())]


class Whole(nn.Module):
    """A model for PyTorch's tracer."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.skips = skips

    def forward(self, input_ids: Tensor) -> Tensor:
        x = embedded = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x + embedded if self.skips else x)
        return out


def pipe(skips: bool = False, count: int = 4) -> Pipe:
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, count)}
    return pipeline(Whole(skips), (torch.zeros(ROWS, LENGTH, dtype=torch.long),), split_spec=spec)


def batches() -> list[dict[str, Tensor]]:
    data = row_batches(2, lengths=(LENGTH,))
    return [batch | {"scale": torch.linspace(0.5, 1.5, 16)} for batch in data]


# module, schedule, name of its micro-batches' further input
CASES: dict[str, tuple[Callable[[], ByHand], str, bool]] = {
    "a list of modules": (ByHand, "interleaved_1f1b", True),
    "two modules a stage": (ByHand, "1f1b", True),
    "built early": (lambda: ByHand(early=True), "zbv_zero_bubble", True),
    "PyTorch's stages": (lambda: ByHand(pytorch_stages), "zbv_zero_bubble", True),
    "a Pipe": (lambda: ByHand(pipe), "interleaved_1f1b", False),
}


def data_of(scaled: bool) -> list[dict[str, Tensor]]:
    return batches() if scaled else row_batches(2, lengths=(LENGTH,))


def message(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}; {error.__cause__}"
    return "nothing"


def drawn_by_each_rank() -> list[nn.Module]:
    """The stages; the last has an order and a mask that every rank draws for itself, with equal sums and beginnings."""
    stages = parts()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(dist.get_rank()))
    stages[-1].register_buffer("order", torch.cat([torch.arange(4), 4 + order]))
    stages[-1].register_buffer("mask", torch.cat([torch.ones(4, dtype=torch.bool), order < 8]))
    return stages


def drawn(stage: nn.Module) -> list[list[Any]]:
    return [buffer.tolist() for name, buffer in stage.named_buffers() if name.endswith(("order", "mask"))]


def on_two_ranks(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    module = ByHand(drawn_by_each_rank, early=True)
    fit(module, llm("1f1b", 4), batches())
    assert module.model is not None
    found["of this rank"], found["in training"] = drawn(drawn_by_each_rank()[-1]), drawn(module.model)
    for case, (module_of, schedule, scaled) in CASES.items():
        module = module_of()
        fit(module, llm(schedule, 4), data_of(scaled))
        found[case] = {"losses": module.losses, **values_of(module.model)}
    for schedule in ("1f1b", "interleaved_1f1b"):
        module = ByHand(on_meta)
        torch.manual_seed(7)
        fit(module, llm(schedule, 4), batches())
        found[f"on the meta device, {schedule}"] = {"losses": module.losses, **values_of(module.model)}
    predicted: Any = trainer(llm("1f1b", 4)).predict(ByHand(early=True), loader(batches()))
    found["predicted"] = torch.cat(predicted)
    found["too few"] = message(lambda: fit(ByHand(lambda: [*parts()[:1], Last()]), llm("interleaved_1f1b"), batches()))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


def test_what_ranks_have_drawn_differently_is_the_first_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["in training"] == ranks[0]["of this rank"] != ranks[1]["of this rank"]


@pytest.mark.parametrize("case", [case for case in CASES if case != "PyTorch's stages"])
def test_training_is_that_of_one_device_to_the_bit(case: str, ranks: list[dict[str, Any]]) -> None:
    module_of, _, scaled = CASES[case]
    module = module_of()
    orders = dict.fromkeys("0123", range(4))
    alone = results_of(train_alone(module, "adamw", data_of(scaled), 4, orders), steps=0)
    assert not ranks_beyond_rounding((rank[case] for rank in ranks), Reference.exactly(alone))


def test_a_model_on_the_meta_device_trains_equally_in_every_split(ranks: list[dict[str, Any]]) -> None:
    one, other = (
        {name: value for rank in ranks for name, value in rank[f"on the meta device, {schedule}"].items()}
        for schedule in ("1f1b", "interleaved_1f1b")
    )
    assert one.pop("losses") == other.pop("losses")
    assert not differing(one, other)


def test_pytorchs_stages_are_their_modules(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["PyTorch's stages"]["losses"] == rank["a list of modules"]["losses"]


def test_one_device_runs_the_stages_in_order(ranks: list[dict[str, Any]]) -> None:
    module = ByHand(early=True)
    expected = Reference.of(lambda: results_of(train_with_lightning(ByHand(), batches()), steps=0))
    found = {**ranks[0]["a list of modules"], **ranks[1]["a list of modules"]}
    assert not expected.differences(found)
    module.configure_model()
    logits = [module.model(one["input_ids"], scale=one["scale"]) for one in batches()]  # type: ignore[misc]
    predicted = Reference.of(lambda: {"logits": torch.cat(logits).detach()})
    for rank in ranks:
        assert not predicted.differences({"logits": rank["predicted"]})


def test_fewer_stages_than_the_schedule_has_are_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        with pytest.raises(AssertionError, match="2 layers cannot go to 4 stages"):
            raise AssertionError(rank["too few"])


def test_a_pipe_refuses_other_sizes_than_its_traces() -> None:
    stages = HandBuiltStages(pipe(count=2))
    with pytest.raises(InputError, match=rf"has the shape \({ROWS + 1}, {LENGTH}\), and the Pipe was traced with"):
        stages(torch.zeros(ROWS + 1, LENGTH, dtype=torch.long))


def test_a_pipe_whose_stages_skip_is_refused() -> None:
    with pytest.raises(SetupError, match=r"submod_pp_1 of the Pipe uses getitem; .* build its stages by hand"):
        HandBuiltStages(pipe(skips=True, count=3))
    several = HandBuiltStages(pipe(skips=True, count=2))
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    assert several(ids).shape == (ROWS, LENGTH, VOCABULARY)
