"""Vectors from elsewhere are the values of sharded tables, and tables are read back into an unsharded module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_pipe.cli.main import main
from tests.distributed import run_ranks
from tests.strategies.cases import (
    IDS,
    SGD,
    WIDTH,
    Clicks,
    Managed,
    Pooled,
    difference,
    fit,
    is_table,
    loader,
    recsys,
    state_of,
    trainer,
)

TABLE = "network.bags.embedding_bags.people.weight"
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def vectors(rows: int = IDS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(11))


def with_matrix(network: Any) -> Clicks:
    """A module whose tables were copied from a matrix, as in its ``__init__``; on the other ranks, from another one."""
    module = Clicks(network)
    others = torch.distributed.is_initialized() and torch.distributed.get_rank() > 0
    with torch.no_grad():
        for parameter in module.table_parameters():
            parameter.copy_(vectors(len(parameter)) * (2 if others else 1))
    return module


def mapped(path: Path, mode: Any) -> Clicks:
    """A module with a table that is a file of vectors, and an optimizer that was set afterwards."""
    module = Clicks(Pooled)
    tables: Any = module.network.get_submodule("bags.embedding_bags.people")
    tables.weight = nn.Parameter(torch.from_numpy(np.load(path, mmap_mode=mode)))
    apply_optimizer_in_backward(torch.optim.SGD, module.table_parameters(), {"lr": 0.5})
    return module


def on_rank(rank: int, world_size: int, folder: Path) -> None:
    for network, sharding in [*((Pooled, kind) for kind in KINDS), (Managed, None)]:
        module = with_matrix(network)
        # One evaluation shards the module, and trains nothing.
        strategy = recsys("prefetch", dict.fromkeys(("people", "things"), sharding) if sharding else None, SGD)
        trainer(strategy).predict(module, loader(in_order=True))
        for name in strategy.sharded_model.tables:
            table = strategy.sharded_model.full_table(name)
            assert torch.equal(table, vectors(len(table))), (network, sharding, name)

    path = folder / "vectors.npy"
    before = path.read_bytes()
    for kind in KINDS:
        plain, module = Clicks(Pooled), mapped(path, "c")
        with torch.no_grad():
            plain.get_parameter(TABLE).copy_(vectors())
        kinds = {"people": kind, "things": "table_wise"}
        states = [
            state_of(fit(trained, recsys("prefetch", kinds, SGD), loader(in_order=True), max_epochs=1))
            for trained in (plain, module)
        ]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), kind
        assert not torch.equal(states[1][TABLE], vectors())
    writable = mapped(path, "r+")
    fit(writable, recsys("prefetch", {"people": "row_wise"}, SGD), loader(in_order=True), max_epochs=1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_tables_begin_with_a_matrix_or_a_mapped_file_under_every_sharding(world_size: int, tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", vectors().numpy())
    run_ranks(on_rank, world_size, tmp_path)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_map_that_cannot_be_written_is_trained_as_well(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", vectors().numpy())
    found = [
        state_of(fit(mapped(tmp_path / "vectors.npy", mode), recsys(optimizer=SGD), max_epochs=1))
        for mode in ("r", "c")
    ]
    assert difference(found[0], found[1]) == []


# ---------------------------------------------------------------------- back into an unsharded module


def trained(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    module = Clicks(Pooled)
    used = fit(module, recsys("prefetch", {"people": "row_wise", "things": "column_wise"}, SGD), loader(in_order=True))
    used.save_checkpoint(folder / "end.ckpt")
    sharded = used.strategy.sharded_model  # type: ignore[attr-defined]
    state = {name: sharded.full_table(name) for name in sharded.tables} | dict(sharded.dense_parameters())
    plain = Clicks(Pooled)
    plain.load_state_dict(state)
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


def test_an_unsharded_module_gets_the_values_from_the_strategy_and_from_a_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(trained, 2, tmp_path)
    assert main(["checkpoint", "export", str(tmp_path / "end.ckpt"), str(tmp_path / "end.pt")]) == 0
    plain = Clicks(Pooled)
    plain.load_state_dict(torch.load(tmp_path / "end.pt")["state_dict"])
    loaded = Clicks.load_from_checkpoint(tmp_path / "end.pt", network=Pooled)
    for name, parameter in plain.named_parameters():
        for other in (first[name], second[name], loaded.get_parameter(name)):
            assert torch.equal(parameter, other), name

    assert main(["export", str(tmp_path / "end.ckpt"), "--to", "rows", "--out", str(tmp_path / "rows")]) == 0
    copied = Clicks(Pooled)
    for name in filter(is_table, first):
        rows = pq.read_table(tmp_path / "rows" / f"{name}.parquet")
        with torch.no_grad():
            copied.get_parameter(name)[torch.tensor(rows["id"].to_numpy())] = torch.tensor(rows["vector"].to_pylist())
        assert torch.equal(copied.get_parameter(name), first[name])
