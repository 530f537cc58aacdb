"""The tasks of a training iteration run in their order, the next batch's copy and preparation ahead."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pipe.engine import SWPipeline
from lightning_pipe.llm.run.training_tasks import llm_plan


def run(batches: list[Any]) -> list[str]:
    """What happened, in order."""
    happened: list[str] = []

    def transfer(batch: Any) -> Any:
        happened.append(f"copy {batch}")
        return batch

    def prepare(batch: Any, copies: Any) -> Any:
        happened.append(f"prepare {batch}")
        return f"prepared {batch}"

    handed_over: list[Any] = []
    pipeline = SWPipeline(llm_plan(transfer, prepare, handed_over.append), torch.device("cpu"))
    source = iter(batches)
    for index in range(len(batches)):
        ctx = pipeline.begin_period(source)
        pipeline.run_until("H2D")
        ctx.training_step = lambda: happened.append(f"step {handed_over[-1]}")
        ctx.run_backward = lambda index=index: happened.append(f"scale {index}")
        pipeline.run_until("ScaleGradients")
        pipeline.begin_caller_task("OptimStep")
        happened.append(f"optimize {index}")
        pipeline.end_caller_task("OptimStep")
        pipeline.finish_period()
        assert handed_over[-1] is None  # what is prepared for a batch is for that batch's step alone
    pipeline.close()
    return happened


def test_a_batch_is_copied_and_prepared_before_the_one_ahead_of_it_is_trained() -> None:
    happened = run(["a", "b", "c"])
    for before, after in (("copy a", "prepare a"), ("prepare a", "step prepared a"), ("prepare b", "optimize 0")):
        assert happened.index(before) < happened.index(after)
    assert [one for one in happened if not one.startswith(("copy", "prepare"))] == [
        *("step prepared a", "scale 0", "optimize 0"),
        *("step prepared b", "scale 1", "optimize 1"),
        *("step prepared c", "scale 2", "optimize 2"),
    ]
