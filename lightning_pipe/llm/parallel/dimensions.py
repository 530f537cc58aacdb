"""How the ranks of a job are laid out: by stages, by their part of the data, of a sequence, of a tensor, of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number
from lightning_pipe.llm.parallel.context_ranks import ContextMethod

__all__ = ["ParallelDims", "StageMeshes"]

_WORLD = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks in each parallel dimension. The product of all but ``ep`` is the number of ranks of the job.

    Ranks are laid out stages first, tensors last: with ``pp=2`` and ``dp_shard=2``, ranks 0 and 1 hold stage 0.

    Args:
        pp: pipeline parallelism: ranks that hold different stages; -1 (default) takes all that the others leave.
        dp_replicate: data parallelism: replicas of each stage, sharded or not.
        dp_shard: data parallelism: ranks over which the parameters, gradients and optimizer state of each stage are
            sharded (FSDP2).
        cp: context parallelism: ranks that share each sequence. Lengths are rounded up to a multiple of it. Attention
            must call ``scaled_dot_product_attention``.
        tp: tensor parallelism: ranks that share the matrices of each layer. The model says how, by its Hugging Face
            config or by ``get_tensor_parallel_plan()``.
        ep: expert parallelism: ranks, among those of ``dp_shard`` times ``cp``, that share the experts of
            :class:`~lightning_pipe.llm.model.moe.MoE` layers.
        cp_method: attention exchanges heads for tokens (``ulysses``, which needs a multiple of ``cp`` heads), or sends
            keys and values round (``ring``, for any number of ranks; lengths are rounded up to a multiple of twice
            ``cp``). With masks of padding or documents the ring gathers keys and values.
        reshard_after_forward: release gathered parameters after the forward of each micro-batch: less memory for more
            communication. By default they stay until the end of the step. Zero-bubble schedules refuse it.

    Raises:
        SetupError: a size below 1, or an unknown method.
    """

    pp: int = -1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    cp_method: ContextMethod = "ulysses"
    reshard_after_forward: bool = False

    def __post_init__(self) -> None:
        for name in (*_WORLD, "ep"):
            if name != "pp" or self.pp != -1:
                check_whole_number(f"parallel.{name}", getattr(self, name), 1)
        check_choice("parallel.cp_method", self.cp_method, get_args(ContextMethod))
        check_choice("parallel.reshard_after_forward", self.reshard_after_forward, (True, False))

    @property
    def length_multiple(self) -> int:
        """Number that sequence lengths must be a multiple of, so that ``cp`` ranks can share them, in tokens."""
        return 2 * self.cp if self.cp_method == "ring" and self.cp > 1 else self.cp

    def fit(self, world_size: int) -> ParallelDims:
        """The same dimensions with the size of the pipeline filled in.

        Raises:
            SetupError: sizes whose product is not the world size, or experts that do not divide the ranks that share
                them.
        """
        others = math.prod(getattr(self, name) for name in _WORLD[1:])
        fitted = self if self.pp != -1 else replace(self, pp=max(world_size // others, 1))
        if fitted.pp * others != world_size:
            sizes = ", ".join(f"parallel.{name}={getattr(self, name)}" for name in _WORLD)
            raise SetupError(
                f"{sizes} do not make the {world_size} ranks that the trainer has: devices times nodes must be their"
                " product"
            )
        among = self.dp_shard * self.cp
        if among % self.ep:
            raise SetupError(
                f"parallel.ep={self.ep} does not divide the {among} ranks that share a stage's data"
                f" (parallel.dp_shard={self.dp_shard} times parallel.cp={self.cp}); expected a divisor of that: experts"
                " are spread over these ranks"
            )
        return fitted


class StageMeshes:
    """Device meshes over all ranks, by what they are for; making them is collective.

    Args:
        dimensions: fitted to the number of ranks.
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

    def __init__(self, dimensions: ParallelDims, device_type: str) -> None:
        self.dimensions = dimensions
        pipeline, replicate, shard, context, tensor, expert = (getattr(dimensions, name) for name in (*_WORLD, "ep"))
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
