"""Table of the stages that each rank holds.

Tested in ``tests/llm/run/test_stage_runner.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch.distributed as dist
from torch import nn

from lightning_pipe.engine.common.fitted_table import FittedTable
from lightning_pipe.engine.ranks.together import gather_to_first
from lightning_pipe.llm.model.stage_module import PassThrough, StageModule
from lightning_pipe.llm.parallel.gradients import local_part

__all__ = ["stage_table"]


def stage_table(stages: Mapping[int, StageModule]) -> FittedTable:
    """Return a table with the stages of all ranks on the first rank. Every rank must call this.

    Args:
        stages: this rank's stages, by index.
    """
    table = FittedTable.of_figures("rank", "stage", "parameters", "bytes on the rank", edge=False)
    table.add_column("modules")
    own = [
        (
            index,
            sum(one.numel() for one in stage.parameters()),
            sum(local_part(one).nbytes for one in stage.parameters()),
            ", ".join(_ranges(stage.module)),
        )
        for index, stage in sorted(stages.items())
    ]
    for rank, rows in enumerate(gather_to_first(own, dist.group.WORLD)):
        for index, count, size, modules in rows:
            table.add_row(str(rank), str(index), f"{count:,}", f"{size:,}", modules)
    return table


def _ranges(model: nn.Module) -> Iterator[str]:
    """Names and classes of held modules; consecutive layers of one class are joined."""
    held = [(*name.rpartition("."), type(module).__name__) for name, module in _held(model)]
    for (prefix, dot, kind, _), names in groupby(held, lambda one: (*one[:2], one[3], one[2].isdigit() or one[2])):
        first, *others = [name for *_, name, _ in names]
        yield f"{prefix}{dot}{f'{first}-{others[-1]}' if others else first} ({kind})"


def _held(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that no other stage shares."""
    for name, module in model.named_children():
        if any(isinstance(one, PassThrough | nn.ModuleList) for one in module.modules()):
            yield from _held(module, f"{prefix}{name}.")
        elif not isinstance(module, PassThrough):
            yield f"{prefix}{name}", module
