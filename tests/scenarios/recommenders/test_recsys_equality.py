"""Plans train as Lightning's own loop trains the unsharded module; test_every_plan compares them with each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    ADAGRAD,
    ROW_WISE_ADAGRAD,
    SGD,
    Batch,
    Clicks,
    Mixed,
    Pooled,
    Sequenced,
    difference,
    fit,
    is_table,
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


def with_another_rate(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The tables' learning rate is off by one in a hundred."""
    arguments = {**optimizer["init_args"], "lr": optimizer["init_args"]["lr"] * 1.01}
    return unsharded({**optimizer, "init_args": arguments})


def without_one_gradient(optimizer: dict[str, Any]) -> dict[str, Any]:
    """One sample of one step is left out of the loss."""

    class Forgetful(Clicks):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            if self.global_step != 7:
                return super().training_step(batch, batch_idx)
            logits = self.network(batch)
            self.losses.append(self.loss_of(batch).item())
            return nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="none")[1:].mean()

    module = Forgetful(Mixed, in_backward=optimizer)
    return outcome(module, fit(module, "auto", max_epochs=3))


def with_a_missed_row(optimizer: dict[str, Any]) -> dict[str, Any]:
    """After the first epoch, the row that moved most is as it was before."""
    before = Clicks(Mixed).table_parameters()[0].detach().clone()

    class Lost(Clicks):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                table = self.table_parameters()[0].data
                row = int((table - before).abs().sum(1).argmax())
                table[row] = before[row]

    module = Lost(Mixed, in_backward=optimizer)
    return outcome(module, fit(module, "auto", max_epochs=3))


@pytest.mark.parametrize(
    "fault", [with_another_rate, without_one_gradient, with_a_missed_row], ids=lambda fault: fault.__name__
)
def test_a_fault_is_found_by_the_comparison_with_the_unsharded_module(
    reference: Reference, optimizer: dict[str, Any], fault: Any
) -> None:
    found = {line.split(":")[0] for line in reference.differences(fault(optimizer))}
    assert "losses" in found
    assert found >= {name for name, _ in Clicks(Mixed).named_parameters() if is_table(name)}


def all_in_one(optimizer: type[torch.optim.Optimizer], lr: float) -> Any:
    """One optimiser for dense parameters and tables: a user's who does not think of sharding."""
    return lambda module: optimizer(module.parameters(), lr=lr)  # type: ignore[call-arg]


IN_ONE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, SGD),
    "Adagrad": (torch.optim.Adagrad, ADAGRAD),
}


def as_ddp(rank: int, world_size: int) -> dict[str, Any]:
    """Of each optimiser: what differs from Lightning's DDP; of three more: losses and state with sharding."""
    results: dict[str, Any] = {}
    for name, (optimizer, config) in IN_ONE.items():
        configure = all_in_one(optimizer, config["init_args"]["lr"])

        def replicated(configure: Any = configure) -> dict[str, Any]:
            module = Clicks(Sequenced, optimizers=configure)
            found = outcome(module, fit(module, "ddp", max_epochs=3))
            # The optimiser's states are numbered among other parameters there.
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
