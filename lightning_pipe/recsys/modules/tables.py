"""Finds the embedding tables of a module before it is sharded, and refuses those that cannot be sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from torchrec.modules.object_pool import ObjectPool

from lightning_pipe._compat.managed_collision import get_unsharded_id_maps
from lightning_pipe._compat.torch import COMPILED
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.kernels.table_optimizer import TableOptimizerSpec
from lightning_pipe.recsys.modules.dynamic_modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    is_dynamic_type,
)

TABLE_MODULES = (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
)
_REFUSED: tuple[type[nn.Module], ...] = (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    EmbeddingTower,
    EmbeddingTowerCollection,
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    ObjectPool,
)


@dataclass(frozen=True)
class Table:
    """One embedding table, as the user's module describes it."""

    name: str  # of its parameter in the sharded module, for example model.ebc.embedding_bags.users.weight
    module_name: str  # for example model.ebc
    module_type: type[nn.Module]
    config: BaseEmbeddingConfig  # config.name is users
    optimizer: TableOptimizerSpec | None = None  # until it is resolved
    sharding_type: str = ""  # until it is planned
    is_frozen: bool = False  # together with all tables of its module

    @property
    def module_state_dict_key(self) -> str:
        """The name of its parameter in the module that holds it."""
        return self.name[len(self.module_name) + 1 :] if self.module_name else self.name

    @property
    def holder_name(self) -> str:
        """The name of the module that holds only tables and their state: a child if features are processed."""
        if self.maps_ids:
            return self.module_name
        return ".".join(self.name.split(".")[:-3])  # without embedding_bags, the table's name and weight

    @property
    def is_dynamic(self) -> bool:
        """True if the table has no fixed size, so that the sharded module holds a cache of rows."""
        return is_dynamic_type(self.module_type)

    @property
    def maps_ids(self) -> bool:
        """True if ids are mapped to its rows by a managed-collision module, which the ranks of the rows hold."""
        return issubclass(self.module_type, BaseManagedCollisionEmbeddingCollection)

    @property
    def resolved_optimizer(self) -> TableOptimizerSpec:
        """The optimizer of the table, after it is resolved."""
        assert self.optimizer is not None
        return self.optimizer

    @property
    def learning_rate(self) -> float:
        """Its base learning rate, before any schedule."""
        return self.resolved_optimizer.learning_rate

    def with_optimizer_and_sharding(self, optimizer: TableOptimizerSpec, sharding_type: str) -> Table:
        """Return the same table with its optimizer and sharding type."""
        return replace(self, optimizer=optimizer, sharding_type=sharding_type)


def check_data_type(table: Table, device: torch.device) -> None:
    """Check that FBGEMM can train a table of this type on a device."""
    # Of SplitTableBatchedEmbeddingBags.
    types = ["FP32", "FP16"] if device.type == "cpu" or table.is_dynamic else ["FP32", "FP16", "NFP8"]
    if table.config.data_type.name not in types:
        raise SetupError(
            f"table {table.name} has the data_type {table.config.data_type.name}, which FBGEMM cannot train on the"
            f" device {device.type}. Use DataType.{' or DataType.'.join(types)}."
        )


def _join_module_path(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def find_tables(module: nn.Module) -> list[tuple[Table, nn.Parameter]]:
    """Find the tables that TorchRec can shard, each with its unsharded parameter.

    A plain ``nn.EmbeddingBag`` is not included: it stays a dense parameter.
    """
    tables: list[tuple[Table, nn.Parameter]] = []
    inside: list[str] = []
    for name, child in module.named_modules():
        if any(name == outer or name.startswith(f"{outer}.") or not outer for outer in inside):
            continue
        label = f"module {name or 'given'} ({type(child).__name__})"
        if isinstance(getattr(child, COMPILED, None), TABLE_MODULES):
            raise SetupError(
                f"module {name} is the result of torch.compile for an embedding module, whose tables it would still"
                " call after they are sharded. Use the embedding module itself: its kernels are compiled already."
            )
        if isinstance(child, ShardedModule):
            raise SetupError(f"{label} is sharded already. Pass the module as it was before sharding.")
        if isinstance(child, _REFUSED) and type(child) not in TABLE_MODULES:
            raise SetupError(
                f"{label} cannot be sharded by this project. Use EmbeddingBagCollection, EmbeddingCollection,"
                " FeatureProcessedEmbeddingBagCollection or one of the two ManagedCollision modules with these instead."
            )
        if not isinstance(child, TABLE_MODULES):
            continue
        if type(child) not in TABLE_MODULES:
            raise SetupError(
                f"{label} is a subclass of a TorchRec module, and TorchRec's sharders only replace exact classes."
                " Hold the TorchRec module as a child instead of inheriting from it."
            )
        inside.append(name)
        tables.extend(_tables_of(name, child))
    _refuse_shared_tables(module, tables)
    if not tables:
        raise SetupError(
            f"expected a module with tables, but {type(module).__name__} holds no TorchRec embedding module. Add an"
            " EmbeddingBagCollection or EmbeddingCollection, or use strategy='pipeline' for a module without one."
        )
    return tables


def _refuse_shared_tables(module: nn.Module, tables: Iterable[tuple[Table, nn.Parameter]]) -> None:
    """Refuse shared tables: sharding replaces a table's parameter, and other holders would silently train a copy."""
    names: dict[int, str] = {}
    for table, parameter in tables:
        first_name = names.setdefault(id(parameter), table.name)
        if first_name != table.name:
            raise SetupError(
                f"tables {first_name} and {table.name} are one parameter. Give each table a separate parameter."
            )
    for name, child in module.named_modules():
        child_names: dict[int, str] = {}
        for child_name, part in child._modules.items():
            if isinstance(part, TABLE_MODULES) and child_names.setdefault(id(part), child_name) != child_name:
                raise SetupError(
                    f"{_join_module_path(name, child_names[id(part)])} and {_join_module_path(name, child_name)} are"
                    f" one {type(part).__name__}, of which sharding would only replace the first. Hold it under"
                    " one name, and call it by that name."
                )
    holders = {table.holder_name for table, _ in tables}
    memory = _group_tensors_by_storage((table.name, parameter) for table, parameter in tables)
    for (first, first_values), (second, second_values) in _find_overlapping_tensors(memory, memory):
        if first < second and first_values is not second_values:
            raise SetupError(
                f"tables {first} and {second} share memory, but sharding gives each table memory of its own. Give each"
                " table separate values, for example weight.data = other.weight.data.clone()."
            )
    dense: list[tuple[str, torch.Tensor]] = []
    for name, child in module.named_modules():
        if any(name == holder or name.startswith(f"{holder}.") or not holder for holder in holders):
            continue
        for tensor_name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in names:
                raise SetupError(
                    f"table {names[id(parameter)]} and parameter {_join_module_path(name, tensor_name)} are"
                    " the same tensor, but"
                    " a sharded table cannot be shared with a dense layer. Give that layer a separate parameter."
                )
        own_tensors = *child.named_parameters(recurse=False), *child.named_buffers(recurse=False)
        dense += ((_join_module_path(name, tensor_name), tensor) for tensor_name, tensor in own_tensors)
    for (table_name, _), (other_name, _) in _find_overlapping_tensors(memory, _group_tensors_by_storage(dense)):
        raise SetupError(
            f"table {table_name} and {other_name} share memory, but a sharded table cannot be shared with a dense"
            " layer, which would silently keep a copy. Give that layer separate values, for example"
            " weight.data = table.weight.data.clone()."
        )


_Memory = dict[int, list[tuple[str, torch.Tensor]]]


def _group_tensors_by_storage(tensors: Iterable[tuple[str, torch.Tensor]]) -> _Memory:
    """Group named tensors by the address of their storage. Tensors without a storage of their own are left out."""
    grouped: _Memory = {}
    for name, tensor in tensors:
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        if plain and not tensor.is_meta and tensor.numel():
            grouped.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    return grouped


def _find_overlapping_tensors(
    first: _Memory, second: _Memory
) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """Yield the pairs of a tensor of *first* and a tensor of *second* that share elements."""
    for address in first.keys() & second.keys():
        for first_tensor in first[address]:
            for second_tensor in second[address]:
                if (
                    _compute_address_range(first_tensor[1])[0] < _compute_address_range(second_tensor[1])[1]
                    and _compute_address_range(second_tensor[1])[0] < _compute_address_range(first_tensor[1])[1]
                ):
                    yield first_tensor, second_tensor


def _compute_address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _tables_of(name: str, module: nn.Module) -> Iterator[tuple[Table, nn.Parameter]]:
    prefix = name
    holder: nn.Module = module
    if isinstance(module, (FeatureProcessedEmbeddingBagCollection, BaseManagedCollisionEmbeddingCollection)):
        inner = EmbeddingBagCollection, EmbeddingCollection
        child_name, holder = next(child for child in module.named_children() if isinstance(child[1], inner))
        prefix = _join_module_path(name, child_name)
    if isinstance(module, BaseManagedCollisionEmbeddingCollection):
        for table_name, id_map in get_unsharded_id_maps(module).items():
            if not isinstance(id_map, MCHManagedCollisionModule):
                raise SetupError(
                    f"table {table_name} of module {name or 'given'} maps ids by a {type(id_map).__name__}, expected an"
                    " MCHManagedCollisionModule. TorchRec's other maps evict by the time of day, or cannot be moved to"
                    " another number of ranks."
                )
    if isinstance(holder, EmbeddingCollection):
        configs: Iterable[BaseEmbeddingConfig] = holder.embedding_configs()
        kind, parts = "embeddings", holder.embeddings
    else:
        assert isinstance(holder, EmbeddingBagCollection)
        configs = holder.embedding_bag_configs()
        kind, parts = "embedding_bags", holder.embedding_bags
    for config in configs:
        parameter = parts[config.name].weight
        assert isinstance(parameter, nn.Parameter)
        table = Table(_join_module_path(prefix, kind, config.name, "weight"), name, type(module), config)
        shape = config.num_embeddings, config.embedding_dim
        if parameter.shape != shape:
            raise SetupError(
                f"table {table.name} must have the shape of its config, {list(shape)} (num_embeddings, embedding_dim),"
                f" got weights of the shape {list(parameter.shape)}. Correct the config, or the weights."
            )
        if getattr(config, "pooling", None) == PoolingType.MEAN and holder.is_weighted():
            raise SetupError(
                f"table {table.name} is pooled by mean and its features are weighted, but neither PyTorch's kernel nor"
                " FBGEMM's backward supports a weighted mean. Pool by sum, with weights divided by the bag's length."
            )
        yield table, parameter
