"""What is trained while things go wrong: a module, a strategy and data for each of the three strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_pipe.llm.run.training_tasks import llm_plan
from lightning_pipe.loops.programs.default_program import build_plan_of_default_tasks
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from lightning_pipe.strategies.pipeline import PipelineStrategy
from tests.loops.models import Net, Rows
from tests.patience import HANG
from tests.strategies import cases, llm_cases

# Of a strategy's process groups: more than a test waits, so that it is never this that ends a rank.
TIMEOUT = timedelta(seconds=2 * HANG)
# How long (seconds) a rank may take to end once another has failed. Gloo sees at once that a connection is closed, but
# a busy machine may take a minute to raise, clean up and end the process.
BOUND = HANG / 2
# What errors say about the place.
WHERE = r"(task '\w+( iterator)?' of iteration \d+ \(stage \d\)|batch \d+ of epoch \d+) failed on rank {rank}"


@dataclass(frozen=True)
class Kind:
    """One strategy."""

    module: Callable[[], pl.LightningModule]
    strategy: Callable[..., Any]
    data: dict[str, Any]
    tasks: tuple[str, ...]


KINDS = {
    "pipeline": Kind(
        Net,
        PipelineStrategy,
        {"dataset": Rows(12), "batch_size": 1},
        tuple(build_plan_of_default_tasks(lambda batch: batch).tasks),
    ),
    "recsys": Kind(
        cases.Clicks,
        cases.recsys,
        {"dataset": cases.Rows(12), "batch_size": 1, "collate_fn": cases.collate},
        tuple(task.name for task in recsys_tasks()),
    ),
    "llm": Kind(
        llm_cases.Tiny,
        llm_cases.llm,
        {"dataset": llm_cases.row_batches(6), "batch_size": None},
        tuple(llm_plan(lambda batch: batch, lambda batch, copies: batch).tasks),
    ),
}


# As recsys, with the input in a separate thread.
THREADED = "recsys, threaded_input"


def kind_of(kind: str) -> Kind:
    if kind == THREADED:
        return replace(KINDS["recsys"], strategy=partial(cases.recsys, "threaded_input"))
    return KINDS[kind]


def module(kind: str) -> Any:
    """A module, of the same values each time."""
    torch.manual_seed(5)
    return kind_of(kind).module()


def loader(kind: str, wrap: Callable[[Any], Any] | None = None, **options: Any) -> DataLoader[Any]:
    """Six batches for each of two ranks; *wrap* is for the dataset."""
    data = {**kind_of(kind).data, **options}
    if wrap is not None:
        data["dataset"] = wrap(data["dataset"])
    return DataLoader(**data)


def trainer(kind: str, world_size: int, strategy: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    """A quiet trainer over the ranks of this run; *strategy* has options for that."""
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": kind_of(kind).strategy(**{"timeout": TIMEOUT, **(strategy or {})}),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "max_epochs": 1,
    }
    return pl.Trainer(**{**defaults, **options})


def fit(
    kind: str, world_size: int, module: pl.LightningModule, data: Any = None, ckpt_path: Any = None, **options: Any
) -> pl.Trainer:
    """Train from a fixed seed; *options* are the trainer's."""
    used = trainer(kind, world_size, **options)
    torch.manual_seed(11)
    used.fit(module, loader(kind) if data is None else data, ckpt_path=ckpt_path)
    return used


def final_state(kind: str, used: pl.Trainer) -> dict[str, torch.Tensor]:
    """All that training left, on this rank or, for tables, as a whole; every rank calls it."""
    if kind in ("recsys", THREADED):
        return cases.state_of(used)
    state = {name: value.detach().clone() for name, value in used.lightning_module.state_dict().items()}
    for number, optimizer in enumerate(used.optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    state[f"optimizer {number} {index} {key}"] = value.detach().clone()
    return state
