"""Plans train as Lightning's own loop trains the unsharded module; test_every_plan compares them with each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    ADAGRAD,
    ROW_WISE_ADAGRAD,
    SGD,
    Clicks,
    Mixed,
    Pooled,
    Sequenced,
    difference,
    fit,
    loader,
    outcome,
    recsys,
    state_of,
)

# ---------------------------------------------------------------------- Lightning's own loop


def unsharded(optimizer: dict[str, Any]) -> dict[str, Any]:
    """What Lightning's own loop makes of a module."""
    module = Clicks(Mixed, in_backward=optimizer)
    return outcome(module, fit(module, "auto", max_epochs=3))


@pytest.fixture(scope="module", params=[SGD, ADAGRAD, ROW_WISE_ADAGRAD], ids=lambda optimizer: optimizer["class_path"])
def optimizer(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the tables."""
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module")
def reference(optimizer: dict[str, Any]) -> Reference:
    """The unsharded module after training, with the bound for other implementations."""
    return Reference.of(lambda: unsharded(optimizer))


def test_one_process_trains_as_lightning_does_without_sharding(reference: Reference, optimizer: dict[str, Any]) -> None:
    module = Clicks(Mixed, in_backward=optimizer)
    used = fit(module, recsys("prefetch", optimizer=None), max_epochs=3)
    assert reference.differences(outcome(module, used)) == []


def all_in_one(optimizer: type[torch.optim.Optimizer], lr: float) -> Any:
    """One optimizer for dense parameters and tables: a user's who does not think of sharding."""
    return lambda module: optimizer(module.parameters(), lr=lr)  # type: ignore[call-arg]


IN_ONE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, SGD),
    "Adagrad": (torch.optim.Adagrad, ADAGRAD),
}


def as_ddp(rank: int, world_size: int) -> dict[str, Any]:
    """Of each optimizer: what differs from Lightning's DDP; of three more: losses and state with sharding."""
    results: dict[str, Any] = {}
    for name, (optimizer, config) in IN_ONE.items():
        configure = all_in_one(optimizer, config["init_args"]["lr"])

        def replicated(configure: Any = configure) -> dict[str, Any]:
            module = Clicks(Sequenced, optimizers=configure)
            found = outcome(module, fit(module, "ddp", max_epochs=3))
            # The optimizer's states are numbered among other parameters there.
            return {key: value for key, value in found.items() if not key.startswith("optimizer")}

        reference = Reference.of(replicated)
        module = Clicks(Sequenced, optimizers=configure)
        used = fit(module, recsys("prefetch", {"past": "row_wise", "people": "table_wise"}, config), max_epochs=3)
        assert len(module.losses) == 9
        results[name] = reference.differences(outcome(module, used))
    for config in (SGD, ADAGRAD, ROW_WISE_ADAGRAD):
        module = Clicks(Pooled)
        strategy = recsys("prefetch", {"people": "row_wise", "things": "table_wise"}, config)
        used = fit(module, strategy, loader(in_order=True), max_epochs=3)
        results[str(config["class_path"])] = module.losses, state_of(used)
    return results


def test_two_processes_train_as_lightnings_ddp_and_as_one_process_with_a_batch_of_both() -> None:
    first, second = run_ranks(as_ddp, 2)
    for results in (first, second):
        for name in IN_ONE:
            assert results[name] == [], name
    for config in (SGD, ADAGRAD, ROW_WISE_ADAGRAD):
        name = str(config["class_path"])
        (losses, state), (other_losses, other_state) = first[name], second[name]

        def in_one(config: dict[str, Any] = config) -> dict[str, Any]:
            module = Clicks(Pooled, in_backward=config)
            return outcome(module, fit(module, "auto", loader(batch_size=8), max_epochs=3))

        mean = [(one + other) / 2 for one, other in zip(losses, other_losses, strict=True)]
        assert Reference.of(in_one).differences({"losses": mean, **state}) == [], name
        assert difference(state, other_state) == [], name
