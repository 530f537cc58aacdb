"""Which processes are the ranks of a training inside of a Slurm allocation."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from lightning_pipe.engine import SetupError

__all__ = ["check_nodes", "own_processes"]

# Slurm's numbers of batch scripts and shells, which are no job steps, begin here (slurm.h: SLURM_MAX_NORMAL_STEP_ID).
_NO_STEPS = 0xFFFFFFF0


class _OnOneNode(LightningEnvironment):
    """Environment of a script that no other node runs."""


def own_processes() -> ClusterEnvironment | None:
    """Return the environment of processes that the trainer starts, in a Slurm allocation outside of a job step.

    Slurm's variables describe the allocation there, in the shell of ``salloc`` and in a batch script without ``srun``,
    and no other process of it runs the script. Lightning's ``SLURMEnvironment`` would wait for ``SLURM_NTASKS`` ranks.

    Returns:
        None in a job step, under torchrun, in a worker of Ray, and outside of Slurm, where the choice of Lightning and
        the trainer's plugins is right.
    """
    # Ray may run in an allocation; its workers get their environment from lightning_pipe.ray.
    if not _in_allocation() or TorchElasticEnvironment.detect() or "RAY_JOB_ID" in os.environ:
        return None
    # Whoever numbers the nodes starts the script on each of them.
    return LightningEnvironment() if {"NODE_RANK", "GROUP_RANK"} & os.environ.keys() else _OnOneNode()


def check_nodes(num_nodes: int, environment: ClusterEnvironment | None) -> None:
    """Refuse several nodes in a process that Slurm has started on one node only.

    Raises:
        SetupError: *num_nodes* is above 1 in an allocation, but outside of a job step.
    """
    if num_nodes > 1 and isinstance(environment, _OnOneNode):
        raise SetupError(
            f"num_nodes is {num_nodes}, but this process is not part of a job step of Slurm job"
            f" {os.environ['SLURM_JOB_ID']} (SLURM_STEP_ID is not set), so no other node runs the script. Start it with"
            " srun, which starts it on each node"
        )


def _in_allocation() -> bool:
    step = os.environ.get("SLURM_STEP_ID", "")
    return "SLURM_JOB_ID" in os.environ and not (step.isdecimal() and int(step) < _NO_STEPS)
