"""Constraints and topology as YAML has them, and what is said of those that cannot be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec.distributed.embedding_types import DataType
from torchrec.distributed.fused_params import BoundsCheckMode
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import CacheAlgorithm

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.kernels.table_optimizer import SparseOptimizerConfig, resolve_table_optimizer
from lightning_pipe.recsys.modules.tables import Table, find_tables
from lightning_pipe.recsys.sharding.planner_options import read_constraints, read_topology
from tests.recsys.sharding_cases import ADAGRAD, ROW_WISE_ADAGRAD, Model, Processed

CPU = torch.device("cpu")
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}}


def tables(optimizer: dict[str, Any] = ADAGRAD, device: str = "cpu", kind: Any = Model) -> list[Table]:
    default = SparseOptimizerConfig.from_config(optimizer)
    return [
        replace(table, optimizer=resolve_table_optimizer(table.name, parameter, default, torch.device(device)))
        for table, parameter in find_tables(kind())
    ]


def refusal(constraints: Any, *arguments: Any) -> str:
    with pytest.raises(SetupError) as caught:
        read_constraints(constraints, tables(*arguments))
    return str(caught.value)


def test_plain_words_become_torchrec_s_constraints() -> None:
    given = {
        "users": {
            "sharding_types": ["row_wise", "column_wise"],
            "compute_kernels": ["fused"],
            "min_partition": 4,
            "pooling_factors": [3.0],
            "bounds_check_mode": "fatal",
            "output_dtype": "fp16",
            "cache_params": {"algorithm": "LFU", "load_factor": 0.1, "precision": "FP32"},
        }
    }
    read = read_constraints(given, tables())["users"]
    assert read.sharding_types == ["row_wise", "column_wise"]
    assert (read.compute_kernels, read.min_partition, read.pooling_factors) == (["fused"], 4, [3.0])
    assert read.bounds_check_mode is BoundsCheckMode.FATAL
    assert read.output_dtype is DataType.FP16
    assert read.cache_params is not None
    assert read.cache_params.algorithm is CacheAlgorithm.LFU
    assert read.cache_params.precision is DataType.FP32


def test_torchrec_s_own_objects_are_taken_and_left_as_they_are() -> None:
    given = ParameterConstraints(min_partition=8)
    read = read_constraints({"users": given}, tables(ROW_WISE_ADAGRAD))["users"]
    assert read.min_partition == 8
    assert read.sharding_types is not None
    assert given.sharding_types is None


def test_without_constraints_there_is_nothing_to_hold() -> None:
    assert read_constraints(None, tables()) == {}


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (
            {"genres": {}},
            "table genres, which the model does not have. Use one of its tables: history",
        ),
        (
            {"users": {"sharding": ["row_wise"]}},
            "the unknown key sharding. Remove it; expected one of sharding_types",
        ),
        ({"users": {"sharding_types": ["rowwise"]}}, "names rowwise. Use some of data_parallel, table_wise"),
        ({"users": {"compute_kernels": ["fast"]}}, "names fast. Use some of dense, fused"),
        ({"users": {"bounds_check_mode": "never"}}, "bounds_check_mode, must be one of FATAL.* got 'never'"),
        ({"users": {"cache_params": {"size": 3}}}, "unknown key size. Remove it; expected one of algorithm"),
        ({5: {}}, "constraints name the table 5, which the model does not have"),
        ({"history": {"sharding_types": ["table_wise", "data_parallel"]}}, r"for table sequence.*pools sequences"),
        ({"history": {"sharding_types": ["table_row_wise"]}}, "Use some of table_wise, column_wise, row_wise"),
        ({"movies": {"sharding_types": ["grid_shard"]}}, "grid_shard for table .*movies.*pooled by mean"),
    ],
)
def test_constraints_that_cannot_be_had_name_what_can(constraints: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        read_constraints(constraints, tables())


def test_an_optimizer_with_one_state_a_row_keeps_its_rows_whole_unless_the_user_says_otherwise() -> None:
    read = read_constraints({"movies": {"sharding_types": ["column_wise"]}}, tables(ROW_WISE_ADAGRAD))
    assert read["users"].sharding_types == ["data_parallel", "table_wise", "row_wise", "table_row_wise"]
    assert read["history"].sharding_types == ["table_wise", "row_wise"]
    assert read["movies"].sharding_types == ["column_wise"]


def test_what_the_planner_takes_only_when_asked_is_not_offered_by_the_way() -> None:
    read = read_constraints({}, tables(ROW_WISE_ADAGRAD, "cpu", Processed))
    assert read["users"].sharding_types == ["data_parallel", "table_wise"]


def test_an_optimizer_that_moves_untouched_rows_is_kept_off_replicated_tables() -> None:
    read = read_constraints({}, tables(ADAM, "cuda"))
    assert "data_parallel" not in (read["users"].sharding_types or ())
    assert "table_wise" in (read["users"].sharding_types or ())
    message = refusal({"users": {"sharding_types": ["data_parallel"]}}, ADAM, "cuda")
    assert "torch.optim.Adam moves rows without a gradient" in message


def test_a_topology_in_plain_words() -> None:
    topology, batch_size = read_topology({"ddr_cap": 1000, "batch_size": 64}, CPU, 2)
    assert (topology.world_size, topology.compute_device, batch_size) == (2, "cpu", 64)
    assert topology.devices[1].storage.ddr == 1000
    assert read_topology(None, CPU, 2)[1] is None


def test_a_topology_in_plain_words_knows_the_ranks_of_a_node_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert read_topology({"local_world_size": 2}, CPU, 4)[0].local_world_size == 2
    with pytest.raises(SetupError, match="local_world_size 4, but the environment has 2"):
        read_topology({"local_world_size": 4}, CPU, 4)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ({"hbm": 3}, "topology .* is invalid: .*'hbm'"),
        ({"pod_size": 64}, "is invalid: pod_size=64"),
        (Topology(world_size=4, compute_device="cpu"), "topology must have 2 ranks, got 4"),
    ],
)
def test_a_topology_that_cannot_be_had_is_refused(topology: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        read_topology(topology, CPU, 2)
