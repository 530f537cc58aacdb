"""Vectors from elsewhere become the initial values of tables, and a trained module becomes a plain one again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.recsys.serving.table_files import write_tables_to_parquet
from lightning_pipe.strategies import export_checkpoint
from tests.distributed import run_ranks
from tests.strategies.cases import IDS, WIDTH, Clicks, Managed, Pooled, Sequenced, fit, recsys, state_of

KINDS = ["row_wise", "column_wise", "table_wise", "data_parallel"]
VECTORS = np.random.default_rng(3).standard_normal((IDS, WIDTH)).astype(np.float32)


def place_of(network: Any) -> tuple[str, str]:
    """Module of the tables of a network, and the table that gets the vectors."""
    return ("history", "past") if network is Sequenced else ("bags", "things")


def with_vectors(network: Any, vectors: Tensor, as_parameter: bool = False) -> Clicks:
    """A module whose table has these vectors: copied into its weight, or as its weight."""
    module = Clicks(network)
    holder, table = place_of(network)
    tables = module.network.get_submodule(holder)
    embedding = (tables.embeddings if network is Sequenced else tables.embedding_bags)[table]  # type: ignore[index]
    if as_parameter:
        embedding.weight = nn.Parameter(vectors)
    else:
        with torch.no_grad():
            embedding.weight.copy_(vectors)
    return module


def values_after(rank: int, world_size: int, network: Any, kind: str, file: str | None) -> dict[str, Any]:
    """The table after set-up and after an epoch, with the vectors of memory or of a file mapped into it."""
    vectors = torch.from_numpy(VECTORS if file is None else np.load(file, mmap_mode="c"))
    found = {}
    for steps in (0, -1):
        module = with_vectors(network, vectors.clone() if file is None else vectors, as_parameter=file is not None)
        used = fit(module, recsys("prefetch", {place_of(network)[1]: kind}), max_steps=steps, max_epochs=1)
        state = state_of(used)
        (name,) = [name for name in state if name.endswith(f".{place_of(network)[1]}.weight")]
        found[steps] = state[name]
    return found


CASES = [
    *((Pooled, kind, world_size) for kind in KINDS for world_size in (1, 2)),
    *((Sequenced, kind, 2) for kind in KINDS[:3]),
]


@pytest.mark.parametrize("mapped", [False, True], ids=["in memory", "a mapped file"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_table_starts_with_its_vectors_under_every_sharding(world_size: int, mapped: bool, tmp_path: Path) -> None:
    file = tmp_path / "vectors.npy"
    np.save(file, VECTORS)
    for network, kind, ranks in CASES:
        if ranks != world_size:
            continue
        for found in run_ranks(values_after, world_size, network, kind, str(file) if mapped else None):
            assert torch.equal(found[0], torch.from_numpy(VECTORS)), kind
            assert not torch.equal(found[-1], found[0]), kind  # it is trained
    assert np.array_equal(np.load(file), VECTORS)


def test_rows_of_an_export_become_the_vectors_of_a_table(tmp_path: Path) -> None:
    first = fit(Clicks(Pooled), recsys(), max_epochs=1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    write_tables_to_parquet(tmp_path / "first.ckpt", tmp_path / "rows")
    name = "network.bags.embedding_bags.things.weight"
    file = pq.read_table(tmp_path / "rows" / f"{name}.parquet")
    vectors = torch.zeros(IDS, WIDTH)
    vectors[torch.tensor(file["id"].to_numpy())] = torch.tensor(
        file["vector"].combine_chunks().flatten().to_numpy()
    ).view(-1, WIDTH)
    second = fit(with_vectors(Pooled, vectors), recsys(), max_steps=0)
    assert torch.equal(state_of(second)[name], state_of(first)[name])


def trained_and_saved(rank: int, world_size: int, network: Any, folder: Path) -> dict[str, Tensor]:
    used = fit(Clicks(network), recsys(), max_epochs=1)
    used.save_checkpoint(folder / "trained.ckpt")
    return state_of(used)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("network", [Pooled, Sequenced, Managed])
def test_a_plain_module_has_the_trained_values(network: Any, world_size: int, tmp_path: Path) -> None:
    state, *_ = run_ranks(trained_and_saved, world_size, network, tmp_path)
    export_checkpoint(tmp_path / "trained.ckpt", tmp_path / "plain.ckpt")
    plain = Clicks(network)
    plain.load_state_dict(torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"])
    values = plain.state_dict()
    # A rank's maps from ids to rows are those of its own rows.
    compared = [name for name in state if name in values and "_mch_" not in name]
    assert len(compared) >= 5
    assert [name for name in compared if not torch.equal(values[name], state[name])] == []
    assert isinstance(next(iter(plain.table_parameters())), nn.Parameter)
