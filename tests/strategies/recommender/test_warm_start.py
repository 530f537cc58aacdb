"""Warm starts: which values a new run starts with, what is refused, and when nothing is read."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_pipe.cli.main import main
from lightning_pipe.engine import SetupError
from tests.strategies.cases import (
    ADAGRAD,
    ROW_WISE_ADAGRAD,
    SGD,
    WIDTH,
    Batch,
    Clicks,
    Rows,
    difference,
    fit,
    loader,
    recsys,
    state_of,
    trainer,
)

PEOPLE, THINGS = (f"network.bags.embedding_bags.{name}.weight" for name in ("people", "things"))
KINDS = {"people": "table_wise", "things": "row_wise"}


FEATURES = {"people": "user", "things": "item", "friends": "friend"}


class Shop(nn.Module):
    """Tables of sizes of one's own; each is looked up for a feature of its name.

    Args:
        rows: number of rows of each table.
        width: columns of the tables.
        hidden: width of the dense part.
        bags: name of the module that holds the tables.
        fill: what ``init_fn`` fills tables with that are on the meta device; None for PyTorch's values on the CPU.
    """

    def __init__(
        self,
        rows: dict[str, int],
        *,
        width: int = WIDTH,
        hidden: int = 8,
        bags: str = "bags",
        fill: float | None = None,
    ) -> None:
        super().__init__()

        def constant(values: Tensor) -> None:
            nn.init.constant_(values, fill or 0.0)

        configs = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=width,
                num_embeddings=count,
                feature_names=[FEATURES[name]],
                init_fn=None if fill is None else constant,
            )
            for name, count in rows.items()
        ]
        self.held_as = bags
        setattr(self, bags, EmbeddingBagCollection(configs, device=torch.device("cpu" if fill is None else "meta")))
        self.over = nn.Sequential(nn.Linear(3 + width * len(rows), hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, batch: Batch) -> Tensor:
        values = getattr(self, self.held_as)(batch.sparse).values()
        return self.over(torch.cat([batch.dense, values], dim=1))[:, 0]


class Spread(Rows):
    """The same rows, with ids of tables of up to 36 rows."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return {**row, "sparse": {key: (ids * 5 + index) % 36 for key, ids in row["sparse"].items()}}


def shop(people: int = 24, things: int = 24, **options: Any) -> Clicks:
    return Clicks(lambda: Shop({"people": people, "things": things}, **options))


def kept(folder: Path, module: Clicks | None = None, **options: Any) -> dict[str, Tensor]:
    """Values of a run whose checkpoint is in the folder."""
    used = fit(shop() if module is None else module, recsys(kinds=options.pop("kinds", KINDS), **options))
    used.save_checkpoint(folder)
    return tables_of(used)


def tables_of(used: pl.Trainer) -> dict[str, Tensor]:
    """All but the states of dense optimizers."""
    return {name: value for name, value in state_of(used).items() if not name.startswith("optimizer ")}


def started(start: Any, module: Clicks | None = None, steps: int = 0, **options: Any) -> dict[str, Tensor]:
    """Values of a new run after so many steps."""
    strategy = recsys(options.pop("plan", "prefetch"), options.pop("kinds", KINDS), init_from=start, **options)
    return tables_of(fit(shop() if module is None else module, strategy, max_steps=steps))


def dense_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if ".over." in name}


def refusal(start: Any, module: Clicks | None = None, **options: Any) -> str:
    with pytest.raises(SetupError) as caught:
        started(start, module, **options)
    return str(caught.value)


# ---------------------------------------------------------------------- the same model


# ---------------------------------------------------------------------- tables that have changed


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("row_wise", ADAGRAD), ("column_wise", ROW_WISE_ADAGRAD), ("data_parallel", ADAGRAD)]
)
def test_new_rows_of_a_grown_table_keep_their_initial_values_and_have_no_state(
    kind: str, optimizer: Any, tmp_path: Path
) -> None:
    kinds = dict.fromkeys(("people", "things"), kind)
    before = kept(tmp_path / "kept", kinds=kinds, optimizer=optimizer)
    found = started(tmp_path / "kept", shop(people=36, fill=0.25), kinds=kinds, optimizer=optimizer)
    assert torch.equal(found[PEOPLE][:24], before[PEOPLE])
    assert (found[PEOPLE][24:] == 0.25).all()
    old, new = before[f"{PEOPLE} momentum1"], found[f"{PEOPLE} momentum1"]
    if old.dim() == 1:  # of each column shard all rows
        old, new = (state.view(-1, rows).T for state, rows in ((old, 24), (new, 36)))
    assert old.any()
    assert torch.equal(new[:24], old)
    assert not new[24:].any()
    rest = {name: value for name, value in before.items() if not name.startswith(PEOPLE)}
    assert difference({name: found[name] for name in rest}, rest) == []


def test_training_goes_on_as_if_the_values_had_been_set_by_hand(tmp_path: Path) -> None:
    kinds = dict.fromkeys(("people", "things"), "row_wise")
    before = kept(tmp_path / "kept", kinds=kinds)
    by_hand = shop(people=36)
    for name, parameter in by_hand.named_parameters():
        parameter.data[: len(before[name])] = before[name]

    class Restore(pl.Callback):
        """States of the tables' optimizers, which exist only once these are sharded."""

        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            states = trainer.strategy.sharded_model.fused_optimizer.state_dict()["state"]  # type: ignore[attr-defined]
            for name, state in states.items():
                for key, value in state.items():
                    stored = before[f"{name} {key.rpartition('.')[2]}"]
                    (shard,) = value.local_shards()
                    shard.tensor[: len(stored)].copy_(stored)

    def data() -> Any:
        return loader(dataset=Spread(24), in_order=True)

    expected = tables_of(fit(by_hand, recsys(kinds=kinds), data(), callbacks=[Restore()]))
    module = shop(people=36)
    found = tables_of(fit(module, recsys(kinds=kinds, init_from=tmp_path / "kept"), data()))
    assert module.losses == by_hand.losses
    assert difference(found, expected) == []
    assert not torch.equal(found[PEOPLE][24:], shop(people=36).state_dict()[PEOPLE][24:])  # new rows were trained


def test_a_table_with_fewer_rows_is_refused_unless_it_may_be_cut(tmp_path: Path) -> None:
    kinds = dict.fromkeys(("people", "things"), "column_wise")
    before = kept(tmp_path / "kept", kinds=kinds, optimizer=ROW_WISE_ADAGRAD)
    said = refusal(tmp_path / "kept", shop(people=16), kinds=kinds, optimizer=ROW_WISE_ADAGRAD)
    assert f"fewer rows are expected of table {PEOPLE} (24 rows in it, now 16)." in said
    assert "Increase num_embeddings, or set smaller_tables='cut'" in said
    cut = {"path": tmp_path / "kept", "smaller_tables": "cut"}
    found = started(cut, shop(people=16), kinds=kinds, optimizer=ROW_WISE_ADAGRAD)
    assert torch.equal(found[PEOPLE], before[PEOPLE][:16])
    old, new = before[f"{PEOPLE} momentum1"].view(2, 24), found[f"{PEOPLE} momentum1"].view(2, 16)
    assert torch.equal(new, old[:, :16])


def test_another_embedding_dim_is_refused(tmp_path: Path) -> None:
    kept(tmp_path / "kept")
    said = refusal({"path": tmp_path / "kept", "dense": "matching"}, shop(width=16))
    assert f"table {PEOPLE} has the shape [24, 8] in it, expected 16 columns" in said
    assert f"table {THINGS} has" in said
    assert said.count("Use the checkpoint's embedding_dim, or another name") == 1


def test_what_is_new_grown_moved_or_dropped_is_told_in_one_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = kept(tmp_path / "kept")
    module = Clicks(lambda: Shop({"people": 30, "friends": 24}, bags="tables"))
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    moved, new = (f"network.tables.embedding_bags.{name}.weight" for name in ("people", "friends"))
    with caplog.at_level(logging.INFO):
        found = started(tmp_path / "kept", module, kinds={"people": "row_wise", "friends": "row_wise"})
    assert torch.equal(found[moved][:24], before[PEOPLE])
    assert torch.equal(found[moved][24:], initial[moved][24:])
    assert torch.equal(found[f"{moved} momentum1"][:24], before[f"{PEOPLE} momentum1"])
    assert torch.equal(found[new], initial[new])
    assert not found[f"{new} momentum1"].any()
    assert difference(dense_of(found), dense_of(before)) == []
    (message,) = [one.getMessage() for one in caplog.records if "A new run starts" in one.getMessage()]
    assert message == (
        "A new run starts with 1 table(s) (with the states of their optimizers) and 4 other values of the checkpoint"
        f" '{tmp_path / 'kept'}': grown, with initial values in new rows: {moved} (24 rows in it, now 30); renamed:"
        f" {PEOPLE} -> {moved}; new, with initial values: {new}; dropped: {THINGS}"
    )


# ---------------------------------------------------------------------- dense values and optimizers


def test_dense_values_of_another_shape_are_refused_unless_they_may_start_new(tmp_path: Path) -> None:
    before = kept(tmp_path / "kept")
    said = refusal(tmp_path / "kept", shop(hidden=6))
    assert "network.over.0.weight (shape [8, 19] in it, expected [6, 19])" in said
    assert "Set dense='matching'" in said
    module = shop(hidden=6)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    found = started({"path": tmp_path / "kept", "dense": "matching"}, module)
    assert torch.equal(found["network.over.0.weight"], initial["network.over.0.weight"])
    assert torch.equal(found["network.over.2.bias"], before["network.over.2.bias"])
    assert torch.equal(found[PEOPLE], before[PEOPLE])


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (
            ADAGRAD,
            SGD,
            r"trained by torch.optim.Adagrad with people.momentum1, expected torch.optim.SGD with no states",
        ),
        (ADAGRAD, ROW_WISE_ADAGRAD, r"expected torchrec.optim.RowWiseAdagrad with people.momentum1"),
    ],
    ids=["adagrad to sgd", "adagrad to row-wise adagrad"],
)
def test_states_of_another_optimizer_are_refused(was: Any, now: Any, message: str, tmp_path: Path) -> None:
    kept(tmp_path / "kept", optimizer=was)
    said = refusal(tmp_path / "kept", optimizer=now)
    assert message in said
    assert said.count("Set optimizer_states='reset'") == 1
    started({"path": tmp_path / "kept", "optimizer_states": "reset"}, optimizer=now)


def test_the_two_classes_of_one_kernel_are_one_optimizer(tmp_path: Path) -> None:
    before = kept(tmp_path / "kept")
    other = {"class_path": "torchrec.optim.Adagrad", "init_args": {"lr": 0.1, "eps": 1e-10}}
    assert difference(started(tmp_path / "kept", optimizer=other), before) == []


def test_a_state_per_row_and_column_shard_needs_the_same_columns(tmp_path: Path) -> None:
    kept(tmp_path / "kept", kinds={"people": "column_wise", "things": "row_wise"}, optimizer=ROW_WISE_ADAGRAD)
    said = refusal(tmp_path / "kept", shop(people=48), optimizer=ROW_WISE_ADAGRAD)
    # Two column shards of 24 rows are as many numbers as one of 48.
    assert f"table {PEOPLE} has the state people.momentum1 of shape [48] in it, expected [24]" in said
    assert (
        "Split tables into the same number of column shards as in the checkpoint. Set optimizer_states='reset'" in said
    )


def test_a_checkpoint_of_weights_alone_has_no_states_to_keep(tmp_path: Path) -> None:
    used = fit(shop(), recsys(kinds=KINDS))
    used.save_checkpoint(tmp_path / "kept", weights_only=True)
    assert "has no states of the tables' optimizers. Set optimizer_states='reset'" in refusal(tmp_path / "kept")
    found = started({"path": tmp_path / "kept", "optimizer_states": "reset"})
    assert torch.equal(found[PEOPLE], tables_of(used)[PEOPLE])


# ---------------------------------------------------------------------- when nothing is read


def test_a_resumed_checkpoint_wins_and_the_other_is_not_read(tmp_path: Path) -> None:
    kept(tmp_path / "kept")
    whole, first = shop(), shop()
    expected = fit(whole, recsys(kinds=KINDS, init_from=tmp_path / "kept"), max_epochs=2)
    fit(first, recsys(kinds=KINDS, init_from=tmp_path / "kept"), max_epochs=1).save_checkpoint(tmp_path / "half")
    shutil.rmtree(tmp_path / "kept")
    second = shop()
    strategy = recsys(kinds=KINDS, init_from=tmp_path / "kept")
    used = fit(second, strategy, ckpt_path=tmp_path / "half", max_epochs=2)
    assert first.losses + second.losses == whole.losses
    assert difference(state_of(used), state_of(expected)) == []
    used.fit_loop.max_epochs = 3
    used.fit(second, loader())  # the module still has no other values to start with


def test_a_job_that_restarts_reads_it_only_without_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    kept(tmp_path / "kept")
    runs = []
    for folder, epochs in (("whole", (2,)), ("halves", (1, 2))):
        losses: list[float] = []
        for most in epochs:
            module = shop()
            saving = ModelCheckpoint(tmp_path / folder, save_last=True)
            options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "max_epochs": most}
            fit(module, recsys(init_from=tmp_path / "kept"), ckpt_path="last", **options)
            losses += module.losses
        runs.append(losses)
    assert len(runs[0]) == 12
    assert runs[0] == runs[1]


def test_a_second_fit_goes_on_with_the_values_of_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(tmp_path / "kept")
    module = shop()
    used = fit(module, recsys(kinds=KINDS, init_from=tmp_path / "kept"), max_epochs=1)
    trained = tables_of(used)
    shutil.rmtree(tmp_path / "kept")
    with caplog.at_level(logging.INFO):
        again = fit(module, recsys(kinds=KINDS, init_from=tmp_path / "kept"), max_steps=0)
    assert difference(tables_of(again), trained) == []
    assert "is not read, since the module has been used before" in caplog.text
    with pytest.raises(
        SetupError, match=r"with init_from=WarmStartOptions\(.*but this one has init_from=WarmStartOptions\(.*other"
    ):
        fit(module, recsys(kinds=KINDS, init_from=tmp_path / "other"), max_steps=0)


def test_an_evaluation_before_training_starts_with_the_values_too(tmp_path: Path) -> None:
    used = fit(shop(), recsys(kinds=KINDS))
    used.save_checkpoint(tmp_path / "kept")
    (expected,) = used.validate(used.lightning_module, loader(8), verbose=False)
    module = shop()
    again = trainer(recsys(kinds=KINDS, init_from=tmp_path / "kept"))
    assert again.validate(module, loader(8), verbose=False) == [expected]
    shutil.rmtree(tmp_path / "kept")
    again.fit(module, loader())
    assert len(module.losses) == 12


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "init_from.path is ''; expected the path or URL"),
        (
            7,
            "init_from is 7; expected a mapping of path, optimizer_states, dense, smaller_tables, or a"
            " WarmStartOptions",
        ),
        ({"path": "kept", "optimizer_states": "new"}, "init_from.optimizer_states is 'new'; expected one of 'keep'"),
        ("s3://me:secret@bucket/kept", r"contains a password(?!.*secret)"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_before_training(given: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        recsys(init_from=given)


CONFIGURATION = """
seed_everything: 1
model: {class_path: tests.strategies.recommender.test_warm_start.YamlShop}
data: {class_path: tests.strategies.recommender.test_warm_start.YamlData}
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  use_distributed_sampler: false
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_pipe.strategies.RecsysPipelineStrategy
    init_args:
      plan: base
      sparse_optimizer: {class_path: torch.optim.Adagrad, init_args: {lr: 0.1}}
      init_from: {path: kept, optimizer_states: reset}
"""


class YamlShop(Clicks):
    def __init__(self) -> None:
        super().__init__(lambda: Shop({"people": 36, "things": 24}))

    def on_train_start(self) -> None:
        sharded = self.trainer.strategy.sharded_model  # type: ignore[attr-defined]
        torch.save({name: sharded.full_table(name) for name in sharded.tables}, "found.pt")


class YamlData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


def test_a_configuration_may_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = kept(tmp_path / "kept")
    Path("fit.yaml").write_text(CONFIGURATION)
    assert main(["fit", "--config", "fit.yaml"]) == 0
    assert torch.equal(torch.load("found.pt", weights_only=True)[PEOPLE][:24], before[PEOPLE])
