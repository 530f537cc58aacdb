"""Values of a batch on a device are read on the host, from the tensors that were copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipe.llm.batches.host_values import HostSourceTracker, values_on_host
from tests.engine.device_tensors import watched

CUDA = torch.device("cuda")


def to_device(tensor: Tensor) -> Tensor:
    return tensor.to(CUDA, non_blocking=True)


def test_copies_stand_for_their_sources_and_other_values_stay() -> None:
    with watched() as accelerator:
        (source,) = accelerator.on_host([{"ids": torch.arange(4), "rate": 0.5}])
        copies = HostSourceTracker()
        with copies:
            there = {"ids": to_device(source["ids"]), "rate": 0.5}
        found = values_on_host([there, there], copies)
        assert [one["ids"] is source["ids"] for one in found] == [True, True]
        assert found[0]["rate"] == 0.5
        assert values_on_host(source, copies) is source
    assert accelerator.syncs == []


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "computed there": lambda source, there: there + 1,
    "changed there": lambda source, there: there.add_(1),
    "source changed": lambda source, there: (source.add_(1), there)[1],
    "another dtype": lambda source, there: to_device(source.float().mul(0.5)).to(CUDA, torch.long),
}


@pytest.mark.parametrize("how", CHANGES)
def test_tensors_that_are_no_copies_are_copied_back_with_one_wait(how: str) -> None:
    with watched() as accelerator:
        (source,) = accelerator.on_host([{"ids": torch.arange(4), "labels": torch.arange(4)}])
        copies = HostSourceTracker()
        with copies:
            there: dict[str, Any] = {key: CHANGES[how](value, to_device(value)) for key, value in source.items()}
        expected = {key: value.tolist() for key, value in there.items()}
        accelerator.syncs.clear()
        found = values_on_host(there, copies)
        assert len(accelerator.syncs) == 1
        assert {key: value.tolist() for key, value in found.items()} == expected
        assert [value.device.type for value in found.values()] == ["cpu", "cpu"]


def test_tensors_of_inference_mode_whose_changes_are_not_counted_are_copied_back() -> None:
    with watched() as accelerator, torch.inference_mode():
        (source,) = accelerator.on_host([{"ids": torch.arange(4)}])
        copies = HostSourceTracker()
        with copies:
            there = {"ids": to_device(source["ids"])}
        there["ids"] += 1
        assert values_on_host(there, copies)["ids"].tolist() == [1, 2, 3, 4]
