"""How a recommender's batches, loss and optimizers differ from Lightning's: transfer, loss, and tables left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipe.engine import PipelinePlan, PipelineTask
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects
from lightning_pipe.loops.programs.batch_hooks import find_user_transfer_hooks
from lightning_pipe.recsys.batches.transfer import check_movable
from lightning_pipe.recsys.dense.dense_optimizer import remove_table_parameters
from lightning_pipe.recsys.plans.recsys_plans import with_transfer_on_main
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel

_log = pl.utilities.rank_zero.rank_zero_info
_log_names = pl.utilities.rank_zero.rank_zero_debug


def extract_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in an output of ``training_step``, or None. Lightning itself checks the form of the output."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    return output if isinstance(output, torch.Tensor) else None


class TransferThreadPolicy:
    """Keeps transfers that call the user's hooks in the main thread."""

    def __init__(self, transfer_on_worker: bool) -> None:
        self._on_worker = transfer_on_worker
        self._told = False

    def move_user_transfer_to_main_thread(self, trainer: pl.Trainer, plan: PipelinePlan) -> PipelinePlan:
        """Return *plan* with the transfer in the main thread if the user has a part in it, and log that once."""
        main_thread_plan = with_transfer_on_main(plan)
        if main_thread_plan is plan:
            return plan
        # A rank alone must not follow another plan, for example that of a profiler on the first rank.
        of_ranks = all_gather_objects(find_user_transfer_hooks(trainer, self._on_worker), dist.group.WORLD)
        users = sorted({name for names in of_ranks for name in names})
        if not users:
            return plan
        if not self._told:
            self._told = True
            _log(
                f"Plan {plan.name!r} moves batches to the device in the main thread, not in its worker thread, because"
                f" of {', '.join(users)}. Pass transfer_on_worker=True if the hooks draw no random numbers and call"
                " neither log nor collectives; a strategy's own batch_to_device stays in the main thread"
            )
        return main_thread_plan


def wrap_transfer_with_batch_check(trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return *transfer* with a check that Lightning can move the batch, unless the user overrides the transfer."""
    holders = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    if any(holder is not None and is_overridden("transfer_batch_to_device", holder) for holder in holders):
        return transfer

    def check_and_transfer(batch: Any) -> Any:
        check_movable(batch)
        return transfer(batch)

    return check_and_transfer


def remove_tables_from_optimizers(optimizers: Sequence[Optimizer], sharded: ShardedModel) -> None:
    """Remove tables from the user's optimizers, and log it. Tables are trained by their own optimizers."""
    for optimizer in optimizers:
        names = remove_table_parameters(optimizer, sharded.table_parameters())
        if names:
            _log(
                f"Removed {len(names)} table parameter(s) from {type(optimizer).__name__}'s groups, since the"
                " tables' own optimizer trains them"
            )
            _log_names(f"Removed from {type(optimizer).__name__}'s groups: {', '.join(names)}")
        for group in optimizer.param_groups:
            # PyTorch's schedulers set this base rate, except those that step on a metric. Tables follow both kinds.
            group.setdefault("initial_lr", group["lr"])


def log_fused_optimizer_defaults(model: ShardedModel) -> None:
    """Log the arguments of tables' optimizers that have the kernel's default instead of the class's."""
    tables: dict[tuple[str, str], int] = {}
    for table in model.tables.values():
        optimizer = table.resolved_optimizer
        for key, (kernels, classes) in optimizer.left_out.items():
            argument = optimizer.name, f"{key}={kernels} (the class's default is {classes})"
            tables[argument] = tables.get(argument, 0) + 1
    if tables:
        values = "; ".join(f"{name} of {count} table(s) with {value}" for (name, value), count in tables.items())
        _log(
            "Arguments that apply_optimizer_in_backward did not set have the fused kernel's defaults, as with"
            f" TorchRec's DistributedModelParallel: {values}. Set them explicitly to change this"
        )


def find_last_task_writing_batch(tasks: Sequence[PipelineTask]) -> str | None:
    """Name of the last task that writes the batch before it is trained: a balancer's, or one of the user's own."""
    names = [task.name for task in tasks]
    before = tasks[names.index("H2DAndShuffle") + 1 : names.index("DenseForward")]
    return next((task.name for task in reversed(before) if "batch" in task.writes), None)
