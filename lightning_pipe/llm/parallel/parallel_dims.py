"""Layout of a job's ranks over pipeline, data, context, tensor and expert parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number
from lightning_pipe.engine.ranks.process_groups import inherit_default_group_timeout
from lightning_pipe.llm.parallel.context_parallel_group import ContextMethod

_WORLD = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_OPEN = _WORLD[:3]  # sizes that can follow from the number of ranks


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks in each parallel dimension. The product of all but ``ep`` is the number of ranks of the job.

    One of ``pp``, ``dp_replicate`` and ``dp_shard`` can be -1: all ranks that the other dimensions leave. For elastic
    jobs, give ``pp`` a size and let one of the others be -1.

    Ranks are laid out stages first, tensors last: with ``pp=2`` and ``dp_shard=2``, ranks 0 and 1 hold stage 0.

    Args:
        pp: pipeline parallelism: number of ranks that hold different stages (default -1).
        dp_replicate: data parallelism: number of replicas of each stage, sharded or not (default 1).
        dp_shard: data parallelism: number of ranks over which the parameters, gradients and optimizer state of each
            stage are sharded with FSDP2 (default 1).
        cp: context parallelism: number of ranks that share each sequence (default 1). Lengths are rounded up to a
            multiple of it. Attention must call ``scaled_dot_product_attention``.
        tp: tensor parallelism: number of ranks that share the matrices of each layer (default 1). The plan comes from
            the model's Hugging Face config or its ``get_tensor_parallel_plan()``.
        ep: expert parallelism: number of ranks that share the experts of :class:`~lightning_pipe.llm.model.moe.MoE`
            layers, or of Hugging Face's (default 1). It must divide ``dp_shard`` times ``cp``.
        cp_method: method of context parallelism (default ``ulysses``). ``ulysses`` exchanges heads for tokens and needs
            a multiple of ``cp`` heads. ``ring`` passes keys and values around any number of ranks; lengths are rounded
            up to a multiple of twice ``cp``. With masks of padding or documents the ring gathers keys and values.
        sequence_parallel: run norms, dropout and sums between the matrices of tensor parallelism on a part of the
            tokens on each of the ``tp`` ranks (default False). Lengths are rounded up to a multiple of ``tp``.
        reshard_after_forward: release gathered parameters after the forward of each micro-batch (default False: they
            stay until the end of the step). It trades less memory for more communication. Zero-bubble schedules refuse
            it.

    Raises:
        SetupError: a size below 1, more than one size of -1, or an unknown method.
    """

    pp: int = -1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    cp_method: ContextMethod = "ulysses"
    reshard_after_forward: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in (*_WORLD, "ep"):
            if name not in _OPEN or getattr(self, name) != -1:
                check_whole_number(f"parallel.{name}", getattr(self, name), 1)
        if len(self._list_unset_dimensions()) > 1:
            raise SetupError(
                f"parallel.{' and parallel.'.join(self._list_unset_dimensions())} are -1, but only one size"
                " can follow from the number of ranks. Set the others; parallel.pp is -1 by default"
            )
        check_choice("parallel.cp_method", self.cp_method, get_args(ContextMethod))
        for name in ("reshard_after_forward", "sequence_parallel"):
            check_choice(f"parallel.{name}", getattr(self, name), (True, False))
        if self.sequence_parallel and self.tp == 1:
            raise SetupError(
                "parallel.sequence_parallel is true, but parallel.tp is 1; expected 2 or more ranks, which share the"
                " tokens. Set parallel.tp, or remove sequence_parallel"
            )

    def _list_unset_dimensions(self) -> list[str]:
        return [name for name in _OPEN if getattr(self, name) == -1]

    @property
    def length_multiple(self) -> int:
        """Number of tokens that sequence lengths must be a multiple of, for ranks to share them."""
        chunks = 2 * self.cp if self.cp_method == "ring" and self.cp > 1 else self.cp
        return chunks * self.tp if self.sequence_parallel else chunks

    def resolve(self, world_size: int) -> ParallelDims:
        """The same dimensions with the size that is -1 filled in.

        Args:
            world_size: number of ranks of the run.

        Raises:
            SetupError: the product of the sizes is not the world size, or ``ep`` does not divide ``dp_shard * cp``.
        """
        known_size = math.prod(getattr(self, name) for name in _WORLD if name not in self._list_unset_dimensions())
        fitted = replace(self, **dict.fromkeys(self._list_unset_dimensions(), max(world_size // known_size, 1)))
        if math.prod(getattr(fitted, name) for name in _WORLD) != world_size:
            sizes = ", ".join(f"parallel.{name}={getattr(self, name)}" for name in _WORLD)
            raise SetupError(
                f"{sizes} do not make the {world_size} ranks that the trainer has. Set devices times nodes to the"
                " product of these sizes"
            )
        data_ranks = fitted.dp_shard * fitted.cp
        if data_ranks % self.ep:
            raise SetupError(
                f"parallel.ep={self.ep} does not divide the {data_ranks} ranks that share a stage's data"
                f" (parallel.dp_shard={fitted.dp_shard} times parallel.cp={fitted.cp}). Set parallel.ep to a divisor"
                " of that number, since experts are sharded over these ranks"
            )
        return fitted


class ParallelMeshes:
    """Device meshes over all ranks, one for each purpose; constructing them is collective.

    Attributes:
        dimensions: dimensions fitted to the number of ranks.
        root: mesh of the dimensions ``pipeline``, ``replicate``, ``shard`` and ``tensor``. The ranks that share a
            sequence belong to ``shard`` if parameters are sharded, and to ``replicate`` otherwise.
        data: part of the root with the ranks that replicate or shard the same parameters: ``replicate`` and ``shard``,
            or one of them; None for a single rank.
        context: one-dimensional mesh of the ranks that share sequences, or None.
        tensor: one-dimensional part of the root with the ranks that share matrices, or None.
        expert: one-dimensional mesh of the ranks that share experts, or None.
        expert_data: mesh of the ranks that hold the same experts: ``replicate`` and ``shard``, or one of them, or None.
        same_batch: lists of the ranks that train on the same batches, one for each part of the data.
    """

    def __init__(self, dimensions: ParallelDims, device_type: str) -> None:
        self.dimensions = dimensions
        pipeline, replicate, shard, context, tensor, expert = (getattr(dimensions, name) for name in (*_WORLD, "ep"))
        copies, sharing = (replicate, shard * context) if shard > 1 else (replicate * context, 1)

        def mesh(**sizes: int) -> DeviceMesh:
            with inherit_default_group_timeout():
                return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        self.root = mesh(pipeline=pipeline, replicate=copies, shard=sharing, tensor=tensor)
        self.data = _get_nontrivial_submesh(self.root, "replicate", "shard")
        self.tensor = _get_nontrivial_submesh(self.root, "tensor")
        self.context = self.expert = self.expert_data = None
        if context > 1:
            self.context = mesh(before=pipeline * replicate * shard, context=context, after=tensor)["context"]
        if expert > 1:
            # Experts are replicated if the rest is: `fully_shard` and `replicate` cannot be combined.
            expert_copies = shard * context // expert
            copies, sharing = (replicate, expert_copies) if shard > 1 else (replicate * expert_copies, 1)
            experts = mesh(pipeline=pipeline, replicate=copies, shard=sharing, expert=expert, tensor=tensor)
            self.expert, self.expert_data = experts["expert"], _get_nontrivial_submesh(experts, "replicate", "shard")
        ranks: Tensor = self.root.mesh.reshape(pipeline, replicate * shard, context * tensor)
        self.same_batch: list[list[int]] = ranks.transpose(0, 1).flatten(1).tolist()


def _get_nontrivial_submesh(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Submesh of the named dimensions that have more than one rank; None if all have one."""
    used = tuple(name for name in names if mesh[name].size() > 1)
    return mesh[used] if used else None
