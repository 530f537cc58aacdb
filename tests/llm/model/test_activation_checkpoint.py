"""Layers that compute again what they did not keep: same gradients, less kept, once for each micro-batch."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.activation_checkpoint import (
    ActivationCheckpoint,
    _decide_save_or_recompute,
    apply_activation_checkpoint,
)
from lightning_pipe.llm.model.stage_module import StageModule, copy_model_sharing_tensors, make_stage_module
from tests.distributed import run_ranks
from tests.llm.stage_cases import (
    CONFIG,
    MICRO_BATCHES,
    inputs,
    layers_of,
    loss_of,
    make_model,
    train_stages,
    unequal,
    whole_stage,
)
from tests.tiers import sampled_rows, wanted

MODES: Any = ("full", "selective")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


def run(stage: StageModule, around: AbstractContextManager[Any] | None = None) -> dict[str, Tensor]:
    """Gradients of one micro-batch; *around* is entered for the forward alone."""
    torch.manual_seed(5)
    (one, *_) = inputs()
    with around or nullcontext():
        loss = loss_of(stage(*one.args, **one.kwargs), one.target)
    torch.manual_seed(99)  # what was drawn in between
    loss.backward()
    return gradients(stage.module)


def checkpointed(mode: Any = "full", every: int = 1, dropout: float = 0.3) -> StageModule:
    stage = whole_stage(dropout)
    apply_activation_checkpoint(stage, CONFIG.layer_fqns, mode, every)
    return stage


# ---------------------------------------------------------------------- one rank


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_equal_to_the_bit_with_dropout(mode: Any) -> None:
    stage = checkpointed(mode)
    assert not unequal(run(stage), run(whole_stage()))
    assert [layer.forwards for layer in layers_of(stage)] == [2, 2, 2, 2]


def test_the_random_generator_goes_on_as_if_nothing_were_computed_again() -> None:
    run(whole_stage())
    expected = torch.rand(3)
    run(checkpointed())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("mode", MODES)
def test_only_layers_whose_index_is_a_multiple_are_computed_again(mode: Any) -> None:
    stage = checkpointed(mode, every=3)
    assert not unequal(run(stage), run(whole_stage()))
    assert [layer.forwards for layer in layers_of(stage)] == [2, 1, 1, 2]


def test_which_layers_are_computed_again_does_not_depend_on_the_split() -> None:
    last = make_stage_module(make_model(), CONFIG, ["layers.1", "layers.2", "layers.3", "head"], 1, 2)
    apply_activation_checkpoint(last, CONFIG.layer_fqns, "full", every_n_layers=3)
    hidden = torch.rand(2, 3, 8, requires_grad=True)
    last(hidden, factor=torch.rand(3)).sum().backward()
    assert [layer.forwards for layer in layers_of(last)] == [1, 1, 2]


def test_a_copy_of_a_layer_computes_with_its_own_parameters() -> None:
    stage = checkpointed()
    copied = copy.deepcopy(stage)
    for parameter in copied.parameters():
        parameter.data.mul_(0.5)
    plain = whole_stage()
    for parameter in plain.parameters():
        parameter.data.mul_(0.5)
    assert not unequal(run(copied), run(plain))
    shared = copy_model_sharing_tensors(stage)
    assert isinstance(shared, StageModule)
    run(shared)
    assert [layer.forwards for layer in layers_of(shared)] == [2, 2, 2, 2]
    assert [layer.forwards for layer in layers_of(stage)] == [0, 0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_nothing_is_kept_or_computed_again(mode: Any) -> None:
    stage = checkpointed(mode)
    with torch.no_grad():
        run_once = stage(*inputs()[0].args, **inputs()[0].kwargs)
    assert not run_once.requires_grad
    assert [layer.forwards for layer in layers_of(stage)] == [1, 1, 1, 1]


class Scaled(TorchFunctionMode):
    """Takes attention's place, as context parallelism does; counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.scaled_dot_product_attention:
            self.calls += 1
            return torch.tanh(result) * result.mean()
        return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("in_backward", [False, True])
def test_function_modes_of_the_forward_act_just_once_when_it_is_computed_again(mode: Any, in_backward: bool) -> None:
    found, counts = [], []
    for stage in (checkpointed(mode), whole_stage()):
        around = Scaled()
        if in_backward:
            with around:
                found.append(run(stage))
        else:
            found.append(run(stage, around))
        counts.append(around.calls)
    assert not unequal(found[0], found[1])
    assert counts == [8, 4]


def test_a_function_mode_of_backwards_caller_does_not_act_in_the_forward_that_is_computed_again() -> None:
    stage, around = checkpointed(), Scaled()
    (one, *_) = inputs()
    torch.manual_seed(5)
    loss = loss_of(stage(*one.args, **one.kwargs), one.target)
    with around:
        loss.backward()
        assert around.calls == 0
        nn.functional.scaled_dot_product_attention(*torch.rand(3, 1, 2, 4))
        assert around.calls == 1  # it is back
    assert not unequal(gradients(stage.module), run(whole_stage()))


@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_that_of_the_forward(mode: Any) -> None:
    around = torch.autocast("cpu", dtype=torch.bfloat16)
    expected = run(whole_stage(), around)
    assert not unequal(run(checkpointed(mode), around), expected)
    assert unequal(expected, run(whole_stage()))


class LiveBytes(TorchDispatchMode):
    """Tensors made in it, as long as their memory is there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return result

    def count(self, leaving_out: Collection[int] = ()) -> int:
        kept = (self.storages[key] for key in self.storages.keys() - set(leaving_out))
        return sum(size for storage, size in kept if storage() is not None)


def kept_bytes(mode: Any, every: int = 1) -> int:
    """What one micro-batch keeps between forward and backward."""
    stage = whole_stage() if mode is None else checkpointed(mode, every)
    (one, *_) = inputs()
    with LiveBytes() as live:
        loss = loss_of(stage(*one.args, **one.kwargs), one.target)
    gc.collect()
    found = live.count()
    assert loss.requires_grad
    return found


def test_less_is_kept_the_more_is_computed_again() -> None:
    everything, selective, full = kept_bytes(None), kept_bytes("selective"), kept_bytes("full")
    assert full < 0.35 * everything
    assert full < selective < 0.75 * everything
    assert full < kept_bytes("full", every=2) < everything


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_what_was_computed_again_is_let_go_of_with_the_graph(mode: Any, twice: bool) -> None:
    stage = checkpointed(mode)
    (one, *_) = inputs()
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            loss = loss_of(stage(*one.args, **one.kwargs), one.target)
            if twice:
                loss.backward(retain_graph=True)
            loss.backward()
        del loss, one
        stage.zero_grad()
        parameters = {value.untyped_storage()._cdata for value in stage.parameters()}
        assert live.count(leaving_out=parameters) == 0
    finally:
        gc.enable()
    assert [layer.forwards for layer in layers_of(stage)] == [2, 2, 2, 2]


def test_attention_that_drops_out_is_computed_again_and_so_draws_its_numbers_again() -> None:
    # Directly, since no such kernel runs on a CPU.
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.rand(1, 1, 2, 4)
    assert _decide_save_or_recompute(None, attention, query, query, query).name == "MUST_SAVE"
    assert _decide_save_or_recompute(None, attention, query, query, query, 0.1).name == "PREFER_RECOMPUTE"
    assert _decide_save_or_recompute(None, attention, query, query, query, dropout_p=0.1).name == "PREFER_RECOMPUTE"


class Changing(nn.Module):
    """Does something else each time."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.what = what
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.what == "fewer" and self.forwards > 1:
            return x.clone()
        if self.what == "wider" and self.forwards > 1:
            return (x.repeat(2, 1) * self.weight)[:2]
        return x * self.weight


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("fewer", "saved 0 tensors where it had saved 1"),
        ("wider", r"saved \(4, 2\) of torch.float32 where it had saved \(2, 2\)"),
        ("in place", "its arguments were changed in place after its forward"),
    ],
)
def test_a_layer_that_cannot_be_computed_again_is_an_error(what: str, says: str) -> None:
    stage = StageModule(nn.Sequential(Changing(what)), 0, 1)
    apply_activation_checkpoint(stage, ["0"])
    x = torch.rand(2, 2)
    output = stage(x)
    if what == "in place":
        x.mul_(2.0)
    with pytest.raises(SetupError, match=says):
        output.sum().backward()


def test_another_mode_or_no_layers_at_all_are_refused() -> None:
    mode: Any = "some"
    with pytest.raises(SetupError, match="is 'some'; expected one of 'full', 'selective'"):
        ActivationCheckpoint(mode)
    with pytest.raises(SetupError, match="is 0; expected a whole number, 1 or more"):
        ActivationCheckpoint(every_n_layers=0)


# ---------------------------------------------------------------------- schedules, on two ranks

SCHEDULES_RUN = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
CASES = list(product(SCHEDULES_RUN, MODES, (False, True)))
# Each schedule once; each mode with sharded stages and without.
OFTEN = (
    ("1f1b", "full", False),
    ("interleaved_1f1b", "selective", True),
    ("interleaved_zero_bubble", "full", True),
    ("zbv_zero_bubble", "selective", False),
    ("dualpipev", "full", False),
)


def run_schedules(rank: int, world_size: int, cases: list[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    plain: dict[str, dict[str, Tensor]] = {}
    for schedule, mode, sharded in cases:
        if schedule not in plain:
            plain[schedule], _ = train_stages(rank, schedule)
        prepare = functools.partial(apply_activation_checkpoint, layers=CONFIG.layer_fqns, mode=mode)
        mine, stages = train_stages(rank, schedule, prepare, sharded=sharded)
        found[schedule, mode, sharded] = {
            "wrong": unequal(mine, plain[schedule]),
            "parameters": len(mine),
            "forwards": {layer.forwards for stage in stages for layer in layers_of(stage)},
        }
    return found


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_ranks(run_schedules, 2, wanted(request.config, CASES, OFTEN.__contains__))


@pytest.mark.parametrize(
    ("schedule", "mode", "sharded"),
    sampled_rows(CASES, OFTEN.__contains__, lambda case: "-".join(map(str, case))),
)
def test_every_schedule_gives_the_gradients_it_gives_without(
    schedule: str, mode: Any, sharded: bool, ranks: list[dict[Any, Any]]
) -> None:
    for rank in ranks:
        assert rank[schedule, mode, sharded]["wrong"] == []
    assert sum(rank[schedule, mode, sharded]["parameters"] for rank in ranks) == len(list(make_model().parameters()))


@pytest.mark.parametrize(
    ("schedule", "mode"),
    sampled_rows(product(SCHEDULES_RUN, MODES), lambda case: (*case, False) in OFTEN, "-".join),
)
def test_a_layer_is_computed_again_once_for_each_micro_batch_also_where_backward_has_two_parts(
    schedule: str, mode: Any, ranks: list[dict[Any, Any]]
) -> None:
    for rank in ranks:
        assert rank[schedule, mode, False]["forwards"] == {2 * MICRO_BATCHES}
