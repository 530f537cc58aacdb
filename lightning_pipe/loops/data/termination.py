"""Signals that end training: all ranks act on them before the same batch, even if only some ranks receive the signal.

SIGTERM ends training. Slurm's signal before it takes a job away (SIGUSR1, or ``requeue_signal`` of Lightning's
``SLURMEnvironment``) writes a checkpoint and puts the job back into the queue, where Lightning resumes from it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from types import FrameType

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pipe._compat.lightning import SignalConnector, next_hpc_checkpoint
from lightning_pipe.engine.ranks.object_collectives import all_reduce_any, run_on_rank


class SynchronizedTermination(SignalConnector):
    """Signal connector of Lightning whose handlers only record a signal while ranks agree on each batch.

    Lightning's handlers communicate immediately, wherever the main thread is: on SIGTERM they broadcast rank 0's flag,
    and on Slurm's signal they save a checkpoint. This can run in the middle of other collectives of the same group, and
    ranks without the signal do not take part in it, so that all ranks hang.
    """

    syncs_every_batch = False  # True if ranks exchange with every batch if they were told to end
    local_sigterm_received = False
    local_requeue_received = False

    def register_signal_handlers(self) -> None:
        self.local_sigterm_received = self.local_requeue_received = False
        super().register_signal_handlers()

    def has_local_signal(self) -> bool:
        """Return True if this rank has received a signal that all ranks act on together."""
        return self.local_sigterm_received or self.local_requeue_received

    def act_on_signals(self, complete: bool) -> None:
        """Act on the signals of all ranks. Every rank calls this before the same batch."""
        group = dist.group.WORLD
        end, requeue = all_reduce_any([self.local_sigterm_received, self.local_requeue_received], group)
        if requeue and not complete:
            return
        if requeue:
            self.local_requeue_received = False
            requeue = self._save_and_requeue(group)
        if end or requeue:
            self.received_sigterm = True
            raise SIGTERMException(0 if requeue else 128 + signal.SIGTERM)

    def _save_and_requeue(self, group: dist.ProcessGroup | None) -> bool:
        """Write a checkpoint on all ranks, and return True if Slurm has put the job back into its queue."""
        trainer, job = self.trainer, _get_slurm_job_id()
        # Lightning numbers the file by the files that are there, which a rank that is late would find.
        folder = str(trainer.default_root_dir)
        path = run_on_rank(lambda: next_hpc_checkpoint(trainer), f"{folder!r} cannot be listed", group)
        rank_zero_info(f"Slurm is about to stop job {job}: training is saved to {path!r}, and the job is requeued")
        for logger in trainer.loggers:
            logger.finalize("finished")
        trainer.save_checkpoint(path)
        # Slurm ends the job at once, also a save that is still written in the background.
        if hasattr(trainer.strategy, "finish_saves"):
            trainer.strategy.finish_saves()
        failed = run_on_rank(lambda: _requeue_slurm_job(job), f"job {job} cannot be requeued", group)
        if failed:
            rank_zero_warn(f"job {job} was not requeued, and training goes on until Slurm stops it: {failed}")
        return not failed

    def on_slurm_signal(self, signum: int | signal.Signals, frame: FrameType) -> None:
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and (self.syncs_every_batch or self.trainer.world_size == 1):
            self.local_requeue_received = True
        elif fitting:
            super().on_slurm_signal(signum, frame)
        elif self.trainer.is_global_zero and (
            failed := _requeue_slurm_job(_get_slurm_job_id())
        ):  # there is nothing to save
            rank_zero_warn(f"job {_get_slurm_job_id()} was not requeued: {failed}")

    def on_sigterm(self, signum: int | signal.Signals, frame: FrameType) -> None:
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and not self.syncs_every_batch:
            super().on_sigterm(signum, frame)
            return
        launcher = self.trainer.strategy.launcher
        if launcher is not None and not self.local_sigterm_received:
            launcher.kill(signal.Signals(signum))
        self.local_sigterm_received = True
        if not fitting:
            # No checkpoint is saved outside of fit, so each rank ends independently after its batch.
            self.received_sigterm = True


def _get_slurm_job_id() -> str:
    """Slurm's name of this job."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "unknown")


def _requeue_slurm_job(job: str) -> str:
    """Put a job back into Slurm's queue. Return the reason if that is not possible."""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stderr or f"scontrol ended with status {done.returncode}").strip() if done.returncode else ""
