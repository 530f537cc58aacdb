"""Checkpoints: training goes on from one as if it had not stopped, on any number of ranks; and what goes wrong."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.strategies.cases import (
    ADAGRAD,
    PLANS,
    ROW_WISE_ADAGRAD,
    SGD,
    Clicks,
    Mixed,
    Pooled,
    Sequenced,
    adam,
    difference,
    fit,
    loader,
    predictions,
    recsys,
    state_of,
    trainer,
)

SCHEDULE = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 5, "gamma": 0.5}}
KINDS = {"people": "row_wise", "past": "table_wise"}


def by_step(module: Clicks) -> Any:
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 5, 0.5), "interval": "step"}}


def all_in_one(module: Clicks) -> Any:
    """The tables too, since Lightning keeps nothing of an optimizer in backward."""
    return torch.optim.SGD(module.parameters(), lr=0.5)


def clicks() -> Clicks:
    return Clicks(Sequenced, optimizers=by_step)


def keeping(folder: Path, **options: Any) -> dict[str, Any]:
    """The trainer's arguments for keeping checkpoints in a folder."""
    return {
        "enable_checkpointing": True,
        "default_root_dir": folder,
        "callbacks": [ModelCheckpoint(folder, filename="{epoch}", **options)],
    }


def resumed_and_uninterrupted(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Two epochs at once, and one and one with a checkpoint between; other plans after it than before."""
    results = {}
    # These plans train the same: one run is what all are compared with.
    whole = clicks()
    expected = state_of(fit(whole, recsys(PLANS[0], KINDS, **arguments), max_epochs=2))
    for plan, next_plan in pairwise((*PLANS, PLANS[0])):
        first, second = clicks(), clicks()
        options = keeping(folder / plan)
        fit(first, recsys(plan, KINDS, **arguments), max_epochs=1, **options)
        strategy = recsys(next_plan, KINDS, **arguments)
        used = fit(second, strategy, max_epochs=2, ckpt_path=folder / plan / "epoch=0.ckpt")
        results[f"{plan}, then {next_plan}"] = {
            "losses": (whole.losses, first.losses + second.losses),
            "differs": difference(state_of(used), expected),
            "steps": used.global_step,
            "rates": strategy.sharded_model.learning_rates(),
        }
    return results


def check_resumed(results: dict[str, Any]) -> None:
    assert len(results) == len(PLANS)
    for name, result in results.items():
        uninterrupted, resumed = result["losses"]
        assert resumed == uninterrupted, name
        assert result["differs"] == [], name
        assert result["steps"] == len(uninterrupted)


def test_training_goes_on_from_a_checkpoint_with_a_schedule_of_the_tables_own(tmp_path: Path) -> None:
    check_resumed(resumed_and_uninterrupted(tmp_path, sparse_lr_scheduler=SCHEDULE))


@pytest.mark.parametrize("plan", ["serial", "prefetch"])
def test_what_was_in_flight_in_mid_epoch_is_trained_by_the_run_that_goes_on(plan: str, tmp_path: Path) -> None:
    whole, first, second = (Clicks(optimizers=all_in_one) for _ in range(3))
    expected = state_of(fit(whole, recsys(plan, optimizer=SGD), max_epochs=2))
    options = keeping(tmp_path, every_n_train_steps=4, save_top_k=-1)
    options["callbacks"][0].filename = "{step}"
    fit(first, recsys(plan, optimizer=SGD), max_epochs=1, **options)
    used = fit(second, recsys(plan, optimizer=SGD), max_epochs=2, ckpt_path=tmp_path / "step=4.ckpt")
    assert second.losses == whole.losses[4:]
    found = state_of(used)
    assert difference(found, {name: expected[name] for name in found}) == []


# ---------------------------------------------------------------------- another number of ranks


def on_two_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"resumed": resumed_and_uninterrupted(folder / "resumed")}
    used = fit(clicks(), recsys("prefetch", KINDS, ROW_WISE_ADAGRAD), **keeping(folder / "from two"))
    results["saved"] = state_of(used)
    used = fit(
        clicks(),
        recsys("base", KINDS, ROW_WISE_ADAGRAD),
        ckpt_path=folder / "from one" / "epoch=1.ckpt",
    )
    results["loaded"] = state_of(used)
    for name, network in (("another model", Pooled), ("other optimizers", Sequenced)):
        with pytest.raises(SetupError) as caught:
            fit(Clicks(network, optimizers=by_step), recsys(), ckpt_path=folder / "from one" / "epoch=1.ckpt")
        results[name] = str(caught.value)
    return results


def on_three_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Trains on from what two ranks left, with tables sharded in other ways."""
    kinds = {"people": "table_wise", "past": "row_wise"}
    path = folder / "from two" / "epoch=1.ckpt"
    loaded = state_of(fit(clicks(), recsys("prefetch", kinds, ROW_WISE_ADAGRAD), ckpt_path=path))
    used = fit(clicks(), recsys("prefetch", kinds, ROW_WISE_ADAGRAD), ckpt_path=path, max_epochs=3)
    used.save_checkpoint(folder / "from three")
    return {"loaded": loaded, "saved": state_of(used)}


def test_a_checkpoint_can_be_read_on_another_number_of_ranks(tmp_path: Path) -> None:
    used = fit(clicks(), recsys("serial", KINDS, ROW_WISE_ADAGRAD), **keeping(tmp_path / "from one"))
    from_one = state_of(used)
    ranks = run_ranks(on_two_ranks, 2, tmp_path)
    # Nothing is left to train after two epochs: what is loaded is what is there.
    used = fit(clicks(), recsys("prefetch", KINDS, ROW_WISE_ADAGRAD), ckpt_path=tmp_path / "from two" / "epoch=1.ckpt")
    from_two = state_of(used)
    export_checkpoint(tmp_path / "from two" / "epoch=1.ckpt", tmp_path / "file")
    alone = clicks()
    alone.load_state_dict(torch.load(tmp_path / "file", weights_only=True)["state_dict"])
    assert all(torch.equal(value, from_two[name]) for name, value in alone.state_dict().items())
    three = run_ranks(on_three_ranks, 3, tmp_path)
    kinds = {"people": "row_wise", "past": "table_wise"}
    path = tmp_path / "from three"
    used = fit(clicks(), recsys("base", kinds, ROW_WISE_ADAGRAD), ckpt_path=path, max_epochs=3)
    from_three = state_of(used)
    assert any("momentum1" in name for name in from_three)
    for results in three:
        assert difference(results["loaded"], from_two) == []
        assert difference(results["saved"], from_three) == []
        assert difference(results["saved"], from_two) != []
    for results in ranks:
        assert "missing in it: network.bags.embedding_bags.things.weight, " in results["another model"]
        assert "unexpected in it: network.history.embeddings.past.weight" in results["another model"]
        assert "of another size: network.over.0.weight ([8, 19], expected [8, 27])" in results["another model"]
        assert "of another size: state.network.bags.embedding_bags.people.weight." in results["other optimizers"]
        assert difference(results["loaded"], from_one) == []
        assert difference(from_two, results["saved"]) == []
        check_resumed(results["resumed"])


# ---------------------------------------------------------------------- Lightning's ways with checkpoints


def test_evaluation_reads_a_checkpoint(tmp_path: Path) -> None:
    used = fit(clicks(), recsys(), val=loader(8), **keeping(tmp_path))
    expected = used.callback_metrics["val_loss"].item()
    (found,) = trainer(recsys("base")).validate(clicks(), loader(8), str(tmp_path / "epoch=1.ckpt"), verbose=False)
    assert found["val_loss"] == expected
    read: Any = trainer(recsys("serial")).predict(clicks(), loader(8), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert torch.equal(torch.cat(read), predictions(used, used.lightning_module, loader(8)))
    before = state_of(used)
    (best,) = used.test(dataloaders=loader(8), ckpt_path="best", verbose=False)
    assert best["test_loss"] == expected
    assert difference(state_of(used), before) == []


def test_only_the_best_are_kept_and_the_last_may_be_a_link(tmp_path: Path) -> None:
    options = keeping(tmp_path, monitor="val_loss", save_top_k=2, save_last="link")
    fit(clicks(), recsys(), val=loader(8), max_epochs=4, **options)
    callback = options["callbacks"][0]
    names = {path.name for path in tmp_path.iterdir()}
    assert len(callback.best_k_models) == 2
    assert names == {"last.ckpt", *(Path(path).name for path in callback.best_k_models)}
    assert (tmp_path / "last.ckpt").is_symlink()


def test_a_checkpoint_may_hold_the_weights_only(tmp_path: Path) -> None:
    used = fit(clicks(), recsys(), **keeping(tmp_path, save_weights_only=True))
    path = tmp_path / "epoch=1.ckpt"
    keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert keys
    assert not any(key.startswith("tables.") for key in keys)
    expected = used.validate(dataloaders=loader(8), verbose=False)
    assert trainer(recsys()).validate(clicks(), loader(8), str(path), verbose=False) == expected
    with pytest.raises(KeyError, match="contains only the model"):
        fit(clicks(), recsys(), ckpt_path=path)


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "nothing' is not there, expected a folder"),
        (lambda folder: _ddp_checkpoint(folder), "is a file, expected a folder written under a recsys plan"),
        (lambda folder: folder, "is a folder without meta.pt"),
    ],
    ids=["nothing", "of another strategy", "another folder"],
)
def test_what_is_no_checkpoint_of_a_plan_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=message):
        fit(clicks(), recsys(), ckpt_path=make(tmp_path))


def _ddp_checkpoint(folder: Path) -> Path:
    used = fit(Clicks(in_backward=ADAGRAD), "auto", max_epochs=1)
    used.save_checkpoint(folder / "file.ckpt")
    return folder / "file.ckpt"


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    fit(Clicks(), recsys(), max_epochs=1).save_checkpoint(tmp_path / "pooled")
    missing = r"missing in it: network\.normalize\.bias, network\.normalize.* network\.weighted\..*; of another size"
    with pytest.raises(SetupError, match=f"does not fit the module: {missing}"):
        fit(Clicks(Mixed), recsys(), ckpt_path=tmp_path / "pooled")


def test_a_checkpoint_can_be_read_into_another_sharding(tmp_path: Path) -> None:
    split = {"people": "column_wise", "things": "data_parallel"}
    used = fit(Clicks(), recsys(kinds=split))
    used.save_checkpoint(tmp_path / "split")
    for kinds in ({"people": "data_parallel", "things": "row_wise"}, {"people": "row_wise", "things": "column_wise"}):
        again = fit(Clicks(), recsys(kinds=kinds), ckpt_path=tmp_path / "split")
        assert difference(state_of(again), state_of(used)) == []


def test_a_state_per_row_and_shard_needs_the_same_split_by_columns(tmp_path: Path) -> None:
    split = recsys(kinds={"people": "column_wise", "things": "row_wise"}, optimizer=ROW_WISE_ADAGRAD)
    fit(Clicks(), split).save_checkpoint(tmp_path / "split")
    whole = {"people": "table_wise", "things": "row_wise"}
    with pytest.raises(SetupError, match=r"of another size: state\..*people\.momentum1 \(\[48\], expected \[24\]\)"):
        fit(Clicks(), recsys(kinds=whole, optimizer=ROW_WISE_ADAGRAD), ckpt_path=tmp_path / "split")
    # To evaluate, the tables are enough.
    trainer(recsys(kinds=whole, optimizer=ROW_WISE_ADAGRAD)).validate(Clicks(), loader(8), str(tmp_path / "split"))


def test_a_module_may_have_more_than_a_checkpoint_where_it_is_not_strict(tmp_path: Path) -> None:
    class More(Pooled):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.full((1,), 7.0))

    used, path = trained(tmp_path)
    expected = used.validate(used.lightning_module, loader(8), verbose=False)
    module = Clicks(More)
    module.strict_loading = False
    assert trainer(recsys()).validate(module, loader(8), str(path), verbose=False) == expected
    assert dict(module.named_parameters())["network.extra"].item() == 7.0


def trained(folder: Path) -> tuple[pl.Trainer, Path]:
    used = fit(Clicks(), recsys(), max_epochs=1)
    used.save_checkpoint(folder / "kept")
    return used, folder / "kept"


@pytest.mark.parametrize("part", ["dcp.save", "torch.save"])
def test_a_write_that_breaks_leaves_what_was_there(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, path = trained(tmp_path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert before

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    target, attribute = (dcp.FileSystemWriter, "write_data") if part == "dcp.save" else (torch, "save")
    with monkeypatch.context() as patch:
        patch.setattr(target, attribute, broken)
        with pytest.raises(SetupError, match=r"kept' cannot be written: .*no space left on device"):
            used.save_checkpoint(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    used.save_checkpoint(path)
    assert {folder.name for folder in tmp_path.iterdir()} == {"kept"}


def resumed_on_ranks(rank: int, size: int, folder: str, kind: str) -> tuple[int, list[str]]:
    kinds = dict.fromkeys(("people", "things"), kind)
    whole = Clicks()
    fit(whole, recsys("prefetch", kinds), max_epochs=2)
    half = fit(Clicks(), recsys("prefetch", kinds), max_epochs=1)
    half.save_checkpoint(Path(folder) / "half.ckpt")
    module = Clicks()
    used = fit(module, recsys("prefetch", kinds), ckpt_path=Path(folder) / "half.ckpt", max_epochs=2)
    return used.global_step, [str(loss) for loss in module.losses if loss not in whole.losses]


def test_ranks_that_have_no_shard_of_a_table_go_on_too(tmp_path: Path) -> None:
    for steps, others in run_ranks(resumed_on_ranks, 2, str(tmp_path), "table_wise"):
        assert steps > 0
        assert others == []


def resumed_without_states(rank: int, world_size: int, folder: Path) -> list[str]:
    """Train under an optimizer that has no states, with each table on one rank, and read the checkpoint again."""
    arguments: dict[str, Any] = {"kinds": {"people": "table_wise", "things": "table_wise"}, "optimizer": SGD}
    saved = fit(Clicks(), recsys(**arguments), max_epochs=1)
    saved.save_checkpoint(folder / "saved.ckpt")
    loaded = fit(Clicks(), recsys(**arguments), max_epochs=1, ckpt_path=folder / "saved.ckpt")
    return difference(state_of(loaded), state_of(saved))


def test_ranks_without_shards_of_a_table_read_a_checkpoint_without_states(tmp_path: Path) -> None:
    assert run_ranks(resumed_without_states, 2, tmp_path) == [[], []]
