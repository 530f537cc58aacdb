"""Training steps of a language model in stages, whose streams are watched (`tests.engine.race_detector`).

Messages are those of Gloo, which the detector takes for NCCL's: to wait for one orders streams, and not the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from lightning_pipe.engine import SWPipeline
from lightning_pipe.llm.batches.packing import split_packed_batch_by_row
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.parallel import gradients
from lightning_pipe.llm.run import schedule_runner
from lightning_pipe.llm.run.preparation import BatchInPreparation, BatchPreparation, StepInputs
from lightning_pipe.llm.run.stage_runner import StageRunner
from lightning_pipe.llm.run.training_tasks import llm_plan
from lightning_pipe.loops.programs.program import TrainingProgram
from tests.engine.device_tensors import watched
from tests.engine.findings import Sync
from tests.strategies.llm_cases import VOCABULARY, TinyHF, hf_config

CUDA = torch.device("cuda")
ROWS, LENGTHS = 4, (5, 4)
# Stands for a task within ScheduleStep: from the first forward to the last backward.
STAGES = "first forward to last backward"
STARTS = "until the first forward"


class ReadingLoss(TinyHF):
    """Reads its loss in each micro-batch."""

    def summed_loss(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
        loss = super().summed_loss(output, micro_batch)
        assert loss.item() > 0
        return loss


def rows() -> dict[str, Any]:
    """A batch without padding."""
    tokens = torch.randint(VOCABULARY, (ROWS, sum(LENGTHS) + 1))
    return {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}


def packed() -> dict[str, Any]:
    """Rows of two documents each, as `PackedDocuments` makes them."""
    return rows() | {"position_ids": torch.cat(list(map(torch.arange, LENGTHS))).repeat(ROWS, 1)}


def with_boundaries() -> dict[str, Any]:
    """Packed rows in one batch, with the boundaries of each."""
    ends = [micro_batch["cu_seq_lens_q"] for micro_batch in split_packed_batch_by_row(packed())]
    longest = max(LENGTHS)
    return rows() | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def padded() -> dict[str, Any]:
    """Rows of which some end with padding."""
    mask = torch.ones(ROWS, sum(LENGTHS), dtype=torch.long)
    mask[1:, -2:] = 0
    return rows() | {"attention_mask": mask}


BATCHES: dict[str, Callable[[], Any]] = {
    "rows": rows,
    "packed": packed,
    "boundaries of rows": with_boundaries,
    "boundaries of micro-batches": lambda: split_packed_batch_by_row(packed()),
    "padded": padded,
}


def watch_stages(rank: int, world_size: int, schedule: str, *kinds: str) -> dict[str, list[Sync]]:
    """Host synchronizations of a step with batches of each of these kinds, trained as the strategy does it."""
    return {kind: _train(schedule, BATCHES[kind], TinyHF) for kind in kinds}


def watch_fault(rank: int, world_size: int) -> list[Sync]:
    return _train("1f1b", rows, ReadingLoss)


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with _pop_mode_temporarily(), _disable_current_modes():
            return function(*args)

    return run


class _Training:
    """Parts of a training; the lengths of its batches are padded, which extends the last document of a packed row."""

    def __init__(self, schedule: str, module: type[TinyHF]) -> None:
        torch.manual_seed(1)
        runner = StageRunner(module(hf_config("llama")), schedule, device="cpu", batching={"pad_to_multiple_of": 4})
        self.parts, self.model = runner._parts, runner.model
        self.optimizer = torch.optim.AdamW(runner.model.parameters())
        self.losses: list[Tensor] = []

    def run(self, batch: Any, prepared: BatchInPreparation | None = None) -> None:
        self.losses.append(self.parts.runs.run(batch, prepared).loss)

    def divide(self) -> None:
        self.parts.gradients.finalize_grads()
        self.parts.runs.divide_gradients(list(self.model.parameters()))

    def step(self) -> None:
        self.parts.gradients.clip_grad_norm(None, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _train(schedule: str, make_batch: Callable[[], Any], module: type[TinyHF]) -> list[Sync]:
    """Trains two steps on the device, and the same on the host, with losses that are equal to the bit."""
    batches = [make_batch() for _ in range(3)]
    on_host = _Training(schedule, module)
    for batch in batches[:2]:
        on_host.run(batch)
        on_host.divide()
        on_host.step()
    training = _Training(schedule, module)
    syncs = _watch(training, batches)
    assert torch.equal(torch.stack(training.losses), torch.stack(on_host.losses))
    return syncs


def _watch(training: _Training, batches: Sequence[Any]) -> list[Sync]:
    parts = training.parts
    held: list[BatchInPreparation | None] = [None]
    run_schedule, finish_batch = schedule_runner.run_schedule, BatchPreparation.finish

    with ExitStack() as stack:
        accelerator = stack.enter_context(watched())

        def run_named(*args: Any, **kwargs: Any) -> None:
            with accelerator.task(STAGES):
                run_schedule(*args, **kwargs)

        def finish_named(*args: Any) -> StepInputs:
            with accelerator.task(STARTS):
                return finish_batch(*args)

        def step() -> None:
            assert held[0] is not None
            training.run(held[0].batch, held[0])

        parts.runner.device = parts.runs.device = CUDA
        for of, name, stand_in in (
            (BatchPreparation, "finish", finish_named),
            (schedule_runner, "run_schedule", run_named),
            # Forwards of tensors without memory.
            (StageShapes, "infer", _unwatched(StageShapes.infer)),
            (StageShapes, "refuse_reentrant_checkpoints", _unwatched(StageShapes.refuse_reentrant_checkpoints)),
            # As with NCCL; Gloo's groups exchange tensors of the host.
            (gradients, "collective_device", lambda *_: CUDA),
        ):
            stack.enter_context(mock.patch.object(of, name, stand_in))
        plan = llm_plan(
            lambda batch: move_data_to_device(batch, CUDA),
            parts.preparation.begin,
            lambda prepared: held.__setitem__(0, prepared),
        )
        program = TrainingProgram(
            SWPipeline(plan, CUDA), transfer="H2D", step="OptimStep", forward="ScheduleStep", backward="ScaleGradients"
        )
        feed = iter(accelerator.on_host(batches))
        for _ in range(2):
            # The first step also makes the schedule and its buffers, and checks that the loss is a sum.
            accelerator.syncs.clear()
            program.begin_next_batch(feed)
            program.set_training_step(step)
            program.pipeline.run_until(program.forward)
            program.run_backward(training.divide)
            program.begin_step_task()
            training.step()
            program.end_step_task()
            program.finish_batch()
        syncs = list(accelerator.syncs)
        program.close()
        assert list(map(str, accelerator.findings)) == []
        return syncs
