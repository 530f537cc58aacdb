"""Run by torchrun on two ranks: a fit of the strategy ``pipeline`` that hangs in its third batch.

Arguments: the fault, the folder of the run, and the timeout of collectives in seconds.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.loops.models import Net
from tests.scenarios.faults.training import fit

BATCH = 2


def stuck_in_user_code() -> None:
    threading.Event().wait()


class Hangs(Net):
    """Goes wrong on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == BATCH:
            wrong = self.global_rank == 1
            {"skipped": self._skipped, "stuck": self._stuck}[sys.argv[1]](wrong)
        return super().training_step(batch, batch_idx)

    def _skipped(self, wrong: bool) -> None:
        if not wrong:
            dist.all_reduce(torch.ones(5))
        dist.barrier()

    def _stuck(self, wrong: bool) -> None:
        if wrong:
            stuck_in_user_code()


if __name__ == "__main__":
    fit(
        "pipeline",
        2,
        Hangs(),
        strategy={"timeout": timedelta(seconds=float(sys.argv[3]))},
        default_root_dir=sys.argv[2],
    )
