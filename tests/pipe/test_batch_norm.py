"""Running statistics are those of the mini-batch, however it is cut."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe import DeferredBatchNorm, Pipe

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


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if "running" in name or "tracked" in name}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
@pytest.mark.parametrize("through", ["forward", "loss"])
def test_the_first_layers_statistics_equal_the_whole_batchs(
    through: str, checkpoint: Any, momentum: float | None
) -> None:
    for chunks in (1, 2, 3, 4, 8):
        whole = normalised(momentum)
        pipe = Pipe(normalised(momentum), chunks, checkpoint, ["cpu"] * 2, deferred_batch_norm=True)
        for rows in (8, 5, 4):  # of the last two some mini-batches have fewer rows than micro-batches
            inputs = torch.randn(rows, 3, 7) * 3 + 1
            whole(inputs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if through == "forward":
                    pipe(inputs).sum().backward()
                else:
                    pipe.loss(
                        inputs, torch.zeros(rows), lambda output, target: output.sum(), reduction="sum"
                    ).backward()
        for name, expected in statistics(whole).items():
            if name.startswith("1."):  # the later one sees what the first has normalised by micro-batches
                torch.testing.assert_close(pipe.state_dict()[name], expected, rtol=1e-6, atol=1e-6)
        assert pipe.state_dict()["3.0.num_batches_tracked"] == 3
        pipe.close()


def test_what_is_gathered_is_not_in_the_state_dict_and_keys_stay() -> None:
    plain = normalised()
    pipe = Pipe(normalised(), 2, devices=["cpu"] * 2, deferred_batch_norm=True)
    pipe(torch.randn(4, 3, 7))
    assert [*pipe.state_dict()] == [*plain.state_dict()]
    assert isinstance(pipe[1], DeferredBatchNorm)
    pipe.load_state_dict(plain.state_dict())
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
    whole = nn.BatchNorm1d(3)
    fails.fail = True
    with pytest.raises(ValueError, match="on purpose"):
        pipe(torch.randn(8, 3))
    fails.fail = False
    state = {name.removeprefix("0."): value.clone() for name, value in pipe.state_dict().items()}
    whole.load_state_dict(state)
    inputs = torch.randn(8, 3)
    pipe(inputs)
    whole(inputs)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[f"0.{name}"], value)
    pipe.close()


def test_evaluation_uses_running_statistics_and_leaves_them() -> None:
    pipe, whole = Pipe(normalised(), 3, devices=["cpu"] * 2, deferred_batch_norm=True), normalised()
    pipe(torch.randn(6, 3, 7))
    whole.load_state_dict(copy.deepcopy(pipe.state_dict()))
    pipe.eval()
    whole.eval()
    inputs = torch.randn(5, 3, 7)
    torch.testing.assert_close(pipe(inputs), whole(inputs))
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in statistics(pipe).items())
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


def test_statistics_over_processes_are_refused() -> None:
    with pytest.raises(SetupError, match="SyncBatchNorm"):
        Pipe(nn.Sequential(nn.SyncBatchNorm(3)), 2, devices=["cpu"], deferred_batch_norm=True)


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

    pipe, whole = Pipe(twice(), chunks, devices=["cpu"], deferred_batch_norm=True), twice()
    for _ in range(2):
        # Of four equal micro-batches each is normalised as the whole.
        inputs = (torch.randn(4, 3) * 2 + 1).repeat(4, 1)
        pipe(inputs)
        whole(inputs)
    for name, expected in statistics(whole).items():
        torch.testing.assert_close(pipe.state_dict()[name], expected, rtol=1e-5, atol=1e-6)
    pipe.close()
