"""Options of a recommender's training, in groups. A configuration gives each group as a mapping of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice, parse_option_group
from lightning_pipe.recsys.modules.ids_on_wire import IdsOnWire
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import BatchBalancer


@dataclass(frozen=True)
class ShardingOptions:
    """Sharding of the tables.

    Args:
        plan: a TorchRec ``ShardingPlan`` to use instead of the planner's (default None).
        constraints: constraints of TorchRec's planner: table name to ``sharding_types``, ``compute_kernels`` and other
            fields of ``ParameterConstraints`` (default None).
        topology: topology of the planner: ``hbm_cap``, ``ddr_cap``, ``local_world_size`` and other arguments of
            ``Topology`` (default None).
        fused_params: arguments of FBGEMM's kernels for tables in unified memory with a cache of rows on the GPU
            (``fused_uvm_caching``): ``cache_load_factor``, ``cache_precision``, ``cache_reserved_memory``,
            ``cache_algorithm``, and ``prefetch_pipeline`` (default True; False with ``cache_algorithm: LFU``: rows are
            then loaded by the lookup, not ahead). Those of a single table go under its name (default None).
        replicas: number of groups of neighboring ranks that each shard all tables, or 2D parallelism (default 1).
            An all-to-all then takes place inside a group. Tables and the states of their optimizers are averaged over
            groups. Refused with dynamic tables, with gradient clipping, and with tables sharded ``table_row_wise``,
            ``grid_shard`` or ``data_parallel``.
        sync_every: number of table steps between two averages of the replicas (default 1). Above 1, groups differ in
            between. They are also averaged before validation, test, prediction and checkpoints, and when training ends;
            plans that look up batches ahead are refused.
    """

    plan: Any = None
    constraints: Mapping[str, Any] | None = None
    topology: Mapping[str, Any] | None = None
    fused_params: Mapping[str, Any] | None = None
    replicas: int | None = None
    sync_every: int | None = None


@dataclass(frozen=True)
class RewriteOptions:
    """Rewriting of a model so that its embeddings can be looked up ahead.

    Args:
        method: method that finds the inputs of sharded modules in a batch. ``"record"`` trains the first batch alone
            and records it, ``"direct"`` looks for keys, ``"fx"`` traces the step; ``"auto"`` (default) records, and
            traces the step if it computes an input.
        evaluation: also rewrite the model for validation, test and prediction, which are then pipelined (default True).
            Set False for steps whose calls of the sharded modules vary from batch to batch.
    """

    method: Literal["auto", "record", "direct", "fx"] = "auto"
    evaluation: bool = True


@dataclass(frozen=True)
class WireOptions:
    """Format of the data that ranks exchange.

    Args:
        quantized_comms: precision of embeddings and of their gradients: ``forward`` and ``backward``, each ``fp32``,
            ``fp16``, ``bf16`` or ``int8``, and options; see
            :class:`~lightning_pipe.recsys.modules.quantized_comms.QuantizedComms` (default None, which is fp32).
        ids: integer type of ids: ``"int64"``; ``"auto"`` (default), int32 for each module whose tables have few enough
            rows; ``"int32"``, which refuses a module with a larger table.
        dedup: names of the ``EmbeddingCollection`` modules that send each id of a table once per rank and batch, or
            True for all of them (default False). Gradients of an id are then added up on the rank that looks it
            up, so sums round in another order than without. Other modules are refused.

    Raises:
        SetupError: an unknown precision or integer type.
    """

    quantized_comms: QuantizedComms | Mapping[str, Any] | None = None
    ids: IdsOnWire = "auto"
    dedup: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        check_choice("wire.ids", self.ids, get_args(IdsOnWire))
        parse_option_group(QuantizedComms, "quantized_comms", self.quantized_comms)

    @property
    def resolved_quantized_comms(self) -> QuantizedComms:
        """The precision of embeddings and gradients."""
        return parse_option_group(QuantizedComms, "quantized_comms", self.quantized_comms)


@dataclass(frozen=True)
class MemoryOptions:
    """Memory of the batches in flight.

    Args:
        free_features_early: release a batch's ids and weights once the input dist has sent them, if only pipelined
            sharded modules use them (default False). Steps, hooks and callbacks may still read keys, lengths and batch
            sizes; reading ids is an error.
    """

    free_features_early: bool = False


@dataclass(frozen=True)
class CheckOptions:
    """Checks of batches and losses.

    Args:
        validate_ids: check every id against its table, and every length, before the lookup (default False). Costs a
            pass over them. The number of lengths and their sums are always checked.
        detect_nan: check the loss on all ranks (default False). Costs a small all-reduce in each step and, on a GPU, a
            synchronization.
    """

    validate_ids: bool = False
    detect_nan: bool = False


@dataclass(frozen=True)
class SessionOptions:
    """The groups that a :class:`~lightning_pipe.recsys.tasks.session.RecsysSession` needs.

    Each group may also be given as a mapping of its fields, or as None for its defaults.

    Raises:
        SetupError: a group is none of these, or has an unknown field or an invalid value.
    """

    rewrite: RewriteOptions = RewriteOptions()
    wire: WireOptions = WireOptions()
    memory: MemoryOptions = MemoryOptions()
    checks: CheckOptions = CheckOptions()

    def __post_init__(self) -> None:
        for field in fields(self):
            group = parse_option_group(type(field.default), field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, group)


def make_balancer(config: bool | Mapping[str, Any] | BatchBalancer | None) -> BatchBalancer | None:
    """Make the balancer that the argument ``balancer`` of a strategy or pipeline describes."""
    if config is None or config is False:
        return None
    from lightning_pipe.recsys.balancing.balancer import BatchBalancer  # lazy: few models balance samples

    if isinstance(config, BatchBalancer):
        return config
    try:
        return BatchBalancer(**({} if config is True else config))
    except TypeError as error:
        raise SetupError(
            f"balancer is {config!r}; expected true, a BatchBalancer, or a mapping of its arguments: {error}"
        ) from error
