"""Warm starts on several ranks: other numbers of ranks, shardings and replicas, dynamic tables, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.recsys.dynamic.dynamic_cases import same
from tests.scenarios.recommenders import test_dynamic_embeddings as dynamic
from tests.strategies.cases import ADAGRAD, ROW_WISE_ADAGRAD, Clicks, difference, fit, loader, recsys
from tests.strategies.recommender.test_warm_start import PEOPLE, THINGS, Spread, shop, tables_of

# Shardings of both tables; of a row-wise state, only those that do not split columns.
SHARDINGS = {
    "table_wise": {"people": "table_wise", "things": "table_wise"},
    "row_wise": {"people": "row_wise", "things": "row_wise"},
    "mixed": {"people": "data_parallel", "things": "table_row_wise"},
    "column_wise": {"people": "column_wise", "things": "table_wise"},
    "grid_shard": {"people": "grid_shard", "things": "data_parallel"},
}


def _name(optimizer: Any) -> str:
    return str(optimizer["class_path"]).rpartition(".")[2]


def save(rank: int, world_size: int, folder: Path, names: list[str], optimizer: Any) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in names:
        used = fit(shop(), recsys(kinds=SHARDINGS[name], optimizer=optimizer), max_epochs=1)
        used.save_checkpoint(folder / f"{_name(optimizer)} {name} {world_size}")
        found[f"{name} {world_size}"] = tables_of(used)
    return found


def start(
    rank: int, world_size: int, folder: Path, saved: list[str], optimizer: Any, people: int, **options: Any
) -> dict[str, dict[str, Tensor]]:
    """Values at the start of a run, from each checkpoint under a third of the shardings that its states allow."""
    found = {}
    for place, name in enumerate(saved):
        for other, kind in enumerate(SHARDINGS):
            one_column_shard = {name.split()[0], kind}.isdisjoint({"column_wise", "grid_shard"})
            if (place + other + world_size) % 3 or not (optimizer == ADAGRAD or one_column_shard):
                continue
            init_from = folder / f"{_name(optimizer)} {name}"
            strategy = recsys(kinds=SHARDINGS[kind], optimizer=optimizer, init_from=init_from, **options)
            found[f"{name} {kind}"] = tables_of(fit(shop(people=people), strategy, max_steps=0))
    return found


@pytest.mark.parametrize("optimizer", [ADAGRAD, ROW_WISE_ADAGRAD], ids=["adagrad", "row-wise adagrad"])
def test_values_and_states_are_the_same_on_other_ranks_and_in_other_shardings(optimizer: Any, tmp_path: Path) -> None:
    of_two, _ = run_ranks(save, 2, tmp_path, list(SHARDINGS), optimizer)
    (of_one,) = run_ranks(save, 1, tmp_path, ["row_wise", "table_wise"], optimizer)
    saved = {**of_two, **of_one}
    initial = shop(people=37).state_dict()[PEOPLE]
    for ranks, people in ((1, 37), (3, 24)):
        for found in run_ranks(start, ranks, tmp_path, list(saved), optimizer, people):
            assert len(found) >= 2
            for pair, values in found.items():
                expected = saved[" ".join(pair.split()[:2])]
                grown = {name: value[: len(expected[name])] for name, value in values.items() if PEOPLE in name}
                assert difference({**values, **grown}, expected) == [], pair
                assert torch.equal(values[PEOPLE][24:], initial[24:people])
                assert not values[f"{PEOPLE} momentum1"][24:].any()


def in_replicas(rank: int, world_size: int, folder: Path) -> Any:
    kinds = {"people": "row_wise", "things": "table_wise"}
    strategy = recsys(kinds=kinds, replicas=2, init_from=folder / "Adagrad mixed 2")
    return tables_of(fit(shop(), strategy, max_steps=0))


def test_replicas_start_with_equal_values(tmp_path: Path) -> None:
    expected, _ = run_ranks(save, 2, tmp_path, ["mixed"], ADAGRAD)
    for found in run_ranks(in_replicas, 4, tmp_path):
        assert difference(found, expected["mixed 2"]) == []


# ---------------------------------------------------------------------- training


def trained(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Losses and values under each plan, after a start with more rows."""
    runs = []
    for plan in ("serial", "base", "prefetch"):
        module = shop(people=36)
        kinds = SHARDINGS["row_wise"]
        data = loader(dataset=Spread(24), in_order=True)
        used = fit(module, recsys(plan, kinds, init_from=folder / "Adagrad column_wise 2"), data)
        runs.append((module.losses, tables_of(used)))
    return runs


def test_plans_train_the_same_on_two_ranks_after_a_warm_start(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, ["column_wise"], ADAGRAD)
    for (losses, values), *others in run_ranks(trained, 2, tmp_path):
        assert len(losses) == 6
        for other_losses, other_values in others:
            assert other_losses == losses
            assert difference(other_values, values) == []


# ---------------------------------------------------------------------- what is refused, on every rank


def refusals(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    kept = folder / "Adagrad row_wise 2"
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "ranks disagree": (folder / f"of rank {rank}", shop(), {}),
        "one rank alone": (kept if rank else None, shop(), {}),
        "nothing there": (folder / "nothing", shop(), {}),
        "fewer rows": (kept, shop(people=16), {}),
        "other columns": (kept, shop(width=16), {}),
        "other optimizer": (kept, shop(), {"optimizer": ROW_WISE_ADAGRAD}),
        "another model": (kept, Clicks(), {"kinds": SHARDINGS["row_wise"]}),
    }
    found = {}
    for name, (init_from, module, options) in cases.items():
        with pytest.raises(SetupError) as caught:
            fit(module, recsys(**{"kinds": SHARDINGS["row_wise"], "init_from": init_from, **options}), max_steps=0)
        found[name] = str(caught.value)
    return found


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, ["row_wise"], ADAGRAD)
    messages = {
        "ranks disagree": "the warm start differs between ranks: rank 0 has 'init_from' = \"WarmStartOptions(",
        "one rank alone": "the warm start differs between ranks: rank 0 has 'init_from' = 'None'",
        "nothing there": "nothing' is not there, expected a folder written under a recsys plan",
        "fewer rows": f"fewer rows are expected of table {PEOPLE} (24 rows in it, now 16)",
        "other columns": f"table {THINGS} has the shape [24, 8] in it, expected 16 columns",
        "other optimizer": "with people.momentum1, expected torchrec.optim.RowWiseAdagrad with people.momentum1",
        "another model": "network.over.0.weight (shape [8, 19] in it, expected [8, 27])",
    }
    for found in run_ranks(refusals, 2, tmp_path):
        for name, message in messages.items():
            assert message in found[name], name


# ---------------------------------------------------------------------- dynamic tables


def dynamic_runs(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    def run(store: str, init_from: Any, kept: Path | None = None, **more: Any) -> dict[str, Any]:
        module = dynamic.clicks(path / store, **more.pop("module", {}))
        strategy = recsys(optimizer=ROW_WISE_ADAGRAD, init_from=init_from)
        data = loader(24 * world_size, in_order=True)
        try:
            used = fit(module, strategy, data, use_distributed_sampler=False, **more)
            if kept is not None:
                used.save_checkpoint(kept)
            return dynamic.state_of(used)
        finally:
            strategy.sharded_model.close()

    kept = path / "kept"
    expected = run("first", None, kept, max_epochs=1)
    reset = {"path": kept, "optimizer_states": "reset"}
    found: dict[str, Any] = {
        "kept": same(run("second", kept, max_steps=0), expected),
        "reset": same(run("third", reset, max_steps=0), expected),
    }
    for name, store, module in (("rows", "first", {}), ("columns", "fourth", {"embedding_dim": 16})):
        with pytest.raises(SetupError) as caught:
            run(store, {"path": kept, "dense": "matching"}, module=module)
        found[name] = str(caught.value)
    return found


def test_rows_of_dynamic_tables_are_read_into_an_empty_store(tmp_path: Path) -> None:
    for found in run_ranks(dynamic_runs, 2, tmp_path):
        assert found["kept"]
        assert not found["reset"]  # the states differ
        assert "holds rows that an earlier run has trained" in found["rows"]
        assert "Build the module with the same dimensions and optimizers" in found["columns"]
