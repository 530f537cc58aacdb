"""Running statistics are those of the mini-batch, however it is cut."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.pipe import DeferredBatchNorm, Pipe
from tests.rounding import Reference

CHECKPOINT: tuple[Any, ...] = ("always", "except_last", "never")


def normalised(momentum: float | None = 0.1) -> nn.Sequential:
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


class Statistics:
    """Running statistics by their definition, of operations in which rounding can be seen.

    PyTorch's batch normalisation moves them inside of its kernel.
    """

    def __init__(self, channels: int, momentum: float | None) -> None:
        self.mean, self.variance, self.batches = torch.zeros(channels), torch.ones(channels), 0
        self.momentum = momentum

    def take(self, inputs: Tensor) -> Tensor:
        """Returns the normalised inputs."""
        dims = [dim for dim in range(inputs.dim()) if dim != 1]
        self.batches += 1
        momentum = 1 / self.batches if self.momentum is None else self.momentum
        variance, mean = inputs.var(dims), inputs.mean(dims)
        self.mean, self.variance = self.mean.lerp(mean, momentum), self.variance.lerp(variance, momentum)
        biased, mean = (one.view(-1, *[1] * (inputs.dim() - 2)) for one in (inputs.var(dims, correction=0), mean))
        return (inputs - mean) / (biased + 1e-5).sqrt()

    def named(self, layer: str) -> dict[str, Any]:
        names = ("running_mean", "running_var", "num_batches_tracked")
        return {
            f"{layer}.{name}": value
            for name, value in zip(names, (self.mean, self.variance, self.batches), strict=True)
        }


@pytest.fixture(scope="module", params=[0.1, None])
def momentum(request: pytest.FixtureRequest) -> float | None:
    found: float | None = request.param
    return found


@pytest.fixture(scope="module")
def whole_batches(momentum: float | None) -> Reference:
    """Statistics of the first layer over whole mini-batches."""

    @torch.no_grad()
    def taken() -> dict[str, Any]:
        layers, found = normalised(momentum), Statistics(4, momentum)
        for inputs in mini_batches():
            found.take(layers[0](inputs))
        return found.named("1")

    return Reference.of(taken)


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if "running" in name or "tracked" in name}


def test_the_definition_of_statistics_is_pytorchs(momentum: float | None, whole_batches: Reference) -> None:
    whole = normalised(momentum)
    for inputs in mini_batches():
        whole(inputs)
    assert whole_batches.differences(statistics(whole)) == []


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("through", ["forward", "loss"])
def test_the_first_layers_statistics_equal_the_whole_batchs(
    through: str, checkpoint: Any, momentum: float | None, whole_batches: Reference
) -> None:
    for chunks in (1, 2, 3, 4, 8):
        pipe = Pipe(normalised(momentum), chunks, checkpoint, ["cpu"] * 2, deferred_batch_norm=True)
        for inputs in mini_batches():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if through == "forward":
                    pipe(inputs).sum().backward()
                else:
                    pipe.loss(
                        inputs, torch.zeros(len(inputs)), lambda output, target: output.sum(), reduction="sum"
                    ).backward()
        # The later layer sees what the first has normalised by micro-batches.
        assert whole_batches.differences(statistics(pipe)) == []
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
    inputs = torch.randn(8, 3)
    pipe(inputs)

    def taken() -> dict[str, Any]:
        found = Statistics(3, 0.1)
        found.take(inputs)
        return found.named("0")

    assert Reference.of(taken).differences(statistics(pipe)) == []
    pipe.close()


@pytest.mark.parametrize("through", ["forward", "loss"])
def test_without_it_recomputation_counts_no_batch_twice(through: str) -> None:
    found = []
    for checkpoint in CHECKPOINT:
        pipe = Pipe(normalised(), 3, checkpoint, ["cpu"] * 2)
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


def test_outside_of_a_pipe_it_is_batch_normalisation() -> None:
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
    # Of four equal micro-batches each is normalised as the whole.
    mini_batches = [(torch.randn(4, 3) * 2 + 1).repeat(4, 1) for _ in range(2)]
    for inputs in mini_batches:
        pipe(inputs)

    def taken() -> dict[str, Any]:
        found = Statistics(3, 0.1)
        for inputs in mini_batches:
            found.take(found.take(inputs))
        return found.named("0") | found.named("2")

    assert Reference.of(taken).differences(statistics(pipe)) == []
    pipe.close()
