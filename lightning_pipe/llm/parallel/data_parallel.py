"""Data parallelism of single stages: FSDP2 where parameters are sharded, its ``replicate`` where they are whole.

PyTorch's schedules know both: gradients are reduced once a step, after the last micro-batch. They do not know
DistributedDataParallel, under which they give wrong gradients.

Tested in ``tests/llm/parallel/test_tensor_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_pipe.llm.model.stage_module import PassThrough, StageModule
from lightning_pipe.llm.parallel.expert_parallel import spread_parameters
from lightning_pipe.llm.parallel.gradients import force_sum_reduction

__all__ = ["parallelise_stage"]


def parallelise_stage(
    stage: StageModule, layers: Iterable[str], mesh: DeviceMesh, *, reshard_after_forward: bool = False
) -> None:
    """Give every data-parallel rank its part of a stage, in place; gradients are then summed over the ranks.

    Args:
        stage: what ``PipelineStage`` is going to run: the root, so that schedules find it.
        layers: FQNs of the whole model's layers, which are gathered one by one.
        mesh: of the ranks that hold this stage: dimensions ``replicate`` and ``shard``, or one of them.
        reshard_after_forward: whether gathered layers are let go after each forward, and gathered again for backward:
            less memory, more communication. Without sharding there is nothing to let go.
    """
    own = [layer for layer in map(stage.module.get_submodule, layers) if not isinstance(layer, PassThrough)]
    spread = spread_parameters(stage)
    # Sums of half precision are made in float32.
    halves = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in stage.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if halves else None)
    sharded = "shard" in (mesh.mesh_dim_names or ())
    # Backward gathers and frees by layer; the schedule gathers a stage as a whole before its first forward.
    for part in [*own, stage]:
        if sharded:
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=policy,
                ignored_params=spread,
            )
        else:
            replicate(part, mesh=mesh, mp_policy=policy, ignored_params=spread)
    force_sum_reduction(stage)
