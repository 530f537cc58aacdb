"""Shapes that stages exchange are found without running a stage on data, drawing numbers or making gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.meta_tensors import fake_copy
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import copy_model_sharing_tensors, make_stage_module

WIDTH, VOCABULARY = 6, 11


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor, factor: Any = None) -> Tensor:
        return nn.functional.dropout(self.embedding(ids), 0.5, True)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.runs = 0

    def forward(self, x: Tensor, factor: Any = None) -> Any:
        self.runs += 1
        return self.head(x if factor is None else x * factor)


class Reading(Last):
    def forward(self, x: Tensor, factor: Any = None) -> Tensor:
        return self.head(x) if float(x.sum()) > 0 else x


class Pair(First):
    def forward(self, ids: Tensor, factor: Any = None) -> Any:
        return self.embedding(ids), ids


class Mapped(First):
    def forward(self, ids: Tensor, factor: Any = None) -> Any:
        return {"hidden": self.embedding(ids)}


class OfPair(Last):
    def forward(self, x: Tensor, ids: Any = None, factor: Any = None) -> Any:  # type: ignore[override]
        return {"logits": self.head(x), "ids": ids}


def shapes_of(
    last: type[Last] = Last, check: Any = None, first: type[First] = First
) -> tuple[StageShapes, list[nn.Module]]:
    fake, mode = fake_copy(nn.ModuleList([first(), last()]))
    stages = list(fake.children())
    return StageShapes(stages, mode, check), stages


def ids(rows: int = 2, length: int = 5) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def test_every_stages_inputs_and_output_are_known_on_the_meta_device() -> None:
    shapes, _ = shapes_of()
    first, last = shapes.infer((ids(),), {})
    assert [(tuple(one.shape), one.dtype) for one in first.inputs] == [((2, 5), torch.int64)]
    assert tuple(first.outputs[0].shape) == tuple(last.inputs[0].shape) == (2, 5, WIDTH)
    assert tuple(last.outputs[0].shape) == (2, 5, VOCABULARY)
    assert {one.device.type for shape in (first, last) for one in (*shape.inputs, shape.outputs[0])} == {"meta"}


def test_no_random_number_is_drawn() -> None:
    shapes, _ = shapes_of()
    before = torch.get_rng_state()
    shapes.infer((ids(),), {})
    assert torch.equal(torch.get_rng_state(), before)


def test_stages_are_asked_once_for_a_shape_and_again_for_another() -> None:
    shapes, (_, last) = shapes_of()
    for rows in (2, 2, 3, 2):
        shapes.infer((ids(rows),), {"factor": torch.ones(1)})
    assert last.runs == 2
    shapes.infer((ids(2),), {"factor": None})
    assert last.runs == 3


def test_an_output_under_autocast_has_its_type() -> None:
    shapes, _ = shapes_of()
    assert shapes.infer((ids(),), {})[1].outputs[0].dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert shapes.infer((ids(),), {})[1].outputs[0].dtype is torch.bfloat16


def test_a_forward_that_reads_values_is_refused_with_the_stage_and_the_fix() -> None:
    with pytest.raises(SetupError, match=r"stage 1 cannot be run without data.*where it is made"):
        shapes_of(Reading)[0].infer((ids(),), {})


def test_a_stage_that_gives_no_tensors_is_refused() -> None:
    with pytest.raises(SetupError, match=r"stage 0 gave a dict; expected a tensor, or a tuple"):
        shapes_of(first=Mapped)[0].infer((ids(),), {})


class Passing(nn.Module):
    """A layer that takes and returns a tuple of its input and of other values."""

    def __init__(self, *others: Any) -> None:
        super().__init__()
        self.others = others
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        return (self.linear(given[0] if isinstance(given, tuple) else given), *self.others)


class KeepingAttributes(Passing):
    """The same layer, with the other values as attributes."""

    def forward(self, given: Any) -> Any:
        return super().forward(given)[0]


class TakingKeywords(nn.Module):
    """The same model, with the other values as keyword arguments of every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, mask: Any = None, factor: int = 1) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * factor if mask is None else x


def stages_of(model: nn.Module, config: PPModuleConfig) -> StageShapes:
    fake, mode = fake_copy(model)
    return StageShapes(
        [
            make_stage_module(copy_model_sharing_tensors(fake), config, [config.get_layer_fqn(i)], i, 2)
            for i in range(2)
        ],
        mode,
    )


@pytest.mark.parametrize(
    ("others", "kinds"), [((None,), "Tensor, NoneType"), ((None, 3, True), "Tensor, NoneType, int, bool")]
)
def test_a_layer_that_passes_other_values_than_tensors_is_named_with_their_types_and_the_fixes_work(
    others: tuple[Any, ...], kinds: str
) -> None:
    hidden, config = torch.zeros(2, 5, WIDTH), PPModuleConfig(2, "")
    with pytest.raises(SetupError) as caught:
        stages_of(nn.Sequential(Passing(*others), Passing(*others)), config).infer((hidden,), {})
    assert f"stage 0 gave a tuple of ({kinds}), which '0' (Passing) returned; expected a tensor" in str(caught.value)
    fixed = stages_of(nn.Sequential(KeepingAttributes(*others), KeepingAttributes(*others)), config)
    keywords = dict(zip(("mask", "factor"), others, strict=False))
    by_keyword = stages_of(TakingKeywords(), PPModuleConfig(2, "layers")).infer((hidden,), keywords)
    for shapes in (fixed.infer((hidden,), {}), by_keyword):
        assert [tuple(one.shape) for one in shapes[0].outputs] == [(2, 5, WIDTH)]


def test_a_stage_may_give_several_tensors_of_which_some_have_gradients() -> None:
    first, last = shapes_of(OfPair, first=Pair)[0].infer((ids(),), {})
    assert [one.shape for one in first.outputs] == [one.shape for one in last.inputs] == [(2, 5, WIDTH), (2, 5)]
    assert [one.requires_grad for one in first.outputs] == [one.requires_grad for one in last.inputs] == [True, False]
    assert {tuple(one.shape) for one in last.outputs} == {(2, 5, VOCABULARY), (2, 5)}


def test_what_a_frozen_stage_gives_has_a_gradient_since_it_may_be_trained_later() -> None:
    fake, mode = fake_copy(nn.ModuleList([First(), Last()]).requires_grad_(False))
    assert StageShapes(list(fake.children()), mode).infer((ids(),), {})[0].outputs[0].requires_grad


class Asking(First):
    def forward(self, ids: Tensor, factor: Any = None) -> Any:
        return self.embedding(ids) if (ids == 0).all() else super().forward(ids)


def test_a_question_to_values_that_does_not_decide_on_shapes_is_answered() -> None:
    assert shapes_of(first=Asking)[0].infer((ids(),), {})[0].outputs[0].shape == (2, 5, WIDTH)


def test_the_check_is_made_once_with_hidden_states_and_real_keywords() -> None:
    seen: list[tuple[Tensor, Mapping[str, Any]]] = []
    shapes, _ = shapes_of(check=lambda hidden, kwargs: seen.append((hidden, kwargs)))
    for length in (5, 6):
        shapes.infer((ids(2, length),), {"factor": torch.full((1,), 3.0)})
    ((hidden, kwargs),) = seen
    assert hidden.shape == (2, 5, WIDTH)
    assert hidden.device.type == "cpu"
    assert len(hidden.unique()) == hidden.numel()
    assert kwargs["factor"].item() == 3.0


def test_what_failed_the_check_once_fails_it_again() -> None:
    def refuse(hidden: Tensor, kwargs: Mapping[str, Any]) -> None:
        raise SetupError("no")

    shapes, _ = shapes_of(check=refuse)
    for _ in range(2):
        with pytest.raises(SetupError, match="no"):
            shapes.infer((ids(),), {})
