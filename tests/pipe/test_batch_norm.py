"""Running statistics are those of the mini-batch, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.pipe import DeferredBatchNorm, Pipe

CHECKPOINT: tuple[Any, ...] = ("always", "except_last", "never")


def normalized(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 4, 2),
        nn.BatchNorm1d(4, momentum=momentum),
        nn.ReLU(),
        nn.Sequential(nn.BatchNorm1d(4)),
        nn.Flatten(),
    )


def mini_batches() -> list[Tensor]:
    """Of the last two some have fewer rows than micro-batches."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 3, 7, generator=generator) * 3 + 1 for rows in (8, 5, 4)]


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if "running" in name or "tracked" in name}


def assert_near(found: dict[str, Tensor], whole: nn.Module) -> None:
    """The statistics are those of the whole mini-batches, up to rounding."""
    expected = statistics(whole)
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("through", ["forward", "loss"])
@pytest.mark.filterwarnings("ignore:a mini-batch has")
def test_the_first_layers_statistics_equal_the_whole_batchs(
    through: str, checkpoint: Any, momentum: float | None
) -> None:
    whole = normalized(momentum)
    for inputs in mini_batches():
        whole(inputs)
    for chunks in (1, 3, 8):
        pipe = Pipe(normalized(momentum), chunks, checkpoint, ["cpu"] * 2, deferred_batch_norm=True)
        for inputs in mini_batches():
            if through == "forward":
                pipe(inputs).sum().backward()
            else:
                pipe.loss(
                    inputs, torch.zeros(len(inputs)), lambda output, target: output.sum(), reduction="sum"
                ).backward()
        # The later layer sees what the first has normalized by micro-batches.
        assert_near({name: value for name, value in statistics(pipe).items() if name.startswith("1.")}, whole)
        assert pipe.state_dict()["3.0.num_batches_tracked"] == 3
        pipe.close()


def test_an_error_in_mid_batch_leaves_nothing_for_the_next() -> None:
    class Fails(nn.Module):
        fail = False

        def forward(self, input: Tensor) -> Tensor:
            if self.fail:
                raise ValueError("on purpose")
            return input

    fails = Fails()
    pipe = Pipe(nn.Sequential(nn.BatchNorm1d(3), fails), 4, devices=["cpu"] * 2, deferred_batch_norm=True)
    fails.fail = True
    with pytest.raises(ValueError, match="on purpose"):
        pipe(torch.randn(8, 3))
    fails.fail = False
    inputs, whole = torch.randn(8, 3), nn.Sequential(nn.BatchNorm1d(3))
    pipe(inputs)
    whole(inputs)
    assert_near(statistics(pipe), whole)
    pipe.close()


@pytest.mark.parametrize("through", ["forward", "loss"])
def test_without_it_recomputation_counts_no_batch_twice(through: str) -> None:
    found = []
    for checkpoint in CHECKPOINT:
        pipe = Pipe(normalized(), 3, checkpoint, ["cpu"] * 2)
        torch.manual_seed(1)
        inputs = torch.randn(6, 3, 7)
        if through == "forward":
            pipe(inputs).sum().backward()
        else:
            pipe.loss(inputs, torch.zeros(6), lambda output, target: output.sum(), reduction="sum").backward()
        found.append(statistics(pipe))
        pipe.close()
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


def test_outside_of_a_pipe_it_is_batch_normalization() -> None:
    one, other = DeferredBatchNorm(4), nn.BatchNorm1d(4)
    for _ in range(2):
        inputs = torch.randn(6, 4)
        assert torch.equal(one(inputs), other(inputs))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_layer_that_is_there_twice_moves_twice_as_in_the_whole_batch(chunks: int) -> None:
    def twice() -> nn.Sequential:
        layer = nn.BatchNorm1d(3)
        return nn.Sequential(layer, nn.Identity(), layer)

    pipe = Pipe(twice(), chunks, devices=["cpu"], deferred_batch_norm=True)
    # Of four equal micro-batches each is normalized as the whole.
    whole = twice()
    for _ in range(2):
        inputs = (torch.randn(4, 3) * 2 + 1).repeat(4, 1)
        pipe(inputs)
        whole(inputs)
    assert_near(statistics(pipe), whole)
    pipe.close()


def test_layers_without_running_statistics_and_those_that_defer_already_stay() -> None:
    layers = [nn.BatchNorm2d(3, track_running_stats=False), DeferredBatchNorm(3)]
    pipe = Pipe(nn.Sequential(*layers), 4, devices=["cpu"], deferred_batch_norm=True)
    assert [*pipe] == layers
    assert type(pipe[0]) is nn.BatchNorm2d
    pipe(torch.rand(8, 3, 4, 4))
    assert not [*pipe[0].buffers()]
    pipe.close()
