"""Copies and preparation of a language model's batches, and the offload of its optimizer, whose streams are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe.engine import SWPipeline
from lightning_pipe.engine.runtime.devices import DeviceStreams
from lightning_pipe.llm.batches.options import Batching
from lightning_pipe.llm.run.optimizer_offload import OptimizerStateOffload
from lightning_pipe.llm.run.preparation import BatchInPreparation, BatchPreparation
from lightning_pipe.llm.run.stage_hooks import StageHooks
from lightning_pipe.llm.run.training_tasks import llm_plan
from lightning_pipe.loops.programs.program import TrainingProgram
from tests.engine.device_tensors import Accelerator, left_out, watched

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _world(tmp_path: Path) -> None:
    """A process group of this process alone. The suite destroys it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 9, (4, 5 + number % 2), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def moved(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(CUDA, non_blocking=True) for name, value in batch.items()}


class Hooks(StageHooks):
    def build_model(self) -> nn.Module:
        return nn.Identity()


def computed_there(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch whose values the host does not have, such as those of an augmentation on the device."""
    return {name: value.clone() for name, value in moved(batch).items()}


def train(batches: int = 6, transfer: Callable[[dict[str, Tensor]], dict[str, Tensor]] = moved) -> Accelerator:
    """Batches that are copied and prepared one ahead, as the strategy does it."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[BatchInPreparation | None] = [None]
    world = dist.group.WORLD
    assert world is not None
    preparation = BatchPreparation(Hooks(), Batching(pad_to_multiple_of=4), world, [[0]], 2, vocabulary=9)

    def step() -> None:
        prepared = held[0]
        assert prepared is not None
        inputs = preparation.finish(prepared)
        for one in inputs.micro_batches:
            found = model(*one.args)
            target = one.target["labels"]
            nn.functional.cross_entropy(found.flatten(0, 1), target.flatten(), reduction="sum").backward()

    with watched() as accelerator:
        plan = llm_plan(transfer, preparation.begin, lambda prepared: held.__setitem__(0, prepared))
        made = TrainingProgram(
            SWPipeline(plan, CUDA), transfer="H2D", step="OptimStep", forward="ScheduleStep", backward="ScaleGradients"
        )
        data = iter(accelerator.on_host([batch(number) for number in range(batches)]))
        for _ in range(batches):
            made.begin_next_batch(data)
            made.set_training_step(step)
            made.pipeline.run_until(made.forward)
            made.run_backward(lambda: None)
            made.begin_step_task()
            optimizer.step()
            optimizer.zero_grad()
            made.end_step_task()
            made.finish_batch()
        made.close()
    return accelerator


def test_batches_are_copied_and_prepared_ahead_without_a_race() -> None:
    accelerator = train()
    assert list(map(str, accelerator.findings)) == []
    assert accelerator.handler.seq_num > 200


@pytest.mark.parametrize(("transfer", "waits"), [(moved, 0), (computed_there, 6)], ids=["copied", "computed there"])
def test_the_host_waits_for_none_of_the_numbers_of_a_copied_batch_and_once_for_those_of_another(
    transfer: Callable[[dict[str, Tensor]], dict[str, Tensor]], waits: int
) -> None:
    # Two micro-batches a batch, each with a number of tokens and with ids that are compared with the vocabulary.
    assert [one.site.task for one in train(6, transfer).syncs] == ["Prepare"] * waits


def test_a_step_that_does_not_wait_for_the_copy_is_found() -> None:
    with mock.patch.object(DeviceStreams, "wait_event", left_out):
        found = {(one.kind, one.first.task, one.second.task) for one in train().findings}
    assert ("race", "H2D", "ScheduleStep") in found


# ---------------------------------------------------------------------- the optimizer's state on the host


@contextmanager
def accelerated() -> Iterator[Accelerator]:
    with (
        watched() as accelerator,
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "synchronize", accelerator.synchronize),
        # PyTorch would ask the driver whether a graph is being captured.
        mock.patch.object(torch.optim.Optimizer, "_accelerator_graph_capture_health_check"),
    ):
        yield accelerator


def offloaded(read_state: bool = False) -> Accelerator:
    with accelerated() as accelerator:
        parameters = [nn.Parameter(torch.ones(4, 4, device=CUDA)) for _ in range(3)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        state = OptimizerStateOffload(optimizer, bucket_bytes=64)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.ones(4, 4, device=CUDA)
            optimizer.step()
            if read_state:
                assert optimizer.state[parameters[0]]["exp_avg"].tolist()
        state.stop_offloading()
    return accelerator


def test_offloaded_state_is_ordered_with_the_steps_of_its_buckets() -> None:
    accelerator = offloaded(read_state=True)
    assert list(map(str, accelerator.findings)) == []
    assert accelerator.handler.seq_num > 100


def test_the_host_waits_once_in_a_step_for_offloaded_state() -> None:
    counted = [one.operator for one in offloaded().syncs]
    assert set(counted) == {"synchronize"}
    assert len(counted) == 4  # at construction, and after each of three steps
