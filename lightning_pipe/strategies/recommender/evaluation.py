"""Validation, test and prediction of a sharded recommender under a Trainer, while its training is suspended."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lightning_pipe.engine import PipelinePlan, SWPipeline
from lightning_pipe.engine.ranks.object_collectives import run_on_all_ranks
from lightning_pipe.loops import EvaluationProgram
from lightning_pipe.loops.programs.default_program import build_default_evaluation_program
from lightning_pipe.loops.uneven_evaluation import UnevenBatchCoordinator
from lightning_pipe.recsys.kernels.fused_kernels import disable_lookup_training
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.tasks.evaluation import PipelinedEvaluation
from lightning_pipe.recsys.tasks.session import RecsysSession

# Prefix of the announced name of a lookup; the name of the sharded module follows.
LOOKUP = "lookup in "


class RecsysEvaluation:
    """Evaluates a sharded LightningModule."""

    def __init__(self, session: RecsysSession, precision: Precision, training: Callable[[], SWPipeline | None]) -> None:
        self._session = session
        self._sharded = session.sharded_model
        self._precision = precision
        self._training = training
        self._rows_are_known = False
        self.programs: list[EvaluationProgram] = []
        # Rewrites for batches that only some ranks have, by the name of the step.
        self._turn_rewrites: dict[str, ModelRewrite] = {}

    def sync_buffers_and_replicas(self) -> None:
        """Copy rank 0's buffers to all ranks and average the replicas of tables. Every rank calls this method."""
        self.check_no_existing_rows()
        self._sharded.broadcast_buffers()
        self._sharded.sync_replicas()

    def check_no_existing_rows(self) -> None:
        """Refuse rows of an earlier run, on the first call. Every rank calls this method.

        It is called after checkpoints and user hooks, which may replace these rows.
        """
        rows_are_known, self._rows_are_known = self._rows_are_known, True
        modules = self._sharded.dynamic_rows.values()

        def check_dynamic_tables_empty() -> None:
            for rows in modules:
                rows.check_no_existing_rows()

        if modules and not rows_are_known:
            run_on_all_ranks(check_dynamic_tables_empty, "rows of an earlier run cannot be used", dist.group.WORLD)

    def build(
        self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str, plan: PipelinePlan
    ) -> EvaluationProgram:
        """Build the tasks and the plan for the batches of one dataloader. Every rank calls this method."""
        if not self._session.options.rewrite.evaluation:
            return build_default_evaluation_program(trainer, transfer, step, ahead=0)
        with self._session.suspend_training(self._training()):
            evaluation = PipelinedEvaluation(
                self._session, step, plan, transfer=transfer, lookup_context=self._precision.forward_context
            )

        @contextmanager
        def suspend_training_and_attach() -> Generator[None, None, None]:
            with self._session.suspend_training(self._training()), evaluation.attached():
                yield

        program = EvaluationProgram(
            evaluation.pipeline,
            transfer="H2DAndShuffle",
            forward="DenseForward",
            step="DenseForward",
            trains_next_alone=lambda: evaluation.runs_next_serially,
            evaluation_context=suspend_training_and_attach,
        )
        self.programs.append(program)
        return program

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Run the evaluation step of a batch, in the program that holds the batch."""
        for program in self.programs:
            if program.current is not None and not program.trains_in_one_task:
                ctx = program.set_training_step(step)
                program.pipeline.run_until(program.forward)
                return ctx.output
        # Lookups in the modules' own forwards must not advance the kernels' counters. In training, the rewrite handles
        # the counters.
        with (
            nullcontext()
            if torch.is_grad_enabled()
            else disable_lookup_training(self._sharded.sharded_modules.values())
        ):
            return step()

    @contextmanager
    def announce_lookups_to_ranks(self, coordinator: UnevenBatchCoordinator, step: str) -> Generator[None, None, None]:
        """Context in which lookups of the module's method *step* are announced to *coordinator*."""
        with self._session.suspend_training(self._training()):
            if step not in self._turn_rewrites:
                self._turn_rewrites[step] = self._session.new_rewrite(step)
            rewrite = self._turn_rewrites[step]
            rewrite.announce_lookup = lambda announced: coordinator.announce_collective(
                f"{LOOKUP}{announced[0]}", announced
            )
            rewrite.attach()
            try:
                yield
            finally:
                rewrite.detach()

    def join_lookup_of_other_rank(self, detail: Any) -> None:
        """Take part in another rank's lookup with empty features, inside :meth:`announce_lookups_to_ranks`."""
        rewrite = next(candidate for candidate in self._turn_rewrites.values() if candidate.is_attached)
        with self._precision.forward_context():
            rewrite.run_empty_lookup(detail)

    def close(self) -> None:
        """Close all programs. May be called again."""
        for program in self.programs:
            program.close()
        self.programs = []
        self._turn_rewrites = {}
