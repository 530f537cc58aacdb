"""Embedding modules whose tables have no size: any int64 id has a row, made when it is first seen.

Tested in ``tests/recsys/dynamic/tables/test_sharded_tables.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, get_args

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_whole_number

__all__ = [
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "DynamicTable",
    "Existing",
    "Storage",
    "is_dynamic_type",
]


Existing = Literal["refuse", "keep", "forget"]
_DATA_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)


@dataclass(frozen=True, kw_only=True)
class DynamicTable:
    """A table of embeddings for any int64 id.

    Attributes:
        name: unique in its module.
        embedding_dim: numbers of a row, a multiple of 4.
        feature_names: the features that are looked up in it.
        cache_rows: rows in memory, over all ranks. It must hold those of every batch in flight; a rank has its part.
        pooling: ``sum`` or ``mean`` over a bag; without effect in a ``DynamicEmbeddingCollection``.
        initial: values of a row at first sight: a mapping such as ``{"uniform": [-0.01, 0.01]}``, ``{"normal": [0,
            0.02]}`` or ``{"constant": 0}``, or a function of ids (int64 [n]) that returns rows ([n, embedding_dim]).
            Without it, uniform between plus and minus one over the root of ``embedding_dim``.
        admission_threshold: in how many batches an id must occur before its row is trained and kept; until then it is
            looked up as its initial value.
        ttl: after how many batches without it a row starts anew; None for never.
        eviction: which rows leave the cache first: those unused for longest (``lru``), those seen least (``lfu``), or
            those to which a function of ids, counts and the batches they were last seen in gives the lowest scores.
            Without effect on what is trained: rows come back from the store as they were.
        data_type: of the weights: FP32, FP16, or, on a GPU, BF16.
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str]
    cache_rows: int
    pooling: Literal["sum", "mean"] = "sum"
    initial: Mapping[str, Any] | Callable[[torch.Tensor], torch.Tensor] | None = None
    admission_threshold: int = 1
    ttl: int | None = None
    eviction: Literal["lru", "lfu"] | Callable[..., Any] = "lru"
    data_type: DataType = DataType.FP32

    def __post_init__(self) -> None:
        where = f"dynamic table {self.name!r}"
        if not isinstance(self.name, str) or not self.name or "." in self.name or hasattr(nn.ModuleDict, self.name):
            raise SetupError(
                f"{where} cannot have that name: it becomes one of a module's children; needed is another one, no dots,"
                f" such as 'table_{str(self.name).replace('.', '_')}'"
            )
        for field in ("embedding_dim", "cache_rows", "admission_threshold"):
            check_whole_number(f"{field} of {where}", getattr(self, field), 1)
        if self.embedding_dim % 4:
            raise SetupError(
                f"{where} has embedding_dim={self.embedding_dim}; needed is a multiple of 4, as FBGEMM's kernels take"
                f" rows: {-(-self.embedding_dim // 4) * 4}, for example"
            )
        if self.data_type not in _DATA_TYPES:
            raise SetupError(
                f"{where} has data_type={self.data_type!r}; needed is one that can be trained: DataType."
                f"{', DataType.'.join(one.name for one in _DATA_TYPES)}"
            )
        check_whole_number(f"ttl of {where}", self.ttl, 1, optional=True)
        if isinstance(self.feature_names, str) or not self.feature_names:
            raise SetupError(f"{where} has feature_names={self.feature_names!r}; needed is a list of at least one name")
        if self.pooling not in ("sum", "mean"):
            raise SetupError(f"{where} has pooling={self.pooling!r}; needed is 'sum' or 'mean'")
        if not callable(self.eviction) and self.eviction not in ("lru", "lfu"):
            raise SetupError(f"{where} has eviction={self.eviction!r}; needed is 'lru', 'lfu' or a function")


@dataclass(frozen=True)
class Storage:
    """Where the rows of a dynamic module live.

    Attributes:
        path: a folder that every rank can write to; each has one of its own inside.
        seed: of the initial values; None for the trainer's (``torch.initial_seed()`` when tables are sharded).
        commit_every: also commit after so many trained batches, beside every checkpoint; None for checkpoints only.
        check_nan: refuse to keep rows with a NaN; costs a look at every row that is written.
        existing: what becomes of rows that an earlier run has left there, unless a checkpoint is loaded: ``refuse`` to
            train or look up, ``keep`` them, or ``forget`` them.
    """

    path: Path
    seed: int | None = None
    commit_every: int | None = None
    check_nan: bool = False
    existing: Existing = "refuse"


class _Dynamic:
    """What the two modules share."""

    dynamic_tables: dict[str, DynamicTable]
    storage: Storage

    def _keep(
        self,
        tables: Sequence[DynamicTable | Mapping[str, Any]],
        store: str | Path,
        seed: int | None,
        commit_every: int | None,
        check_nan: bool,
        existing: Existing,
    ) -> list[DynamicTable]:
        found = [table if isinstance(table, DynamicTable) else DynamicTable(**table) for table in tables]
        if not found:
            raise SetupError(f"{type(self).__name__} has no table; give it at least one DynamicTable")
        check_whole_number(f"commit_every of {type(self).__name__}", commit_every, 1, optional=True)
        names = [table.name for table in found]
        if len(set(names)) < len(names):
            raise SetupError(f"{type(self).__name__} has tables {names}; needed is one table of each name")
        self.dynamic_tables = {table.name: table for table in found}
        if existing not in get_args(Existing):
            raise SetupError(
                f"{type(self).__name__} has existing={existing!r}; needed is one of {', '.join(get_args(Existing))}"
            )
        self.storage = Storage(Path(store), seed, commit_every, check_nan, existing)
        return found

    def _apply(self, *_: Any, **__: Any) -> Self:
        """Nothing is moved or converted: the parameters say shapes, and have no values to take along."""
        return self

    def forward(self, *arguments: Any, **named: Any) -> NoReturn:
        """There is nothing to look up in until ranks share the ids out.

        Raises:
            SetupError: always.
        """
        raise SetupError(
            f"this {type(self).__name__} is not sharded, so its rows have no place yet; train the module under a recsys"
            " strategy, or shard it with lightning_pipe.recsys.shard_model (one process is enough)"
        )


class DynamicEmbeddingBagCollection(_Dynamic, EmbeddingBagCollection):
    """TorchRec's ``EmbeddingBagCollection`` over tables without a size.

    It is called like that one, with a ``KeyedJaggedTensor`` of any int64 ids, and returns a ``KeyedTensor`` of batch x
    the sum of dimensions. Rows live in a bounded cache over a store on disk. Ids are shared out over the ranks.

    Args:
        tables: a :class:`DynamicTable` each, or a mapping of its attributes.
        store: a folder that every rank can write to, of this module alone.
        is_weighted: whether ids have weights.
        seed: of the initial values; None for ``torch.initial_seed()`` of the first rank.
        commit_every: commit the store after so many trained batches, beside every checkpoint.
        check_nan: refuse to keep rows with a NaN.
        existing: what becomes of rows that an earlier run has left in the store, where no checkpoint is loaded:
            ``refuse`` to go on, ``keep`` them, or ``forget`` them.

    Raises:
        SetupError: a table that cannot be, or two of one name.
    """

    def __init__(
        self,
        tables: Sequence[DynamicTable | Mapping[str, Any]],
        store: str | Path,
        *,
        is_weighted: bool = False,
        seed: int | None = None,
        commit_every: int | None = None,
        check_nan: bool = False,
        existing: Existing = "refuse",
    ) -> None:
        found = self._keep(tables, store, seed, commit_every, check_nan, existing)
        super().__init__(
            tables=[
                EmbeddingBagConfig(
                    name=table.name,
                    embedding_dim=table.embedding_dim,
                    num_embeddings=table.cache_rows,
                    feature_names=list(table.feature_names),
                    pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
                    data_type=table.data_type,
                )
                for table in found
            ],
            is_weighted=is_weighted,
            device=torch.device("meta"),
        )
        self.register_load_state_dict_pre_hook(_put_own_in)


class DynamicEmbeddingCollection(_Dynamic, EmbeddingCollection):
    """TorchRec's ``EmbeddingCollection`` (sequences, not pooled) over tables without a size.

    It returns a dictionary of a ``JaggedTensor`` for each feature, total ids x ``embedding_dim``.

    Args:
        tables: a :class:`DynamicTable` each, or a mapping of its attributes; all of one ``embedding_dim``.
        store: as of :class:`DynamicEmbeddingBagCollection`, and so are the others.
        seed: see there.
        commit_every: see there.
        check_nan: see there.
        existing: see there.

    Raises:
        SetupError: a table that cannot be, two of one name, or different dimensions.
    """

    def __init__(
        self,
        tables: Sequence[DynamicTable | Mapping[str, Any]],
        store: str | Path,
        *,
        seed: int | None = None,
        commit_every: int | None = None,
        check_nan: bool = False,
        existing: Existing = "refuse",
    ) -> None:
        found = self._keep(tables, store, seed, commit_every, check_nan, existing)
        dims = {table.name: table.embedding_dim for table in found}
        if len(set(dims.values())) > 1:
            raise SetupError(f"tables of one DynamicEmbeddingCollection have dimensions {dims}; needed is one for all")
        super().__init__(
            tables=[
                EmbeddingConfig(
                    name=table.name,
                    embedding_dim=table.embedding_dim,
                    num_embeddings=table.cache_rows,
                    feature_names=list(table.feature_names),
                    data_type=table.data_type,
                )
                for table in found
            ],
            device=torch.device("meta"),
        )
        self.register_load_state_dict_pre_hook(_put_own_in)


def _put_own_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: rows are in the module's store, and its parameters want nothing of it."""
    for name, parameter in module.named_parameters():
        state.setdefault(prefix + name, parameter)


def is_dynamic_type(module_type: type[nn.Module]) -> bool:
    """Whether a module's class is one of these."""
    return issubclass(module_type, _Dynamic)
