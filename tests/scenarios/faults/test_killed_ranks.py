"""A rank that is killed, wherever it is: the other one ends by itself, soon, and says where it was and why.

One of the ranks is killed once in each task, in mid-epoch, rank 0 (which keeps the store) and rank 1 in turn.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch.callbacks import Callback

from lightning_pipe.engine import PipelineTask
from lightning_pipe.engine.runtime.executor import Executor
from lightning_pipe.recsys.plans.recsys_plans import INPUT
from tests.scenarios.faults.forked_ranks import Here, Nursery, told
from tests.scenarios.faults.training import BOUND, KINDS, THREADED, WHERE, fit, module

# strategy, task, iteration, rank, moment
Case = tuple[str, str, int, int, str]

LOST = r"Connection (closed|reset) by peer|Broken pipe|because a rank has ended|another rank has ended"

CASES: list[Case] = [
    *((kind, task, 3, place % 2, "begins") for kind, made in KINDS.items() for place, task in enumerate(made.tasks)),
    *((THREADED, task, 3, 1, "begins") for task in KINDS["recsys"].tasks if task in INPUT),
    ("recsys", "EmbBackward", 0, 1, "ends"),
    ("llm", KINDS["llm"].tasks[-1], 5, 0, "ends"),
]


def killed(here: Here) -> None:
    here.note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_task(here: Here, kind: str, task: str, iteration: int, rank: int, moment: str) -> None:
    def dying(method: str, dies: str) -> Any:
        """The executor's method, in which the process is killed where the task is that."""
        original: Any = getattr(Executor, method)

        def called(self: Executor, op: Any, slot: Any, *rest: Any) -> Any:
            here_now = dies == moment and op.name == task and slot.iteration == iteration
            if here_now and moment == "begins":
                killed(here)
            result = original(self, op, slot, *rest)
            if here_now:
                killed(here)
            return result

        return mock.patch.object(Executor, method, called)

    make = PipelineTask.__init__

    def dying_task(self: PipelineTask, name: str, fn: Any, *arguments: Any, **named: Any) -> None:
        def run(ctx: Any) -> None:
            here_now = name == task and ctx.iter_idx == iteration
            if here_now and moment == "begins":
                killed(here)
            fn(ctx)
            if here_now:
                killed(here)

        make(self, name, run, *arguments, **named)

    with ExitStack() as patches:
        if here.rank == rank:
            patches.enter_context(mock.patch.object(PipelineTask, "__init__", dying_task))
            # Of a task whose work the caller does.
            patches.enter_context(dying("begin_caller_task", "begins"))
            patches.enter_context(dying("end_caller_task", "ends"))
        # Behind the last batch of all there is nothing to wait for.
        fit(kind, 2, module(kind), max_epochs=2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_rank_ends_soon_after_the_other_was_killed_in_a_task_and_says_where_it_was(
    case: Case, ranks: Nursery
) -> None:
    ended, rank = ranks.run(in_a_task, 2, *case), case[3]
    assert ended[rank].code == -signal.SIGKILL, told(ended)
    assert ended[1 - rank].code == 1, told(ended)
    assert ended[1 - rank].seconds < BOUND, told(ended)
    assert not ended[1 - rank].left, told(ended)
    assert re.search(LOST, str(ended[1 - rank].value)), told(ended)
    assert re.search(WHERE.format(rank=1 - rank), str(ended[1 - rank].value)), told(ended)


# ---------------------------------------------------------------------- while a checkpoint is written


class Save(Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/a.ckpt")


def in_a_save(here: Here, kind: str, rank: int) -> None:
    # A checkpoint of the plain strategy is rank 0's work.
    of, name = (torch_io, "_atomic_save") if kind == "pipeline" else (dcp.FileSystemWriter, "write_data")
    patch: Any = mock.patch.object(of, name, side_effect=lambda *args, **kwargs: killed(here))
    with ExitStack() as patches:
        if here.rank == rank:
            patches.enter_context(patch)
        fit(kind, 2, module(kind), callbacks=[Save()], default_root_dir=here.folder)


@pytest.mark.parametrize(("kind", "rank"), [("pipeline", 0), ("recsys", 0), ("llm", 1)])
def test_a_rank_ends_soon_after_the_other_was_killed_in_a_save(kind: str, rank: int, ranks: Nursery) -> None:
    ended = ranks.run(in_a_save, 2, kind, rank)
    assert ended[rank].code == -signal.SIGKILL, told(ended)
    assert ended[1 - rank].code == 1, told(ended)
    assert ended[1 - rank].seconds < BOUND, told(ended)
    assert re.search(LOST, str(ended[1 - rank].value)), told(ended)
    if kind != "pipeline":
        assert "a.ckpt' cannot be written, since another rank has ended" in ended[1 - rank].value.text
