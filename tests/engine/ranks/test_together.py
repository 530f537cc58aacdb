"""What ranks do together: values from all of them, and errors on all of them."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.engine.plans.errors import SetupError
from lightning_pipe.engine.ranks.together import communicating_device, gather, on_all_ranks
from tests.distributed import run_ranks


def gathered(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    def work(failing: tuple[int, ...], error: Exception) -> str:
        def fails() -> str:
            if rank in failing:
                raise error
            return "done"

        try:
            return on_all_ranks(fails, "the folder cannot be written")
        except SetupError as raised:
            return str(raised)

    said = [
        work((), ValueError()),
        work((1,), OSError("no space left")),
        work((0, 2), ValueError("no such column")),
        work((0, 1, 2), SetupError("it is a file")),
    ]
    return gather(10 * rank), said


def test_every_rank_has_the_values_and_the_errors_of_all() -> None:
    for values, said in run_ranks(gathered, 3):
        assert values == [0, 10, 20]
        assert said == [
            "done",
            "rank 1: the folder cannot be written: no space left",
            "rank 0, 2: the folder cannot be written: ValueError: no such column",
            "it is a file",
        ]


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda")],
)
def test_small_things_travel_on_a_device_that_the_backend_takes(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    found = communicating_device(cast(dist.ProcessGroup, object()), torch.device("cpu"))
    assert found == torch.device(device)
