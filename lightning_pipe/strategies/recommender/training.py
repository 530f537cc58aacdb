"""Training of a recommender under a Trainer: Lightning's calls during a batch run its tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipe._compat.lightning import accumulates
from lightning_pipe._compat.torchrec import cached_tables
from lightning_pipe.engine import PipelinePlan, ProfileResult, SWPipeline
from lightning_pipe.engine.ranks.together import gather
from lightning_pipe.loops import TrainingProgram
from lightning_pipe.loops.programs.auto_program import AutoProgram, PlanChoice
from lightning_pipe.loops.programs.batch_hooks import users_transfers
from lightning_pipe.recsys.batches.transfer import check_movable
from lightning_pipe.recsys.dense.dense_optimizer import take_tables_out
from lightning_pipe.recsys.kernels.kernel_calls import check_tables_wait
from lightning_pipe.recsys.plans.named import recsys_plan, with_transfer_on_main
from lightning_pipe.recsys.sharding.replicas import refuse_norm
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.session import RecsysSession, starts_alone
from lightning_pipe.recsys.tasks.table_rates import TableRates
from lightning_pipe.strategies.plan_finding import AUTO, AutoOptions
from lightning_pipe.strategies.recommender.table_gradients import TableGradients
from lightning_pipe.strategies.recommender.table_profile import TableProfile
from lightning_pipe.strategies.refusals import clips_gradients, loss_scaler

_log = pl.utilities.rank_zero.rank_zero_info
_log_names = pl.utilities.rank_zero.rank_zero_debug


class TableTraining:
    """Trains a sharded LightningModule, from set-up to the end of ``fit``."""

    def __init__(
        self,
        trainer: pl.Trainer,
        session: RecsysSession,
        plan: str | Path | PipelinePlan,
        auto: AutoOptions,
        chosen: Callable[[PlanChoice], None],
        schedule: Mapping[str, Any] | None,
        in_windows: bool = False,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._sharded = sharded = session.sharded
        self._precision = trainer.precision_plugin
        self._plan = plan
        self._auto = auto
        self._chosen = chosen
        self._in_windows = in_windows
        self._gradients: TableGradients | None = None
        self.rates = TableRates(sharded, lambda: trainer.optimizers[0], schedule)
        self.program: TrainingProgram | None = None
        _tell_left_out(sharded)
        if clips_gradients(trainer):
            refuse_norm(sharded.replicas)
        session.begin_training(self.rates.bring)

    @property
    def pipeline(self) -> SWPipeline | None:
        """Pipeline of the training; None before the first epoch."""
        return None if self.program is None else self.program.pipeline

    def build(self, transfer: Callable[[Any], Any], allowed: Callable[[PipelinePlan], PipelinePlan]) -> TrainingProgram:
        """Build the tasks and the plan. Every rank calls this method when training begins."""
        session, sharded, precision = self._session, self._sharded, self._precision
        clipped, loss_scaled = clips_gradients(self._trainer), loss_scaler(precision) is not None
        if clipped or loss_scaled:
            # The scale of the tables' gradients is known only after the optimiser step.
            check_tables_wait(sharded.sharded_modules)
        tasks = session.training_tasks(
            "training_step",
            transfer=transfer,
            loss_of=lightning_loss,
            lookup_context=precision.forward_context,
            clipped=clipped,
            loss_scaled=loss_scaled,
            accumulates=self._in_windows,
        )
        rewrite = session.rewrite
        assert rewrite is not None
        if clipped or loss_scaled:
            self._gradients = TableGradients(precision, sharded, session.device, self._batch_in_training)
        arguments: dict[str, Any] = {
            "transfer": "H2DAndShuffle",
            "forward": "LossPostprocess",
            "backward": "FinalizeGrads",
            "step": "OptimStep",
            "prepared": "BalanceFinish" if any(task.name == "BalanceFinish" for task in tasks) else None,
            "alone": lambda: self.pipeline is not None and starts_alone(rewrite, self.pipeline.plan),
            "on_close": self._end,
            "on_abandon": self._abandon,
        }
        if self._plan != AUTO:
            pipeline = SWPipeline(allowed(recsys_plan(self._plan, tasks)), session.device, session.world)
            self.program = TrainingProgram(pipeline, **arguments)
            return self.program
        from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, propose_plans  # lazy: plan="auto" only

        exploration = self._auto.search
        by_hand = hand_written_plans(tasks, on_disk=bool(sharded.dynamic_rows), max_in_flight=self._auto.max_in_flight)
        plans = [*map(allowed, by_hand)]
        propose = partial(
            propose_plans,
            plans,
            cached=any(cached_tables(module) for module in rewrite.modules.values()),
            max_in_flight=self._auto.max_in_flight,
            peers=self._trainer.world_size > 1,
            device=session.device,
            keep=exploration.found,
        )
        self.program = AutoProgram(
            plans, propose, session.device, session.world, exploration, self._chosen, **arguments
        )
        return self.program

    def _batch_in_training(self) -> Any:
        return None if self.program is None else self.program.current

    def _abandon(self, contexts: Sequence[Any]) -> None:
        assert self.pipeline is not None
        self.pipeline.settle()  # a worker may still prefetch rows
        self._session.abandon(contexts)

    def _end(self) -> None:
        self._session.end_training()
        if self._gradients is not None:
            self._gradients.close()

    # ------------------------------------------------------------------ Lightning's calls during a batch

    def forward(self, step: Callable[[], Any]) -> Any:
        """Run the tasks of the period up to the loss. *step* calls the module's ``training_step``."""
        assert self.program is not None
        if self._gradients is not None:
            self._gradients.begin()
        if (window := self._session.window) is not None:
            loop = self._trainer.fit_loop.epoch_loop
            window.is_last = not accumulates(loop)
            if loop.batch_idx % self._trainer.accumulate_grad_batches == 0:
                window.drop()  # Lightning clears the dense gradients here, too, if an earlier window has no end
        output = self.program.run_forward(step)
        if output is None and self._trainer.world_size > 1:
            # Lightning refuses None on several ranks, because DDP would wait forever for the rank's gradients. Here the
            # rank sends zero gradients. The returned loss satisfies Lightning; no backward runs from it.
            return torch.zeros((), device=self._session.device, requires_grad=True)
        return output

    def backward(self, backward: Callable[[], None]) -> None:
        """Run the tasks of the period up to the averaged gradients. *backward* is the precision plugin's backward."""
        assert self.program is not None
        self.program.run_backward(backward)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]
    ) -> Any:
        """Run the optimiser step. *step* calls the precision plugin's step with a closure."""
        program, gradients = self.program, self._gradients
        assert program is not None

        def closure_and_open_step() -> Any:
            result = closure()
            program.begin_step()
            if gradients is not None:
                gradients.after_backward(optimizer)
                if gradients.leave_scaler_alone(optimizer):
                    return None  # Lightning treats None as a batch without a loss
            return result

        with nullcontext() if gradients is None else gradients.stepping(optimizer):
            output = step(closure_and_open_step)
        program.end_step()
        self.rates.step()
        return output

    # ------------------------------------------------------------------ profile and end

    def profile(
        self, batches: Sequence[Any], tasks: Sequence[str] | None, rounds: int, iterations: int
    ) -> ProfileResult:
        """See :meth:`RecsysPipelineStrategy.profile`."""
        pipeline = self.pipeline
        assert pipeline is not None
        with self._session.suspended(pipeline):
            profile = TableProfile(self._trainer, self._session, lightning_loss, pipeline.plan)
            return profile.measure(batches, tasks, rounds, iterations)

    def close(self) -> None:
        """Close the program. May be called again."""
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            search = callback.optimal_lr if isinstance(callback, LearningRateFinder) else None
            if search is not None and (rate := search.suggestion()) is not None:
                self.rates.note_search(rate)
        if self.program is not None:
            self.program.close()
            self.program = None


def lightning_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in an output of ``training_step``, or None. Lightning itself checks the form of the output."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    return output if isinstance(output, torch.Tensor) else None


class UsersTransfer:
    """Keeps transfers that call the user's hooks in the main thread."""

    def __init__(self, transfer_on_worker: bool) -> None:
        self._on_worker = transfer_on_worker
        self._told = False

    def allowed(self, trainer: pl.Trainer, plan: PipelinePlan) -> PipelinePlan:
        """Return *plan* with the transfer in the main thread if the user has a part in it, and log that once."""
        found = with_transfer_on_main(plan)
        if found is plan:
            return plan
        # A rank alone must not follow another plan, for example that of a profiler on the first rank.
        of_ranks = gather(users_transfers(trainer, self._on_worker), dist.group.WORLD)
        users = sorted({one for names in of_ranks for one in names})
        if not users:
            return plan
        if not self._told:
            self._told = True
            _log(
                f"Plan {plan.name!r} moves batches to the device in the main thread, not in its worker thread, because"
                f" of {', '.join(users)}. Pass transfer_on_worker=True if the hooks draw no random numbers and call"
                " neither log nor collectives; a strategy's own batch_to_device stays in the main thread"
            )
        return found


def checked_transfer(trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return *transfer* with a check that Lightning can move the batch, unless the user overrides the transfer."""
    holders = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    if any(one is not None and is_overridden("transfer_batch_to_device", one) for one in holders):
        return transfer

    def move(batch: Any) -> Any:
        check_movable(batch)
        return transfer(batch)

    return move


def leave_tables_out(optimizers: Sequence[Optimizer], sharded: ShardedModel) -> None:
    """Remove tables from the user's optimisers, and log it. Tables are trained by their own optimisers."""
    for optimizer in optimizers:
        names = take_tables_out(optimizer, sharded.table_parameters())
        if names:
            _log(
                f"Removed {len(names)} table parameter(s) from {type(optimizer).__name__}'s groups, since the"
                " tables' own optimiser trains them"
            )
            _log_names(f"Removed from {type(optimizer).__name__}'s groups: {', '.join(names)}")
        for group in optimizer.param_groups:
            # PyTorch's schedulers set this base rate, except those that step on a metric. Tables follow both kinds.
            group.setdefault("initial_lr", group["lr"])


def _tell_left_out(model: ShardedModel) -> None:
    """Log the arguments of tables' optimisers that have the kernel's default instead of the class's."""
    tables: dict[tuple[str, str], int] = {}
    for table in model.tables.values():
        optimizer = table.known_optimizer
        for key, (kernels, classes) in optimizer.left_out.items():
            said = optimizer.name, f"{key}={kernels} (the class's default is {classes})"
            tables[said] = tables.get(said, 0) + 1
    if tables:
        values = "; ".join(f"{name} of {count} table(s) with {value}" for (name, value), count in tables.items())
        _log(
            "Arguments that apply_optimizer_in_backward did not set have the fused kernel's defaults, as with"
            f" TorchRec's DistributedModelParallel: {values}. Set them explicitly to change this"
        )
