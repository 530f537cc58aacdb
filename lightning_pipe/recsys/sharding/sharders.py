"""TorchRec's sharders with every sharding type that works in this project.

TorchRec's stock sharder hides the row-wise types of pooled tables on CPU, though they run there. Sequences cannot be
data-parallel, because FBGEMM's dense CPU kernel pools them. An optimizer that moves rows without a gradient would train
a replicated table differently from a sharded table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.modules.dedup import DeduplicatedEmbeddingCollection
from lightning_pipe.recsys.modules.dynamic_modules import DynamicEmbeddingBagCollection, DynamicEmbeddingCollection
from lightning_pipe.recsys.modules.managed_collision import ManagedCollisionBags, ManagedCollisionSequences
from lightning_pipe.recsys.modules.output_order import (
    OrderedEmbeddingBagCollection,
    OrderedEmbeddingCollection,
    OrderedSharder,
)
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms
from lightning_pipe.recsys.modules.tables import Table

_POOLED_TYPES = [sharding_type.value for sharding_type in ShardingType]
_SEQUENCE_TYPES = [
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.ROW_WISE.value,
]
SHARDING_TYPES: dict[type[nn.Module], list[str]] = {
    EmbeddingBagCollection: _POOLED_TYPES,
    FeatureProcessedEmbeddingBagCollection: _POOLED_TYPES,
    EmbeddingCollection: _SEQUENCE_TYPES,
    ManagedCollisionEmbeddingBagCollection: [ShardingType.ROW_WISE.value],
    ManagedCollisionEmbeddingCollection: [ShardingType.ROW_WISE.value],
    DynamicEmbeddingBagCollection: [ShardingType.ROW_WISE.value],
    DynamicEmbeddingCollection: [ShardingType.ROW_WISE.value],
}
COLUMN_TYPES = {
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
}
# Sharding types that the planner uses only if the user requests them: grid sharding needs several ranks on each of
# several nodes, and rows of a feature-processed table are split after position weights are known.
ON_REQUEST_TYPES: dict[type[nn.Module], set[str]] = {
    EmbeddingBagCollection: {ShardingType.GRID_SHARD.value},
    FeatureProcessedEmbeddingBagCollection: {
        ShardingType.GRID_SHARD.value,
        ShardingType.ROW_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
    },
}


class _BagSharder(OrderedSharder, EmbeddingBagCollectionSharder):
    kind = OrderedEmbeddingBagCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return self._comms.supported_sharding_types(SHARDING_TYPES[EmbeddingBagCollection], pooled=True)


class _SequenceSharder(OrderedSharder, EmbeddingCollectionSharder):
    kind = OrderedEmbeddingCollection

    def __init__(self, comms: QuantizedComms, dedup: Collection[str] = ()) -> None:
        super().__init__(comms)
        self._dedup = dedup

    def choose_sharded_class(self, module_fqn: str | None) -> Callable[..., Any]:
        return DeduplicatedEmbeddingCollection if module_fqn in self._dedup else self.kind

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return self._comms.supported_sharding_types(SHARDING_TYPES[EmbeddingCollection], pooled=False)


class _ProcessedSharder(FeatureProcessedEmbeddingBagCollectionSharder):
    def __init__(self, comms: QuantizedComms, bags: _BagSharder) -> None:
        super().__init__(bags, comms.registry())
        self._bags = bags

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return self._bags.sharding_types(compute_device_type)


class _ManagedCollisionSharderMixin:
    """What the sharders of managed-collision modules have in common."""

    kind: type[ManagedCollisionBags | ManagedCollisionSequences]

    def __init__(self, embeddings: _BagSharder | _SequenceSharder, comms: QuantizedComms) -> None:
        self._embeddings, self._maps = embeddings, ManagedCollisionCollectionSharder()
        super().__init__(self._embeddings, self._maps, qcomm_codecs_registry=comms.registry())  # type: ignore[call-arg]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels without a cache of rows, which would not see that rows are evicted."""
        kernels = self._embeddings.compute_kernels(sharding_type, compute_device_type)
        return [kernel for kernel in kernels if kernel != EmbeddingComputeKernel.FUSED_UVM_CACHING.value]

    def shard(
        self, module: Any, params: Any, env: ShardingEnv, device: Any = None, module_fqn: str | None = None
    ) -> Any:
        return self.kind(module, params, self._embeddings, self._maps, env, device)


class _ManagedBagSharder(_ManagedCollisionSharderMixin, ManagedCollisionEmbeddingBagCollectionSharder):
    kind = ManagedCollisionBags


class _ManagedSequenceSharder(_ManagedCollisionSharderMixin, ManagedCollisionEmbeddingCollectionSharder):
    kind = ManagedCollisionSequences


def default_sharders(
    comms: QuantizedComms | None = None, dedup: Collection[str] = (), *, dynamic: bool = True
) -> list[ModuleSharder[nn.Module]]:
    """Return sharders for the modules in ``tables.TABLE_MODULES``, of dynamic modules on request.

    *dedup* names the ``EmbeddingCollection`` modules that send each id once.
    """
    comms = QuantizedComms() if comms is None else comms
    bags, sequences = _BagSharder(comms), _SequenceSharder(comms, dedup)
    sharders = [
        bags,
        sequences,
        _ProcessedSharder(comms, bags),
        _ManagedBagSharder(bags, comms),
        _ManagedSequenceSharder(sequences, comms),
    ]
    if not dynamic:
        return sharders
    from lightning_pipe.recsys.dynamic.tables.sharded_tables import (  # lazy: few models have dynamic tables
        DynamicEmbeddingBagCollectionSharder,
        DynamicEmbeddingCollectionSharder,
    )

    return [*sharders, DynamicEmbeddingBagCollectionSharder(comms), DynamicEmbeddingCollectionSharder(comms)]


def check_names(where: str, names: Sequence[str] | None, allowed: Sequence[str], why: str = "") -> None:
    """Check a list of names from a configuration."""
    wrong = [name for name in names or [] if name not in allowed]
    if wrong:
        raise SetupError(f"{where} names {', '.join(map(str, wrong))}{why}. Use some of {', '.join(allowed)} instead.")


def check_sharding_types(where: str, sharding_types: Sequence[str] | None, table: Table) -> None:
    """Check that a table can be sharded by each of the types and trained by its optimizer."""
    why = ""
    if table.module_type is EmbeddingCollection and "data_parallel" in (sharding_types or ()):
        why = f" for table {table.name} of an EmbeddingCollection (FBGEMM's dense CPU kernel pools sequences)"
    check_names(where, sharding_types, SHARDING_TYPES[table.module_type], why)
    if ShardingType.GRID_SHARD.value in (sharding_types or ()) and _is_mean_pooled(table):
        raise SetupError(
            f"{where} names grid_shard for table {table.name}, which is pooled by mean, but TorchRec sums the means of"
            " the parts, which is not the mean. Use another sharding type, or sum pooling."
        )
    assert table.optimizer is not None
    if ShardingType.DATA_PARALLEL.value in (sharding_types or ()) and table.optimizer.unfused_class is None:
        raise SetupError(
            f"{where} names data_parallel for table {table.name}, whose optimizer {table.optimizer.name} moves rows"
            " without a gradient when it steps a whole table. Use another sharding type."
        )


def _is_mean_pooled(table: Table) -> bool:
    return getattr(table.config, "pooling", None) == PoolingType.MEAN
