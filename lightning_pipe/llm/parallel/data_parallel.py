"""Data parallelism of a stage: FSDP2 for sharded parameters, its ``replicate`` for replicated ones.

PyTorch's schedules support both: gradients are reduced once a step, after the last micro-batch. They do not support
DistributedDataParallel, which would produce wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_pipe._compat.collectives import replicate
from lightning_pipe.llm.model.stage_module import PassThroughModule, StageModule
from lightning_pipe.llm.parallel.expert_parallel import expert_parallel_parameters
from lightning_pipe.llm.parallel.gradients import force_sum_reduction


def apply_data_parallel(
    stage: StageModule, layers: Iterable[str], mesh: DeviceMesh, *, reshard_after_forward: bool = False
) -> None:
    """Shard or replicate a stage over data-parallel ranks, in place; gradients are then summed over the ranks."""
    stage_layers = [
        layer for layer in map(stage.module.get_submodule, layers) if not isinstance(layer, PassThroughModule)
    ]
    expert_parameters = expert_parallel_parameters(stage)
    # Half-precision gradients are reduced in float32.
    half_precision = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in stage.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half_precision else None)
    sharded = "shard" in (mesh.mesh_dim_names or ())
    # Backward gathers and frees layer by layer; the schedule gathers the whole stage before its first forward.
    for part in [*stage_layers, stage]:
        if sharded:
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=policy,
                ignored_params=expert_parameters,
            )
        else:
            replicate(part, mesh=mesh, mp_policy=policy, ignored_params=expert_parameters)
    force_sum_reduction(stage)
