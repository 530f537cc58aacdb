"""Lightning's averages of weights over a module whose tables are sharded, against averages that the test computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_swa_avg_fn

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.recommender.strategy import RecsysPipelineStrategy
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    ADAGRAD,
    Clicks,
    Managed,
    Mixed,
    Pooled,
    Sequenced,
    fit,
    is_table,
    is_trained,
    loader,
    plans_of,
    recsys,
    state_of,
    trainer,
)
from tests.tiers import sampled, wanted

DECAY = 0.75
KINDS = {"people": "row_wise", "things": "column_wise", "tags": "data_parallel", "past": "table_wise"}


def kinds_of(network: Any) -> dict[str, str]:
    tables = {Pooled: ("people", "things"), Mixed: ("people", "things", "tags"), Sequenced: ("people", "past")}
    return {name: KINDS[name] for name in tables[network]}


def averaging() -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=DECAY)


def weights_of(module: pl.LightningModule) -> dict[str, Tensor]:
    """Whole tables, dense parameters and buffers: what the module has now. Every rank calls it."""
    strategy = module.trainer.strategy
    assert isinstance(strategy, RecsysPipelineStrategy)
    sharded = strategy.sharded_model
    dense = {name: value.detach().clone() for name, value in sharded.dense_parameters()}
    buffers = {name: value.clone() for name, value in module.named_buffers() if is_trained(name, value)}
    return {**{name: sharded.full_table(name) for name in sorted(sharded.tables)}, **dense, **buffers}


class ByHand(Callback):
    """Averages of the weights after each batch. Comes after the averaging callback, which reads and changes nothing."""

    def __init__(self, average_tables: bool) -> None:
        self.average_tables = average_tables
        self.averages: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.validated: list[list[str]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.weights = weights_of(pl_module)
        for name, value in self.weights.items():
            if is_table(name) and not self.average_tables:
                self.averages[name] = value
            elif name in self.averages:
                # The buffers of other ranks are their own until the first rank's are copied.
                self.averages[name] = DECAY * self.averages[name] + (1 - DECAY) * value
            else:
                self.averages[name] = value.clone()

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.averages:
            self.validated.append(self.differences(weights_of(pl_module), self.averages))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.weights:
            self.validated.append(self.differences(weights_of(pl_module), self.weights))

    @staticmethod
    def differences(values: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
        first = not dist.is_initialized() or dist.get_rank() == 0
        return [
            name
            for name, value in values.items()
            if (first or "running" not in name) and not torch.equal(value, expected[name])
        ]


def differences_by_hand(
    rank: int, world_size: int, network: Any, plans: tuple[str, ...], average_tables: bool
) -> dict[str, Any]:
    """Names of the weights that are not the averages in validations and at the end, or not the weights in between."""
    found = {}
    for plan in plans:
        module, by_hand = Clicks(network), ByHand(average_tables)
        strategy = recsys(plan, kinds_of(network), average_tables=average_tables)
        fit(
            module,
            strategy,
            val=loader(8 * world_size),
            callbacks=[averaging(), by_hand],
            max_epochs=2,
            val_check_interval=2,
        )
        assert len(by_hand.validated) >= 4
        at_the_end = by_hand.differences(weights_of(module), by_hand.averages)
        found[plan] = [name for names in (*by_hand.validated, at_the_end) for name in names]
    return found


NETWORKS = [(Pooled, True), (Mixed, True), (Mixed, False), (Sequenced, True)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", sampled(NETWORKS, lambda case: case[0] is Mixed))
def test_validation_and_the_trained_module_have_the_averages_to_the_bit(
    case: tuple[Any, bool], world_size: int, pytestconfig: pytest.Config
) -> None:
    network, average_tables = case
    plans = tuple(wanted(pytestconfig, plans_of(network), lambda plan: plan in ("prefetch", "compute_ahead")))
    for found in run_ranks(differences_by_hand, world_size, network, plans, average_tables):
        assert found == {plan: [] for plan in plans}


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "every step": averaging,
    "every other step, after some": lambda: EMAWeightAveraging(
        decay=DECAY, update_every_n_steps=2, update_starting_at_step=3
    ),
    "equal weights, without buffers": lambda: WeightAveraging(use_buffers=False, avg_fn=get_swa_avg_fn()),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_averages_of_all_weights_are_those_of_lightnings_own_loop(name: str) -> None:
    def trained(strategy: Any) -> dict[str, Any]:
        module = Clicks(Pooled, in_backward=ADAGRAD)
        used = fit(module, strategy, callbacks=[CALLBACKS[name]()], val=loader(8), max_epochs=2)
        return {"losses": module.losses, "validated": used.callback_metrics["val_loss"], **state_of(used)}

    reference = Reference.of(lambda: trained("auto"))
    ours = trained(recsys(optimizer=None, average_tables=True))
    fused = [name for name in ours if is_table(name) and not name.endswith("weight")]
    assert reference.differences({name: value for name, value in ours.items() if name not in fused}) == []


# ---------------------------------------------------------------------- checkpoints


class SaveAt(Callback):
    """Saves a checkpoint after a batch, or inside a validation, when the module has the averages."""

    def __init__(self, path: Path, batch: int, in_validation: bool = False) -> None:
        self.path, self.batch, self.in_validation = path, batch, in_validation

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not self.in_validation and trainer.global_step == self.batch:
            trainer.save_checkpoint(self.path)

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if self.in_validation and trainer.global_step == self.batch:
            trainer.save_checkpoint(self.path)


def resumed(
    rank: int, world_size: int, folder: Path, average_tables: bool, in_validation: bool, saves: bool
) -> list[str]:
    def run(*callbacks: Callback, **options: Any) -> dict[str, Any]:
        strategy = recsys("prefetch", kinds_of(Mixed), average_tables=average_tables, async_checkpoints=saves)
        module = Clicks(Mixed)
        used = fit(
            module, strategy, val=loader(8 * world_size), callbacks=[averaging(), *callbacks], max_epochs=2,
            val_check_interval=3, **options,
        )  # fmt: skip
        return state_of(used)

    whole = run(SaveAt(folder / "middle.ckpt", 3 if in_validation else 4, in_validation))
    again = run(ckpt_path=folder / "middle.ckpt")
    return [name for name in whole if not torch.equal(whole[name], again[name])]


@pytest.mark.parametrize(
    ("world_size", "average_tables", "in_validation", "saves"),
    [(1, True, False, False), (2, True, False, True), (2, False, True, False), (2, True, True, False)],
)
def test_a_run_resumes_in_mid_epoch_to_the_bit(
    world_size: int, average_tables: bool, in_validation: bool, saves: bool, tmp_path: Path
) -> None:
    for found in run_ranks(resumed, world_size, tmp_path, average_tables, in_validation, saves):
        assert found == []


def save_on_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    by_hand = ByHand(True)
    callbacks = [averaging(), by_hand, SaveAt(folder / "middle.ckpt", 4)]
    fit(Clicks(Mixed), recsys("base", kinds_of(Mixed), average_tables=True), callbacks=callbacks, max_steps=4)
    return by_hand.averages


def test_an_exported_checkpoint_and_an_evaluation_have_the_averages(tmp_path: Path) -> None:
    averages, *_ = run_ranks(save_on_ranks, 2, tmp_path)
    export_checkpoint(tmp_path / "middle.ckpt", tmp_path / "one.ckpt")
    exported = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert [name for name in averages if not torch.equal(exported[name], averages[name])] == []
    module = Clicks(Mixed)
    used = trainer(recsys(), callbacks=[averaging()])
    with pytest.warns(UserWarning, match="loading a checkpoint outside the 'fit' stage"):
        used.validate(module, loader(8), ckpt_path=tmp_path / "middle.ckpt", verbose=False)
    assert ByHand.differences(weights_of(module), averages) == []


@pytest.mark.parametrize("average_tables", [True, False])
def test_an_evaluation_after_training_has_the_averages_of_the_checkpoint_that_it_reads(
    average_tables: bool, tmp_path: Path
) -> None:
    module, callback, path = Clicks(Mixed), averaging(), tmp_path / "middle.ckpt"
    strategy = recsys("prefetch", average_tables=average_tables)
    used = fit(module, strategy, callbacks=[callback, SaveAt(path, 3)], max_epochs=2)
    expected = trainer(recsys()).validate(Clicks(Mixed), loader(8), ckpt_path=path, verbose=False)
    assert used.validate(module, loader(8), verbose=False) != expected
    for _ in range(2):
        assert used.validate(module, loader(8), ckpt_path=path, verbose=False) == expected
    assert used.test(module, loader(8), ckpt_path=path, verbose=False)[0]["test_loss"] == expected[0]["val_loss"]
    # Another module, and another trainer with the callback, are evaluated as they are.
    other = trainer(recsys()).validate(Clicks(Mixed), loader(8), verbose=False)
    assert used.validate(Clicks(Mixed), loader(8), verbose=False) == other
    assert trainer(recsys(), callbacks=[callback]).validate(module, loader(8), verbose=False) == expected


def test_averages_begin_with_the_weights_of_a_checkpoint_without_any(tmp_path: Path) -> None:
    fit(Clicks(), recsys(), max_epochs=1).save_checkpoint(tmp_path / "plain.ckpt")
    module, by_hand = Clicks(), ByHand(False)
    with pytest.warns(UserWarning, match="written without a callback that averages weights"):
        fit(module, recsys(), callbacks=[averaging(), by_hand], max_epochs=2, ckpt_path=tmp_path / "plain.ckpt")
    assert by_hand.differences(weights_of(module), by_hand.averages) == []


def test_tables_may_be_averaged_in_one_run_and_not_in_the_next(tmp_path: Path) -> None:
    def run(average_tables: bool, *callbacks: Callback, **options: Any) -> dict[str, Tensor]:
        strategy = recsys("base", average_tables=average_tables)
        return state_of(fit(Clicks(), strategy, callbacks=[averaging(), *callbacks], max_epochs=2, **options))

    expected = {tables: run(tables, SaveAt(tmp_path / f"{tables}.ckpt", 4)) for tables in (True, False)}
    found = run(False, ckpt_path=tmp_path / "True.ckpt")
    assert [name for name in found if not torch.equal(found[name], expected[False][name])] == []
    found = run(True, ckpt_path=tmp_path / "False.ckpt")
    different = [name for name in found if not torch.equal(found[name], expected[False][name])]
    assert different
    assert all(is_table(name) and name.endswith("weight") for name in different)


# ---------------------------------------------------------------------- what is refused, and other strategies


def dense_tied(module: Clicks) -> Clicks:
    """A dense layer under two names, the second of which is only an alias."""
    module.network.alias = module.network.over
    return module


def test_a_dense_parameter_with_two_names_has_its_average_under_both(tmp_path: Path) -> None:
    callbacks = [averaging(), SaveAt(tmp_path / "one.ckpt", 3)]
    fit(dense_tied(Clicks()), recsys(), callbacks=callbacks, max_steps=3)
    export_checkpoint(tmp_path / "one.ckpt", tmp_path / "file.ckpt")
    state = torch.load(tmp_path / "file.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(state["network.over.0.weight"], state["network.alias.0.weight"])


def test_the_callback_averages_whole_modules_again_under_another_strategy() -> None:
    def trained(first: Any) -> dict[str, Tensor]:
        callback = averaging()
        fit(Clicks(in_backward=ADAGRAD), first, callbacks=[callback], max_steps=3)
        again = state_of(fit(Clicks(in_backward=ADAGRAD), "auto", callbacks=[callback], max_steps=6))
        assert type(callback) is EMAWeightAveraging
        return again

    found, expected = trained(recsys(optimizer=None)), trained("auto")
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("network", "callbacks", "message"),
    [
        (Managed, [averaging], r"bags\.\S+people\.weight is of managed collision"),
        (Pooled, [], "average_tables is True, but the trainer has no callback"),
        (Pooled, [averaging, WeightAveraging], "at most one callback that averages weights, got 2"),
    ],
    ids=["managed collision", "no callback", "two callbacks"],
)
def test_what_cannot_be_averaged_is_refused(network: Any, callbacks: Any, message: str) -> None:
    module = Clicks(network)
    with pytest.raises(SetupError, match=message):
        fit(module, recsys("base", average_tables=True), callbacks=[make() for make in callbacks])
    assert module.losses == []
