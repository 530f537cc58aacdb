"""The tasks of a training iteration run in their order, the next batch's copy and preparation ahead."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pipe.engine import SWPipeline
from lightning_pipe.llm.run.training_tasks import llm_plan


def run(batches: list[Any], trained: set[int]) -> list[str]:
    """What happened, in order; iterations that are not trained have nothing set, as where a hook skips a batch."""
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
        ctx = pipeline.begin(source)
        pipeline.run_until("H2D")
        if index in trained:
            ctx.training_step = lambda: happened.append(f"step {handed_over[-1]}")
            ctx.run_backward = lambda index=index: happened.append(f"scale {index}")
            pipeline.run_until("ScaleGradients")
        pipeline.begin_task("OptimStep")
        happened.append(f"optimise {index}")
        pipeline.end_task("OptimStep")
        pipeline.finish()
        assert handed_over[-1] is None  # what is prepared for a batch is for that batch's step alone
    pipeline.close()
    return happened


def test_a_batch_is_copied_and_prepared_before_the_one_ahead_of_it_is_trained() -> None:
    happened = run(["a", "b", "c"], {0, 1, 2})
    for before, after in (("copy a", "prepare a"), ("prepare a", "step prepared a"), ("prepare b", "optimise 0")):
        assert happened.index(before) < happened.index(after)
    assert [one for one in happened if not one.startswith(("copy", "prepare"))] == [
        *("step prepared a", "scale 0", "optimise 0"),
        *("step prepared b", "scale 1", "optimise 1"),
        *("step prepared c", "scale 2", "optimise 2"),
    ]


def test_each_batch_is_copied_and_prepared_once() -> None:
    happened = run(["a", "b", "c"], {0, 2})
    assert sorted(one for one in happened if one.startswith(("copy", "prepare"))) == [
        *("copy a", "copy b", "copy c"),
        *("prepare a", "prepare b", "prepare c"),
    ]
    assert "step prepared b" not in happened


def test_a_loader_that_yields_none_has_nothing_to_prepare() -> None:
    assert "prepare None" not in run([None, "b"], {1})
