"""Which processes are the ranks of a training: inside of a Slurm allocation, and under torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from lightning_pipe.engine import SetupError

# Slurm's numbers of batch scripts and shells, which are no job steps, begin here (slurm.h: SLURM_MAX_NORMAL_STEP_ID).
_NO_STEPS = 0xFFFFFFF0


class _SingleNodeEnvironment(LightningEnvironment):
    """Environment of a script that no other node runs."""


def get_environment_without_srun() -> ClusterEnvironment | None:
    """Return the environment of processes that the trainer starts, in a Slurm allocation outside of a job step.

    Slurm's variables describe the allocation there, in the shell of ``salloc`` and in a batch script without ``srun``,
    and no other process of it runs the script. Lightning's ``SLURMEnvironment`` would wait for ``SLURM_NTASKS`` ranks.
    """
    # Ray may run in an allocation; its workers get their environment from lightning_pipe.ray.
    if not _is_in_slurm_without_srun() or TorchElasticEnvironment.detect() or "RAY_JOB_ID" in os.environ:
        return None
    # Whoever numbers the nodes starts the script on each of them.
    return LightningEnvironment() if {"NODE_RANK", "GROUP_RANK"} & os.environ.keys() else _SingleNodeEnvironment()


def refuse_multi_node_without_srun(num_nodes: int, environment: ClusterEnvironment | None) -> None:
    """Refuse several nodes in a process that Slurm has started on one node only."""
    if num_nodes > 1 and isinstance(environment, _SingleNodeEnvironment):
        raise SetupError(
            f"num_nodes is {num_nodes}, but this process is not part of a job step of Slurm job"
            f" {os.environ['SLURM_JOB_ID']} (SLURM_STEP_ID is not set), so no other node runs the script. Start it with"
            " srun, which starts it on each node"
        )


def get_torchrun_nodes_and_devices(
    environment: ClusterEnvironment | None, num_nodes: int, devices: Sequence[torch.device]
) -> tuple[int, list[torch.device]]:
    """Return the number of nodes and this node's devices, one for each process, as torchrun has started them.

    An elastic job (``torchrun --nnodes=1:4``) starts again with other numbers, which no fixed ``num_nodes`` fits.
    """
    if not isinstance(environment, TorchElasticEnvironment) or "GROUP_WORLD_SIZE" not in os.environ:
        return num_nodes, list(devices)
    nodes, local_ranks, ranks = (
        int(os.environ[name]) for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    )
    if nodes * local_ranks != ranks:
        raise SetupError(
            f"torchrun has started {ranks} processes on {nodes} nodes, {local_ranks} of them on this node; expected the"
            " same number on each node. Use the same --nproc-per-node on all nodes"
        )
    if devices[0].type == "cpu":
        devices = [devices[0]] * local_ranks
    if local_ranks > len(devices):
        raise SetupError(
            f"torchrun has started {local_ranks} processes on this node, and the Trainer has {len(devices)} device(s)"
            f" for them. Use devices='auto', or torchrun --nproc-per-node={len(devices)}"
        )
    return nodes, list(devices[:local_ranks])


def _is_in_slurm_without_srun() -> bool:
    step = os.environ.get("SLURM_STEP_ID", "")
    return "SLURM_JOB_ID" in os.environ and not (step.isdecimal() and int(step) < _NO_STEPS)
