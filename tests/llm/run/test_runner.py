"""A rank's stages run over micro-batches of any number and shape, with schedules made once for each and let go of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.model.meta_tensors import fake_copy
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import StageModule, make_stage, shallow_copy
from lightning_pipe.llm.run.runner import PipelineRunner, StageInputs
from lightning_pipe.llm.schedules.named import SCHEDULES
from lightning_pipe.llm.split.by_name import split_evenly
from tests.distributed import run_ranks

WIDTH, VOCABULARY = 6, 11
CONFIG = ModuleConfig(2, "layers", ("embedding",), ("head",))
MEBIBYTE = 2**20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.forwards: list[int] = []

    def forward(self, ids: Tensor, factor: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_runner(rank: int, **options: Any) -> tuple[PipelineRunner, StageModule]:
    torch.manual_seed(3)
    model = Model()
    fake, mode = fake_copy(model)
    fqns = split_evenly(CONFIG, 2)
    shapes = StageShapes([make_stage(shallow_copy(fake), CONFIG, fqns[i], i, 2) for i in range(2)], mode)
    stage = make_stage(model, CONFIG, fqns[rank], rank, 2)
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    return PipelineRunner({rank: stage}, 2, SCHEDULES["gpipe"], group, cpu, shapes, **options), stage


def inputs(count: int, length: int = 5, rows: int = 2) -> list[StageInputs]:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(VOCABULARY, (count, rows, length), generator=generator)
    return [StageInputs((one,), {}, {"labels": one.roll(1)}) for one in ids]


def loss_of(output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target["labels"].flatten(), reduction="sum")


def refuse_the_second(output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
    if torch.equal(target["labels"], inputs(3)[1].target["labels"]):
        raise KeyError("no such label")
    return loss_of(output, target)


def each_token(output: Tensor, target: Mapping[str, Tensor]) -> Any:
    return loss_of(output, target).expand(2)


def no_tensor(output: Tensor, target: Mapping[str, Tensor]) -> Any:
    return "words"


def without_gradient(output: Tensor, target: Mapping[str, Tensor]) -> Tensor:
    return loss_of(output, target).detach()


def two_ranks(rank: int, world: int) -> dict[str, Any]:
    runner, stage = make_runner(rank)
    found: dict[str, Any] = {"losses": runner.train(inputs(4), loss_of)}
    found["gradients"] = {
        name: one.grad.clone() for name, one in stage.module.named_parameters() if one.grad is not None
    }
    found["evaluated"] = runner.evaluate(inputs(3), lambda output, target: output)
    found["one"] = runner.evaluate(inputs(1), loss_of)
    for name, function in {
        "raising": refuse_the_second,
        "vector": each_token,
        "words": no_tensor,
        "constant": without_gradient,
    }.items():
        runner.train(inputs(3), function)
        found[name] = None if runner.failure is None else (type(runner.failure).__name__, str(runner.failure))
    runner.train(inputs(3), loss_of)
    found["after"] = runner.failure
    try:
        runner.train([*inputs(1, 5), *inputs(1, 6)], loss_of)
    except InputError as error:
        found["shapes"] = str(error)
    found["kept"] = kept(rank, MEBIBYTE)
    found["let go"] = kept(rank, 0)
    # Training keeps what goes in and out of a stage, the last one's being the most: in 32 bits, of each token.
    row = 4 * (WIDTH + VOCABULARY)
    most = sum(2 * len(inputs(2)) * row * length for length in (5, 6, 7))
    found["just kept"], found["just too much"] = kept(rank, most), kept(rank, most - 1)
    runner.record_events = True
    runner.evaluate(inputs(2), loss_of)
    found["events"] = [(one.kind, one.microbatch) for one in runner.events if one.kind == "forward"]
    return found


def kept(rank: int, cache_bytes: int) -> list[tuple[int, int]]:
    """Number of micro-batches and length of the schedules there are, after several."""
    runner, _ = make_runner(rank, cache_bytes=cache_bytes)
    for length in (5, 6, 5, 7):
        runner.train(inputs(2, length), loss_of)
    return [(key[1], key[2][0][0][0][1]) for key in runner._made]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2)


def whole(micro_batches: list[StageInputs]) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """One device: losses, outputs, gradients."""
    torch.manual_seed(3)
    model = Model()
    outputs = [model(*one.args) for one in micro_batches]
    losses = [loss_of(output, one.target) for output, one in zip(outputs, micro_batches, strict=True)]
    for loss in losses:
        loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return [loss.detach() for loss in losses], [output.detach() for output in outputs], gradients


def test_losses_come_out_on_the_last_stages_rank_in_the_order_of_micro_batches(found: list[dict[str, Any]]) -> None:
    losses, _, gradients = whole(inputs(4))
    assert found[0]["losses"] == []
    assert torch.equal(torch.stack(found[1]["losses"]), torch.stack(losses))
    together = {**found[0]["gradients"], **found[1]["gradients"]}
    assert set(together) == set(gradients)
    assert all(torch.equal(together[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("raising", "KeyError", "no such label"),
        ("vector", "InputError", "the loss of a micro-batch is shape (2,); expected a scalar"),
        ("words", "InputError", "the loss of a micro-batch is 'words'"),
        ("constant", "InputError", "expected a scalar tensor with a gradient"),
    ],
)
def test_a_loss_that_fails_leaves_the_schedule_to_end_on_every_rank_and_is_kept(
    name: str, kind: str, says: str, found: list[dict[str, Any]]
) -> None:
    assert found[0][name] is None
    assert found[1][name][0] == kind
    assert says in found[1][name][1]
    assert found[1]["after"] is None


def test_micro_batches_of_different_shapes_are_refused_before_anything_is_sent(found: list[dict[str, Any]]) -> None:
    assert all("pad them to one length" in one["shapes"] for one in found)


def test_schedules_are_kept_for_each_length_within_the_bytes_allowed(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["kept"] == [(2, 6), (2, 5), (2, 7)]  # the least recently used first
        assert one["let go"] == [(2, 7)]
        assert one["just kept"] == one["kept"]
        assert one["just too much"] == [(2, 5), (2, 7)]
