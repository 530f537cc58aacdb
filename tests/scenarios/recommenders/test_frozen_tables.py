"""Modules whose tables are all frozen are looked up without gradients; other frozen tables are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.scenarios.recommenders.test_dynamic_embeddings import clicks
from tests.strategies.cases import (
    IDS,
    PLANS,
    SGD,
    WIDTH,
    Batch,
    Clicks,
    Managed,
    Mixed,
    Pooled,
    Processed,
    difference,
    fit,
    loader,
    outcome,
    recsys,
    state_of,
)
from tests.tiers import wanted


def _bags(name: str, features: list[str], pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=WIDTH, num_embeddings=IDS, feature_names=features, pooling=pooling
    )


class WithFrozen(nn.Module):
    """Pooled tables and a table of sequences that are frozen, before a table that is trained."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[_bags("people", ["user", "friend"]), _bags("things", ["item"], PoolingType.MEAN)]
        )
        self.history = EmbeddingCollection(
            tables=[EmbeddingConfig(name="past", embedding_dim=WIDTH, num_embeddings=IDS, feature_names=["past"])]
        )
        self.weighted = EmbeddingBagCollection(tables=[_bags("tags", ["tag"])], is_weighted=True)
        self.over = nn.Sequential(nn.Linear(3 + 5 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
        for module in (self.bags, self.history, *([] if trained else [self.weighted])):
            module.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        past = self.history(batch.sparse)["past"]
        fixed = [torch.stack([row.sum(0) for row in past.to_dense()]), self.bags(batch.sparse).values()]
        is_trained = next(self.bags.parameters()).requires_grad
        assert all(output.requires_grad == is_trained for output in fixed)
        parts = [batch.dense, *fixed, self.weighted(batch.tags)["tag"]]
        return self.over(torch.cat(parts, dim=1))[:, 0]


def in_one(module: Clicks) -> torch.optim.Optimizer:
    """An optimizer of all parameters: of a user who thinks of neither sharding nor freezing."""
    return torch.optim.SGD(module.parameters(), lr=0.5)


def frozen_values() -> dict[str, Tensor]:
    named = Clicks(WithFrozen).named_parameters()
    return {name: parameter.detach() for name, parameter in named if not parameter.requires_grad}


# Options of the trainer, and of the strategy. A norm over all gradients must leave frozen tables out.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clipped": ({"gradient_clip_val": 0.05}, {}),
    "accumulated": ({"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, {"accumulate_tables": "window"}),
}


def _reference(trainer_options: dict[str, Any], batch_size: int) -> Reference:
    def unsharded() -> dict[str, Any]:
        module = Clicks(WithFrozen, optimizers=in_one)
        return outcome(module, fit(module, "auto", loader(batch_size=batch_size), max_epochs=2, **trainer_options))

    return Reference.of(unsharded)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_plan_trains_the_rest_as_lightnings_own_loop_does(options: str) -> None:
    trainer_options, strategy_options = OPTIONS[options]
    found: dict[str, dict[str, Tensor]] = {}
    losses: dict[str, list[float]] = {}
    for plan in PLANS:
        module = Clicks(WithFrozen, optimizers=in_one)
        strategy = recsys(plan, optimizer=SGD, **strategy_options)
        found[plan] = state_of(fit(module, strategy, loader(), max_epochs=2, **trainer_options))
        losses[plan] = module.losses
        assert losses[plan] == losses["serial"], plan
        assert difference({**found["serial"], **frozen_values()}, found[plan]) == [], plan
    assert _reference(trainer_options, 4).differences({"losses": losses["serial"], **found["serial"]}) == []


KINDS = {
    "by table": {"people": "table_wise", "things": "table_wise", "past": "table_wise", "tags": "table_wise"},
    "by row": {"people": "row_wise", "things": "row_wise", "past": "row_wise", "tags": "table_wise"},
    "by column": {"people": "column_wise", "things": "column_wise", "past": "column_wise", "tags": "row_wise"},
    "replicated": {"people": "data_parallel", "things": "data_parallel", "past": "table_wise", "tags": "data_parallel"},
}
SCHEDULE = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 100}}
OFTEN = ("serial", "compute_ahead")
# Sharding, plan, further options of the strategy, and of the trainer.
ON_RANKS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    **{f"{kind}, {plan}": (kind, plan, {}, "plain") for kind in KINDS for plan in PLANS},
    "dedup": ("by row", "prefetch", {"dedup": True}, "plain"),
    "replicas": ("by row", "prefetch", {"replicas": 2}, "plain"),
    "scheduled": ("by row", "prefetch", {"sparse_lr_scheduler": SCHEDULE}, "plain"),
    **{f"clipped, {kind}": (kind, "prefetch", {}, "clipped") for kind in ("by column", "replicated")},
    "accumulated, replicated": ("replicated", "prefetch", {}, "accumulated"),
}


def on_rank(rank: int, world_size: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in cases:
        kind, plan, options, trainer = ON_RANKS[name]
        trainer_options, strategy_options = OPTIONS[trainer]
        module = Clicks(WithFrozen, optimizers=in_one)
        strategy = recsys(plan, KINDS[kind], SGD, **options, **strategy_options)
        used = fit(module, strategy, loader(in_order=True), max_epochs=2, **trainer_options)
        assert set(strategy.sharded_model.learning_rates()) == {"network.weighted.embedding_bags.tags.weight"}
        # Outside of training as well, where no plan calls the module.
        bags: Any = module.network.get_submodule("bags")
        assert not bags(next(iter(loader())).sparse).values().requires_grad
        found[name] = outcome(module, used)
    return found


def test_two_ranks_train_the_rest_as_one_process_with_a_batch_of_both(pytestconfig: pytest.Config) -> None:
    cases = wanted(pytestconfig, ON_RANKS, lambda case: ON_RANKS[case][1] in (*OFTEN, "prefetch"))
    first, second = run_ranks(on_rank, 2, cases)
    references = {options: _reference(trainer_options, 8) for options, (trainer_options, _) in OPTIONS.items()}
    for name in cases:
        mean = [sum(losses) / 2 for losses in zip(first[name].pop("losses"), second[name].pop("losses"), strict=True)]
        assert difference(first[name], {**second[name], **frozen_values()}) == [], name
        reference = references[ON_RANKS[name][3]]
        assert reference.differences({"losses": mean, **first[name]}) == [], name


class NotANumber(Clicks):
    """Has a loss that is not a number, whose gradients are not numbers either."""

    def loss_of(self, batch: Batch) -> Tensor:
        return super().loss_of(batch) * torch.nan


def test_gradients_that_are_not_numbers_leave_frozen_tables_unchanged_to_the_bit() -> None:
    module = NotANumber(WithFrozen, optimizers=in_one)
    found = state_of(fit(module, recsys("prefetch", {"people": "data_parallel"}, SGD)))
    assert found["network.weighted.embedding_bags.tags.weight"].isnan().any()
    assert difference(frozen_values(), {name: found[name] for name in frozen_values()}) == []


def test_a_model_whose_tables_are_all_frozen_needs_no_optimizer_of_tables() -> None:
    def unsharded() -> dict[str, Any]:
        module = Clicks(lambda: WithFrozen(trained=False))
        return outcome(module, fit(module, "auto"))

    module = Clicks(lambda: WithFrozen(trained=False))
    used = fit(module, recsys("compute_ahead", optimizer=None))
    assert Reference.of(unsharded).differences(outcome(module, used)) == []
    assert not any(parameter.requires_grad for parameter in module.table_parameters())


# ---------------------------------------------------------------------- what is refused


def _some_tables(module: Clicks) -> None:
    module.network.get_submodule("bags.embedding_bags.people").requires_grad_(False)


def _all_tables(module: Clicks) -> None:
    for parameter in module.table_parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize(
    ("network", "freeze"), [(Mixed, _some_tables), (Managed, _all_tables), (Processed, _all_tables)]
)
def test_other_frozen_tables_are_refused_by_name_with_the_way_out(network: Any, freeze: Any) -> None:
    module = Clicks(network)
    freeze(module)
    names = ", ".join(name for name, parameter in module.named_parameters() if not parameter.requires_grad)
    with pytest.raises(SetupError, match=rf"tables? {re.escape(names)} cannot be frozen .*module of their own"):
        fit(module, recsys())


def test_dynamic_tables_are_refused_when_they_are_frozen_before_and_after_sharding(tmp_path: Path) -> None:
    module = clicks(tmp_path)
    _all_tables(module)
    with pytest.raises(SetupError, match=r"tables network\.bags\S+people\S+, network\.history\S+ cannot be frozen"):
        fit(module, recsys())
    module = clicks(tmp_path)
    try:
        fit(module, recsys())
        with pytest.raises(SetupError, match=r"table network\.bags\S+people\S+ cannot be frozen after sharding"):
            module.freeze()
    finally:
        module.trainer.strategy.sharded_model.close()  # type: ignore[attr-defined]


class Freezing(Callback):
    """Freezes a module of tables, or the reverse, when the second epoch begins."""

    def __init__(self, name: str, unfreeze: bool, by_lightning: bool) -> None:
        self.name, self.unfreeze, self.by_lightning = name, unfreeze, by_lightning

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            tables = module.get_submodule(self.name)
            if self.by_lightning:
                (BaseFinetuning.make_trainable if self.unfreeze else BaseFinetuning.freeze)(tables)
            else:
                tables.requires_grad_(self.unfreeze)


# Model, sharding of its tables, its module, and whether that is frozen.
LATE: list[tuple[Any, str | None, str, bool]] = [
    *((Pooled, kind, "network.bags", False) for kind in ("table_wise", "row_wise", "column_wise", "data_parallel")),
    (Managed, None, "network.bags", False),
    (Managed, None, "network.history", False),
    *((WithFrozen, kind, "network.bags", True) for kind in ("table_wise", "data_parallel")),
    (WithFrozen, None, "network.history", True),
]


def freeze_late(rank: int, world_size: int) -> list[str]:
    messages = []
    for network, kind, name, is_frozen in LATE:
        for by_lightning in (False, True):
            module = Clicks(network)
            strategy = recsys("prefetch", dict.fromkeys(("people", "things"), kind) if kind else None)
            callback = Freezing(name, is_frozen, by_lightning)
            with pytest.raises(SetupError) as caught:
                fit(module, strategy, loader(in_order=True), max_epochs=2, callbacks=[callback])
            messages.append(str(caught.value))
    return messages


def test_tables_that_are_frozen_or_unfrozen_between_epochs_are_refused_by_name_on_every_rank() -> None:
    expected = [(name, is_frozen) for _, _, name, is_frozen in LATE for _ in range(2)]
    for messages in run_ranks(freeze_late, 2):
        for (name, is_frozen), message in zip(expected, messages, strict=True):
            assert re.match(rf"table {name}\.\S+ cannot be {'un' if is_frozen else ''}frozen", message)


# ---------------------------------------------------------------------- checkpoints


def test_a_run_with_frozen_tables_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = Clicks(WithFrozen)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    expected = state_of(fit(whole, recsys(), max_epochs=1, callbacks=[saving], enable_checkpointing=True))
    resumed = Clicks(WithFrozen)
    used = fit(resumed, recsys("compute_ahead"), max_epochs=1, ckpt_path=tmp_path / "epoch=0-step=4.ckpt")
    assert resumed.losses == whole.losses[4:]
    assert difference(expected, state_of(used)) == []


@pytest.mark.parametrize("was_frozen", [False, True])
def test_other_frozen_tables_than_in_a_checkpoint_are_refused_and_may_start_with_its_values(
    was_frozen: bool, tmp_path: Path
) -> None:
    def other(is_frozen: bool) -> Clicks:
        module = Clicks(WithFrozen)
        if not is_frozen:
            module.requires_grad_(True)
        return module

    path = tmp_path / "saved"
    used = fit(other(was_frozen), recsys())
    used.save_checkpoint(path)
    saved = state_of(used)
    with pytest.raises(SetupError, match=r"does not fit the module.*people.*init_from"):
        fit(other(not was_frozen), recsys(), max_epochs=2, ckpt_path=path)

    module = other(not was_frozen)
    start = {"path": str(path), "optimizer_states": "reset"}
    found = state_of(fit(module, recsys(init_from=start), loader(4)))  # one batch
    fixed = set(frozen_values())
    kept = {name for name in fixed if torch.equal(found[name], saved[name])}
    assert kept == (set() if was_frozen else fixed)
    looked_up = set(torch.unique(next(iter(loader(4))).sparse["past"].values()).tolist())
    past = "network.history.embeddings.past.weight"
    others = [row for row in range(IDS) if row not in looked_up]
    assert torch.equal(found[past][others], saved[past][others])  # rows that the batch does not have
