"""Finding tables, and the modules that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.modules.tables import Table, check_data_type, find_tables
from tests.recsys.sharding_cases import HISTORY, MOVIES, USERS, Model, Processed, pooled_tables


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=pooled_tables())


class OwnCollision(ManagedCollisionEmbeddingCollection):
    pass


def managed_collision() -> nn.Module:
    config = EmbeddingConfig(name="users", embedding_dim=8, num_embeddings=16, feature_names=["user"])
    managed = MCHManagedCollisionModule(16, torch.device("cpu"), DistanceLFU_EvictionPolicy(), eviction_interval=2)
    return OwnCollision(EmbeddingCollection(tables=[config]), ManagedCollisionCollection({"users": managed}, [config]))


class Bags(EmbeddingBagCollection):
    pass


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "OwnCollision": managed_collision,
    "ManagedCollisionCollection": lambda: managed_collision().get_submodule("_managed_collision_collection"),
    "EmbeddingTower": lambda: EmbeddingTower(bags(), nn.Linear(8, 8)),
    "EmbeddingTowerCollection": lambda: EmbeddingTowerCollection([EmbeddingTower(bags(), nn.Linear(8, 8))]),
    "ITEPEmbeddingBagCollection": lambda: ITEPEmbeddingBagCollection(
        bags(), GenericITEPModule({}, lookups=[], enable_pruning=False)
    ),
    "FusedEmbeddingBagCollection": lambda: FusedEmbeddingBagCollection(
        pooled_tables(), torch.optim.SGD, {"lr": 0.1}, device=torch.device("meta")
    ),
    "KeyedJaggedTensorPool": lambda: KeyedJaggedTensorPool(4, {"user": 2}),
    "Bags": lambda: Bags(tables=pooled_tables()),
}


def test_a_compiled_embedding_module_is_refused_and_one_compiled_in_place_is_not() -> None:
    in_place = bags()
    in_place.compile()
    assert len(find_tables(nn.ModuleDict({"tables": in_place}))) == 2
    compiled: Any = torch.compile(bags())
    with pytest.raises(SetupError, match=r"module tables is the result of torch\.compile.*Use the embedding module"):
        find_tables(nn.ModuleDict({"tables": compiled}))


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_cannot_be_sharded_here_are_refused_by_name(name: str) -> None:
    with pytest.raises(SetupError, match=rf"module 1\.inner \({name}\)"):
        find_tables(nn.Sequential(Model(), nn.ModuleDict({"inner": REFUSED[name]()})))


def test_tables_have_the_names_of_their_parameters_in_the_module() -> None:
    found = find_tables(nn.ModuleDict({"model": Model(), "other": Processed()}))
    assert [table.name for table, _ in found] == [
        f"model.{USERS}",
        f"model.{MOVIES}",
        f"model.{HISTORY}",
        "other.processed._embedding_bag_collection.embedding_bags.users.weight",
    ]
    users, processed = found[0][0], found[3][0]
    assert (users.module_name, users.holder_name, users.config.name) == ("model.pooled", "model.pooled", "users")
    assert (processed.module_name, processed.module_state_dict_key) == (
        "other.processed",
        "_embedding_bag_collection.embedding_bags.users.weight",
    )
    assert processed.holder_name == "other.processed._embedding_bag_collection"


def test_a_module_that_is_itself_a_torchrec_module_is_found() -> None:
    (users, parameter), _ = find_tables(bags())
    assert (users.name, users.module_name, users.holder_name) == ("embedding_bags.users.weight", "", "")
    assert parameter.shape == (24, 8)


def test_a_module_without_tables_is_sent_to_the_other_strategy() -> None:
    with pytest.raises(SetupError, match=r"Linear holds no TorchRec embedding module.*strategy='pipeline'"):
        find_tables(nn.Linear(2, 2))


def test_a_table_shared_with_a_dense_layer_is_refused() -> None:
    model = Model()
    model.tied = nn.Linear(8, 24)
    model.tied.weight = model.pooled.embedding_bags["users"].weight
    with pytest.raises(SetupError, match=rf"table {USERS} and parameter tied.weight are the same tensor"):
        find_tables(model)


def test_two_tables_that_are_one_parameter_are_refused() -> None:
    model = Model()
    model.pooled.embedding_bags["movies"].weight = model.pooled.embedding_bags["users"].weight
    with pytest.raises(SetupError, match=rf"tables {USERS} and {MOVIES} are one parameter"):
        find_tables(model)


def test_a_table_in_the_memory_of_a_dense_layer_is_refused() -> None:
    model = Model()
    model.top = nn.Linear(8, 24)
    model.top.weight.data = model.pooled.embedding_bags["users"].weight.data
    with pytest.raises(SetupError, match=rf"table {USERS} and top\.weight share memory.*clone"):
        find_tables(model)


def test_a_table_in_the_memory_of_a_buffer_or_of_another_table_is_refused() -> None:
    model = Model()
    model.register_buffer("shown", model.pooled.embedding_bags["users"].weight.data[3:5, 2:])
    with pytest.raises(SetupError, match=rf"table {USERS} and shown share memory"):
        find_tables(model)
    model = Model()
    model.pooled.embedding_bags["movies"].weight.data = model.pooled.embedding_bags["users"].weight.data
    with pytest.raises(SetupError, match=rf"tables {MOVIES} and {USERS} share memory"):
        find_tables(model)


def test_tensors_in_separate_parts_of_one_storage_share_nothing() -> None:
    model = Model()
    together = torch.rand(2, 24, 8)
    model.top = nn.Linear(8, 24)
    model.pooled.embedding_bags["users"].weight.data, model.top.weight.data = together
    assert len(find_tables(model)) == 3


@pytest.mark.parametrize("shape", [(30, 8), (20, 8), (24, 4), (192,)])
def test_weights_of_another_shape_than_the_config_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    model = Model()
    model.sequence.embeddings["history"].weight.data = torch.randn(shape)
    said = rf"table {HISTORY} must have the shape of its config, \[24, 8\].*got weights of the shape \[{shape[0]}"
    with pytest.raises(SetupError, match=said):
        find_tables(model)


@pytest.mark.parametrize(("device", "types"), [("cpu", "FP32 FP16"), ("cuda", "FP32 FP16 NFP8")])
def test_a_type_without_a_kernel_is_refused_with_the_table(device: str, types: str) -> None:
    for data_type in DataType:
        config = EmbeddingBagConfig(
            name="t", embedding_dim=8, num_embeddings=4, feature_names=["f"], data_type=data_type
        )
        table = Table("bags.embedding_bags.t.weight", "bags", EmbeddingBagCollection, config)
        if data_type.name in types.split():
            check_data_type(table, torch.device(device))
        else:
            with pytest.raises(SetupError, match=rf"table {table.name} has the data_type {data_type.name},.*{device}"):
                check_data_type(table, torch.device(device))


def test_one_module_at_two_places_is_found_once() -> None:
    pooled = bags()
    assert len(find_tables(nn.ModuleList([nn.ModuleList([pooled]), nn.ModuleList([pooled])]))) == 2


def test_one_module_under_two_names_of_its_parent_is_refused() -> None:
    model = Model()
    model.other = model.pooled
    with pytest.raises(SetupError, match=r"pooled and other are one EmbeddingBagCollection.*Hold it under one name"):
        find_tables(model)


def test_a_table_without_features_of_its_own_is_found() -> None:
    config = EmbeddingBagConfig(name="alone", embedding_dim=4, num_embeddings=4)
    ((table, _),) = find_tables(EmbeddingBagCollection(tables=[config]))
    assert table.config.name == "alone"
