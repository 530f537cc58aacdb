"""How the ranks of a job are laid out: by stages, by their part of the data, of a sequence, of a tensor, of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pipe.engine.plans.errors import SetupError

__all__ = ["Dimensions", "StageMeshes"]

_ORDER = ("pipeline", "replicate", "shard", "context", "tensor")
_ARGUMENTS = {name: f"data_parallel_{name}_size" for name in ("replicate", "shard")} | {
    name: f"{name}_parallel_size" for name in ("context", "tensor", "expert")
}


@dataclass(frozen=True)
class Dimensions:
    """How many ranks there are in each dimension. All but ``expert`` make the world together.

    Attributes:
        pipeline: ranks that hold different stages; the slowest to change, so that those of one stage are neighbours.
        replicate: replicas of each stage, sharded or not, for different data.
        shard: ranks that share a stage's parameters (FSDP2), for different data.
        context: ranks that share the sequences of the same data.
        tensor: ranks that share the layers' matrices, for the same data; the fastest to change.
        expert: ranks among those of ``shard`` times ``context`` that share the experts.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def fit(self, world_size: int, pipeline: int | None) -> Dimensions:
        """The same with a pipeline of the given size, or of all ranks that the others leave.

        Raises:
            SetupError: sizes that do not make the world, or experts that do not divide what they are among.
        """
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        others = math.prod(sizes[name] for name in _ORDER[1:])
        size = pipeline if pipeline is not None else world_size // max(others, 1)
        if min(size, *sizes.values()) < 1 or size * others != world_size:
            given = {"pipeline_parallel_size": pipeline, **{_ARGUMENTS[name]: sizes[name] for name in _ORDER[1:]}}
            raise SetupError(
                f"{', '.join(f'{name}={value}' for name, value in given.items())} do not make the {world_size} ranks"
                " that the trainer has: devices times nodes must be their product"
            )
        among = self.shard * self.context
        if among % self.expert:
            raise SetupError(
                f"expert_parallel_size={self.expert} does not divide the {among} ranks that share a stage's data"
                f" (data_parallel_shard_size={self.shard} times context_parallel_size={self.context}); needed is a"
                " divisor of that: experts are spread over these ranks"
            )
        return replace(self, pipeline=size)


class StageMeshes:
    """Device meshes over all ranks, by what they are for; making them is collective.

    Args:
        dimensions: that make the world.
        device_type: of the ranks' devices.

    Attributes:
        dimensions: as given.
        root: dimensions ``pipeline``, ``replicate``, ``shard`` and ``tensor``. Ranks that share sequences share
            parameters, where these are sharded, and are replicas otherwise.
        data: of the root, the ranks that hold the same parameters, or share them: ``replicate`` and ``shard``, or one
            of them; None for one rank alone.
        context: of one dimension, or None.
        tensor: likewise, of the root.
        expert: likewise.
        expert_data: of the ranks that hold the same experts: ``replicate`` and ``shard``, or one of them, or None.
        same_batch: the ranks that train the same batches, for each part of the data.
    """

    def __init__(self, dimensions: Dimensions, device_type: str) -> None:
        self.dimensions = dimensions
        pipeline, replicate, shard, context, tensor, expert = (
            getattr(dimensions, name) for name in (*_ORDER, "expert")
        )
        copies, sharing = (replicate, shard * context) if shard > 1 else (replicate * context, 1)

        def mesh(**sizes: int) -> DeviceMesh:
            return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        self.root = mesh(pipeline=pipeline, replicate=copies, shard=sharing, tensor=tensor)
        self.data = _used(self.root, "replicate", "shard")
        self.tensor = _used(self.root, "tensor")
        self.context = self.expert = self.expert_data = None
        if context > 1:
            self.context = mesh(before=pipeline * replicate * shard, context=context, after=tensor)["context"]
        if expert > 1:
            # Where the rest is replicated, experts are: FSDP's two kinds do not go together.
            left = shard * context // expert
            copies, sharing = (replicate, left) if shard > 1 else (replicate * left, 1)
            experts = mesh(pipeline=pipeline, replicate=copies, shard=sharing, expert=expert, tensor=tensor)
            self.expert, self.expert_data = experts["expert"], _used(experts, "replicate", "shard")
        ranks: Tensor = self.root.mesh.reshape(pipeline, replicate * shard, context * tensor)
        self.same_batch: list[list[int]] = ranks.transpose(0, 1).flatten(1).tolist()


def _used(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Of these dimensions, those with more than one rank."""
    used = tuple(name for name in names if mesh[name].size() > 1)
    return mesh[used] if used else None
