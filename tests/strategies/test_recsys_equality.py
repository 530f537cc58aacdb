"""The plans train alike to the bit, and as Lightning's own loop trains the unsharded module."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pipe.loops import PipelineTrainingEpochLoop
from tests.distributed import run_ranks
from tests.strategies.cases import (
    ADAGRAD,
    PLANS,
    ROW_WISE_ADAGRAD,
    SGD,
    Clicks,
    Dlrm,
    Memory,
    Mixed,
    Pooled,
    Processed,
    Sequenced,
    difference,
    fit,
    loader,
    plans_of,
    recsys,
    state_of,
)

# The model, the sharding type of each table (None: the planner chooses), the tables' optimiser.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "pooled": (Pooled, {"people": "row_wise", "things": "table_wise"}, ROW_WISE_ADAGRAD),
    "sequences": (Sequenced, {"past": "row_wise", "people": "column_wise"}, ADAGRAD),
    "several modules": (Mixed, {"people": "table_row_wise", "things": "row_wise", "tags": "data_parallel"}, ADAGRAD),
    "processed features": (Processed, {"people": "column_wise", "things": "row_wise"}, SGD),
    "TorchRec's DLRM": (Dlrm, None, ROW_WISE_ADAGRAD),
}
DEPTHS = {"serial": 1, "base": 3, "prefetch": 3, "fused_sparse_dist": 3}


class InFlight(Callback):
    """The most batches in flight."""

    most = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, PipelineTrainingEpochLoop)
        assert loop.ledger is not None
        self.most = max(self.most, loop.ledger.in_flight)


def every_plan(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Trains each case under each plan.

    Returns:
        Of each case and plan: losses, lines logged, names of what differs from the serial plan's outcome, the most
        batches in flight; and names of what training did not change.
    """
    results: dict[str, dict[str, Any]] = {}
    for case, (network, kinds, optimizer) in CASES.items():
        serial: dict[str, Tensor] = {}
        results[case] = {}
        for plan in plans_of(network):
            module, logger, in_flight = Clicks(network), Memory(), InFlight()
            before = {name: value.detach().clone() for name, value in module.named_parameters()}
            used = fit(
                module,
                recsys(plan, kinds, optimizer),
                loader(16 * world_size),
                logger=logger,
                callbacks=[in_flight],
            )
            state = state_of(used)
            serial = serial or state
            results[case][plan] = {
                "losses": module.losses,
                "logged": logger.lines,
                "differs": difference(state, serial),
                "unchanged": [name for name, value in before.items() if torch.equal(state[name], value)],
                "in flight": in_flight.most,
            }
    return results


@pytest.fixture(scope="module", params=[1, 2, 4], ids="world_{}".format)
def trained(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    """What every rank saw."""
    return run_ranks(every_plan, request.param, timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_every_plan_trains_to_the_same_bits(trained: list[dict[str, dict[str, Any]]], case: str) -> None:
    for rank, results in enumerate(trained):
        serial = results[case]["serial"]
        assert len(serial["losses"]) == 8
        assert [line["loss_step"] for _, line in serial["logged"] if "loss_step" in line] == serial["losses"]
        for plan in plans_of(CASES[case][0]):
            outcome = results[case][plan]
            assert outcome["losses"] == serial["losses"], (rank, plan)
            assert outcome["logged"] == serial["logged"], (rank, plan)
            assert outcome["differs"] == [], (rank, plan)
            assert outcome["unchanged"] == [], (rank, plan)
            assert outcome["in flight"] == DEPTHS[plan], (rank, plan)


# ---------------------------------------------------------------------- Lightning's own loop


def same_as_unsharded(used: pl.Trainer, reference: pl.Trainer) -> None:
    """To 1e-6, in what the unsharded module has: parameters, buffers, states of the dense optimiser."""
    ours, theirs = state_of(used), state_of(reference)
    assert difference({name: ours.get(name, torch.empty(0)) for name in theirs}, theirs, within=1e-6) == []


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROW_WISE_ADAGRAD], ids=lambda o: o["class_path"])
@pytest.mark.parametrize("network", [Pooled, Sequenced, Mixed], ids=lambda n: n.__name__)
def test_one_process_trains_as_lightning_does_without_sharding(network: Any, optimizer: dict[str, Any]) -> None:
    # Batch normalisation and Adagrad, which divide by what may be tiny, make much of rounding by the third epoch.
    epochs = 2 if network is Mixed else 3
    reference = Clicks(network, in_backward=optimizer)
    plain = fit(reference, "auto", max_epochs=epochs)
    for plan in PLANS:
        module = Clicks(network, in_backward=optimizer)
        used = fit(module, recsys(plan, optimizer=None), max_epochs=epochs)
        assert module.losses == pytest.approx(reference.losses, abs=1e-6)
        same_as_unsharded(used, plain)


def all_in_one(optimizer: type[torch.optim.Optimizer], lr: float) -> Any:
    """One optimiser for dense parameters and tables: a user's who does not think of sharding."""
    return lambda module: optimizer(module.parameters(), lr=lr)  # type: ignore[call-arg]


IN_ONE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, SGD),
    "Adagrad": (torch.optim.Adagrad, ADAGRAD),
}


def as_ddp(rank: int, world_size: int) -> dict[str, Any]:
    """Of each optimiser: this rank's losses with and without sharding, and names of what differs at the end."""
    results: dict[str, Any] = {}
    for name, (optimizer, config) in IN_ONE.items():
        configure = all_in_one(optimizer, config["init_args"]["lr"])
        reference = Clicks(Sequenced, optimizers=configure)
        theirs = {
            key: value
            for key, value in state_of(fit(reference, "ddp", max_epochs=3)).items()
            if not key.startswith("optimizer")  # numbered among other parameters there
        }
        for plan in PLANS:
            module = Clicks(Sequenced, optimizers=configure)
            ours = state_of(
                fit(module, recsys(plan, {"past": "row_wise", "people": "table_wise"}, config), max_epochs=3)
            )
            differs = difference({key: ours[key] for key in theirs}, theirs, within=1e-6)
            results[f"{name}, {plan}"] = module.losses, reference.losses, differs
    for config in (SGD, ADAGRAD, ROW_WISE_ADAGRAD):
        module = Clicks(Pooled)
        strategy = recsys("prefetch", {"people": "row_wise", "things": "table_wise"}, config)
        used = fit(module, strategy, loader(in_order=True), max_epochs=3)
        results[str(config["class_path"])] = module.losses, state_of(used)
    return results


def test_two_processes_train_as_lightnings_ddp_and_as_one_process_with_a_batch_of_both() -> None:
    first, second = run_ranks(as_ddp, 2)
    for results in (first, second):
        for name in (f"{optimizer}, {plan}" for optimizer in IN_ONE for plan in PLANS):
            ours, theirs, differs = results[name]
            assert len(ours) == 9
            assert ours == pytest.approx(theirs, abs=1e-6), name
            assert differs == [], name
    for config in (SGD, ADAGRAD, ROW_WISE_ADAGRAD):
        name = str(config["class_path"])
        (losses, state), (other_losses, other_state) = first[name], second[name]
        reference = Clicks(Pooled, in_backward=config)
        theirs = state_of(fit(reference, "auto", loader(batch_size=8), max_epochs=3))
        mean = [(one + other) / 2 for one, other in zip(losses, other_losses, strict=True)]
        assert mean == pytest.approx(reference.losses, abs=1e-6), name
        assert difference({key: state[key] for key in theirs}, theirs, within=1e-6) == [], name
        assert difference(state, other_state) == [], name
