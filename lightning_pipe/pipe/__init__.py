"""The in-process pipe: an ``nn.Sequential`` on several devices of one machine, without a launcher.

Its schedules are the plans in ``plans``. ``scheduler`` runs them, and ``mini_batch_run`` runs one mini-batch. Other
packages also import ``balance``, ``batch_norm``, ``partitioning``, ``plans`` and ``recorder``.
"""

from lightning_pipe.pipe.balance import balance_by_memory, balance_by_parameters, balance_by_time
from lightning_pipe.pipe.batch_norm import DeferredBatchNorm
from lightning_pipe.pipe.pipe import Pipe, compute_pipe_or_module_loss
from lightning_pipe.pipe.position import is_recomputing
from lightning_pipe.pipe.skip import Namespace, isolate, pop, skippable, stash

__all__ = [
    "DeferredBatchNorm",
    "Namespace",
    "Pipe",
    "balance_by_memory",
    "balance_by_parameters",
    "balance_by_time",
    "compute_pipe_or_module_loss",
    "is_recomputing",
    "isolate",
    "pop",
    "skippable",
    "stash",
]
