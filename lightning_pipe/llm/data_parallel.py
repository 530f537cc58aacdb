"""Data parallelism of single stages: FSDP2 where parameters are sharded, its ``replicate`` where they are whole.

PyTorch's schedules know both: gradients are reduced once a step, after the last micro-batch. They do not know
DistributedDataParallel, under which they give wrong gradients.
"""

from __future__ import annotations

from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_pipe.llm.gradients import force_sum_reduction
from lightning_pipe.llm.split import ModuleConfig
from lightning_pipe.llm.stage_module import PassThrough, StageModule

__all__ = ["parallelise_stage"]


def parallelise_stage(
    stage: StageModule, config: ModuleConfig, mesh: DeviceMesh, *, reshard_after_forward: bool = False
) -> None:
    """Give every data-parallel rank its part of a stage, in place; gradients are then summed over the ranks.

    Args:
        stage: what ``PipelineStage`` is going to run: the root, so that schedules find it.
        config: of the whole model; layers are gathered one by one.
        mesh: of the ranks that hold this stage: dimensions ``replicate`` and ``shard``, or one of them.
        reshard_after_forward: whether gathered layers are let go after each forward, and gathered again for backward:
            less memory, more communication. Without sharding there is nothing to let go.
    """
    layers = [layer for layer in map(stage.module.get_submodule, config.layers) if not isinstance(layer, PassThrough)]
    sharded = "shard" in (mesh.mesh_dim_names or ())
    # Backward gathers and frees by layer; the schedule gathers a stage as a whole before its first forward.
    for part in [*layers, stage]:
        if sharded:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard_after_forward)
        else:
            replicate(part, mesh=mesh)
    force_sum_reduction(stage)
