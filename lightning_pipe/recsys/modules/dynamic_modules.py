"""Embedding modules with tables of no fixed size: any int64 id has a row, created at its first occurrence."""

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
from lightning_pipe.engine.common.options import check_booleans, check_choice, check_whole_number

ExistingRows = Literal["refuse", "keep", "forget"]
IdMapDevice = Literal["host", "device"]


@dataclass(frozen=True, kw_only=True)
class DynamicTable:
    """A table of embeddings for any int64 id.

    Attributes:
        name: name of the table, unique in its module.
        embedding_dim: length of a row, a multiple of 4.
        feature_names: features that are looked up in the table.
        cache_rows: number of rows in memory, over all ranks; each rank has its share. Must hold the rows of all
            batches in flight.
        host_rows: number of rows in host memory between the cache and the store, over all ranks (default 0: none).
            Saves reads from disk if the cache is on a GPU and too small for the rows that are used often.
        pooling: pooling of a bag, ``sum`` or ``mean`` (default ``sum``); without effect in a
            ``DynamicEmbeddingCollection``.
        initial: initial values of a row: a mapping such as ``{"uniform": [-0.01, 0.01]}``, ``{"normal": [0, 0.02]}`` or
            ``{"constant": 0}``, or a function of ids (int64 [n]) that returns rows ([n, embedding_dim]). By default,
            uniform between -1 / sqrt(embedding_dim) and 1 / sqrt(embedding_dim).
        admission_threshold: number of batches that an id must occur in before its row is trained and kept (default 1);
            before that, lookups return its initial values.
        ttl: number of batches without an occurrence after which a row is reset to its initial values (default None,
            never).
        eviction: order in which rows leave the cache: least recently used (``lru``, default), least frequently used
            (``lfu``), or lowest score first, from a function of ids, counts and the batches of their last occurrences.
            Does not change the training: rows return from the store unchanged.
        data_type: type of the weights: FP32 (default) or FP16.
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str]
    cache_rows: int
    host_rows: int = 0
    pooling: Literal["sum", "mean"] = "sum"
    initial: Mapping[str, Any] | Callable[[torch.Tensor], torch.Tensor] | None = None
    admission_threshold: int = 1
    ttl: int | None = None
    eviction: Literal["lru", "lfu"] | Callable[..., Any] = "lru"
    data_type: DataType = DataType.FP32

    def __post_init__(self) -> None:
        where = f"dynamic table {self.name!r}"
        for field in ("embedding_dim", "cache_rows", "admission_threshold"):
            check_whole_number(f"{field} of {where}", getattr(self, field), 1)
        check_whole_number(f"host_rows of {where}", self.host_rows, 0)
        check_whole_number(f"ttl of {where}", self.ttl, 1, optional=True)
        if isinstance(self.feature_names, str) or not self.feature_names:
            raise SetupError(
                f"feature_names of {where} must be a list of at least one name, got {self.feature_names!r}. Name the"
                " features that are looked up in the table."
            )
        check_choice(f"pooling of {where}", self.pooling, ("sum", "mean"))
        if not callable(self.eviction):
            check_choice(f"eviction of {where}", self.eviction, ("lru", "lfu"))


@dataclass(frozen=True)
class RowStorageOptions:
    """Arguments of a dynamic module for the storage of its rows."""

    path: Path  # each rank has a subfolder in it
    seed: int | None = None
    commit_every: int | None = None
    check_nan: bool = False
    existing_rows: ExistingRows = "refuse"
    id_map_device: IdMapDevice = "host"
    direct_reads: bool = False


class _DynamicModuleMixin:
    """Common part of the two modules."""

    dynamic_tables: dict[str, DynamicTable]
    storage: RowStorageOptions

    def _set_tables_and_storage(
        self, tables: Sequence[DynamicTable | Mapping[str, Any]], storage: RowStorageOptions
    ) -> list[DynamicTable]:
        dynamic_tables = [table if isinstance(table, DynamicTable) else DynamicTable(**table) for table in tables]
        check_whole_number(f"commit_every of {type(self).__name__}", storage.commit_every, 1, optional=True)
        self.dynamic_tables = {table.name: table for table in dynamic_tables}
        check_choice(f"existing_rows of {type(self).__name__}", storage.existing_rows, get_args(ExistingRows))
        check_choice(f"id_map_device of {type(self).__name__}", storage.id_map_device, get_args(IdMapDevice))
        check_booleans(direct_reads=storage.direct_reads)
        self.storage = storage
        return dynamic_tables

    def _apply(self, *_: Any, **__: Any) -> Self:
        """Return the module unchanged: its parameters describe shapes and have no values to move or convert."""
        return self

    def forward(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refuse the lookup: the module has no rows before ids are distributed over ranks."""
        raise SetupError(
            f"this {type(self).__name__} must be sharded before it is called, since its rows have no place yet. Train"
            " it under a recsys strategy, or shard it with lightning_pipe.recsys.shard_model (one process is enough)."
        )


class DynamicEmbeddingBagCollection(_DynamicModuleMixin, EmbeddingBagCollection):
    """TorchRec's ``EmbeddingBagCollection`` with tables of no fixed size.

    It is called with a ``KeyedJaggedTensor`` of any int64 ids, and returns a ``KeyedTensor`` (batch size x sum of
    dimensions), as TorchRec's module does. Rows are in a bounded cache over a store on disk. Ids are distributed over
    the ranks.

    Args:
        tables: a list of :class:`DynamicTable`, or of mappings of its attributes.
        store: folder that every rank can write to, used by this module only.
        is_weighted: True if ids have weights (default False).
        seed: seed of the initial values (default None: ``torch.initial_seed()`` of rank 0).
        commit_every: number of trained batches between two commits of the store, in addition to those at checkpoints
            (default None, at checkpoints only).
        check_nan: True to refuse to store rows with a NaN (default False). Costs a check of every row that is written.
        existing_rows: treatment of rows that an earlier run has left in the store, if no checkpoint is loaded:
            ``refuse`` to continue (default), ``keep`` them, or ``forget`` them.
        id_map_device: ``host`` to look ids up in host memory (default), or ``device`` for the device of the tables.
        direct_reads: True to read rows from the disk without the operating system's page cache (default False), which
            then takes no memory and cannot hide how long reads take. The file system must support it.

    Raises:
        SetupError: a table is invalid.
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
        existing_rows: ExistingRows = "refuse",
        id_map_device: IdMapDevice = "host",
        direct_reads: bool = False,
    ) -> None:
        storage = RowStorageOptions(
            Path(store), seed, commit_every, check_nan, existing_rows, id_map_device, direct_reads
        )
        dynamic_tables = self._set_tables_and_storage(tables, storage)
        super().__init__(
            tables=[
                EmbeddingBagConfig(
                    **_get_table_config_kwargs(table),
                    pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
                )
                for table in dynamic_tables
            ],
            is_weighted=is_weighted,
            device=torch.device("meta"),
        )
        self.register_load_state_dict_pre_hook(_fill_missing_state_dict_entries)


class DynamicEmbeddingCollection(_DynamicModuleMixin, EmbeddingCollection):
    """TorchRec's ``EmbeddingCollection`` (sequences, not pooled) with tables of no fixed size.

    It returns a dictionary with a ``JaggedTensor`` per feature, of total ids x ``embedding_dim``.

    Args:
        tables: a list of :class:`DynamicTable`, or of mappings of its attributes; all with the same ``embedding_dim``.
        store: see :class:`DynamicEmbeddingBagCollection`, also for *seed*, *commit_every*, *check_nan*,
            *existing_rows*, *id_map_device* and *direct_reads*.

    Raises:
        SetupError: a table is invalid.
    """

    def __init__(
        self,
        tables: Sequence[DynamicTable | Mapping[str, Any]],
        store: str | Path,
        *,
        seed: int | None = None,
        commit_every: int | None = None,
        check_nan: bool = False,
        existing_rows: ExistingRows = "refuse",
        id_map_device: IdMapDevice = "host",
        direct_reads: bool = False,
    ) -> None:
        storage = RowStorageOptions(
            Path(store), seed, commit_every, check_nan, existing_rows, id_map_device, direct_reads
        )
        dynamic_tables = self._set_tables_and_storage(tables, storage)
        super().__init__(
            tables=[EmbeddingConfig(**_get_table_config_kwargs(table)) for table in dynamic_tables],
            device=torch.device("meta"),
        )
        self.register_load_state_dict_pre_hook(_fill_missing_state_dict_entries)


def _get_table_config_kwargs(table: DynamicTable) -> dict[str, Any]:
    """Arguments of TorchRec's description of a table, which has the rows of the cache."""
    return {
        "name": table.name,
        "embedding_dim": table.embedding_dim,
        "num_embeddings": table.cache_rows,
        "feature_names": list(table.feature_names),
        "data_type": table.data_type,
    }


def _fill_missing_state_dict_entries(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the module's parameters to a state dict before it is loaded: rows are loaded from the store instead."""
    for name, parameter in module.named_parameters():
        state.setdefault(prefix + name, parameter)


def is_dynamic_type(module_type: type[nn.Module]) -> bool:
    """Return True if a module's class is one of the dynamic modules."""
    return issubclass(module_type, _DynamicModuleMixin)


def is_dynamic(module: nn.Module) -> bool:
    """Return True for a dynamic module, sharded or not."""
    return hasattr(module, "dynamic_tables")
