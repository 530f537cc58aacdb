"""Dynamic tables under a Trainer: every plan, checkpoints, other numbers of ranks, and ranks that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.modules.dynamic_modules import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    DynamicTable,
)
from tests.distributed import run_ranks
from tests.patience import HANG
from tests.recsys.dynamic.dynamic_cases import ADAM, rows_of, same
from tests.strategies.cases import ROW_WISE_ADAGRAD, WIDTH, Batch, Clicks, Rows, fit, loader, recsys, trainer
from tests.tiers import sampled_rows


class Dynamic(nn.Module):
    """Bags and sequences without a size."""

    def __init__(self, store: Path, **options: Any) -> None:
        super().__init__()
        of_module = ("existing_rows", "commit_every", "id_map_device")
        module_options = {key: options.pop(key) for key in of_module if key in options}
        options = {"cache_rows": 96, "embedding_dim": WIDTH, "initial": {"uniform": [-0.5, 0.5]}, **options}
        people = DynamicTable(name="people", feature_names=["user", "friend"], **options)
        past = DynamicTable(name="past", feature_names=["past"], **options)
        self.bags = DynamicEmbeddingBagCollection([people], store / "bags", seed=3, **module_options)
        self.history = DynamicEmbeddingCollection([past], store / "history", seed=3, **module_options)
        self.over = nn.Sequential(nn.Linear(3 + 3 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> Tensor:
        recent = torch.stack([row.sum(0) for row in self.history(batch.sparse)["past"].to_dense()])
        return self.over(torch.cat([batch.dense, recent, self.bags(batch.sparse).values()], dim=1))[:, 0]


def optimizer(module: Clicks) -> Any:
    return torch.optim.Adam(module.network.get_submodule("over").parameters(), lr=0.05)


def clicks(store: Path, **options: Any) -> Clicks:
    return Clicks(lambda: Dynamic(store, **options), optimizers=optimizer)


def state_of(used: pl.Trainer) -> dict[str, Any]:
    """All that training left."""
    sharded = used.strategy.sharded_model  # type: ignore[attr-defined]
    dense = {name: value.detach().clone() for name, value in sharded.dense_parameters()}
    return {"dense": dense, **rows_of(sharded)}


def run(store: Path, plan: str, sparse: Any = ROW_WISE_ADAGRAD, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of this rank, and everything that training left."""
    module = clicks(store, **options.pop("module", {}))
    try:
        strategy = recsys(plan, optimizer=sparse, **options.pop("strategy", {}))
        state = state_of(fit(module, strategy, options.pop("train", None), **options))
    finally:
        module.trainer.strategy.sharded_model.close()  # type: ignore[attr-defined]
    return module.losses, state


class Keeping(ModelCheckpoint):
    """Every so many steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder, filename="{step}", every_n_train_steps=steps, save_top_k=-1)


def resumed(rank: int, world_size: int, path: Path, sparse: Any) -> dict[str, Any]:
    """Two epochs at once; one and one, in the same store and in a new one; from a checkpoint of mid-epoch."""
    data = lambda: loader(24 * world_size, in_order=True)  # noqa: E731  # of each run its own
    options: dict[str, Any] = {"use_distributed_sampler": False, "enable_checkpointing": True, "module": {"ttl": 2}}
    whole = run(path / "whole", "prefetch", sparse, train=data(), **options, callbacks=[Keeping(path / "none", 100)])
    first = run(
        path / "first",
        "fused_sparse_dist",  # a checkpoint is written while the next batch is looked up already
        sparse,
        train=data(),
        **options,
        max_epochs=1,
        callbacks=[Keeping(path / "kept", 4)],
    )
    results = {"whole": whole}
    places = {"a new store": path / "second", "the same store, later than the checkpoint": path / "first"}
    for name, store in places.items():
        losses, state = run(
            store,
            "prefetch",
            sparse,
            train=data(),
            ckpt_path=path / "kept" / "step=4.ckpt",
            **options,
            callbacks=[Keeping(path / "none", 100)],
        )
        results[name] = (first[0][:4] + losses, state)
    return results


@pytest.mark.parametrize(
    ("world_size", "sparse"),
    sampled_rows(
        product((1, 2), (ROW_WISE_ADAGRAD, ADAM)),
        lambda case: (case[0] == 1) == (case[1] is ROW_WISE_ADAGRAD),
        lambda case: f"{case[0]}-{'adam' if case[1] is ADAM else 'row-wise adagrad'}",
    ),
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    world_size: int, sparse: Any, tmp_path: Path
) -> None:
    for results in run_ranks(resumed, world_size, tmp_path, sparse):
        whole = results.pop("whole")
        assert len(whole[0]) == 12
        for name, found in results.items():
            assert found[0] == whole[0], name
            assert same(found[1], whole[1]), name


class ManyIds(Rows):
    """More than a cache has rows for."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return {**row, "sparse": {key: ids + 24 * (index % 11) for key, ids in row["sparse"].items()}}


class Evicted(Callback):
    """Number of rows that have left the caches."""

    number = 0

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        modules = trainer.strategy.sharded_model.dynamic_rows.values()  # type: ignore[attr-defined]
        self.number = sum(cache.stats.evicted for rows in modules for cache in rows.caches.values())


def with_host_rows(rank: int, world_size: int, path: Path) -> list[Any]:
    """Without host rows, with some, and with ids on the device from a checkpoint that was written in the background."""

    def trained(name: str, module: dict[str, Any], *callbacks: Callback, **options: Any) -> Any:
        train = loader(24 * world_size, in_order=True, dataset=ManyIds(24 * world_size))
        module = {"cache_rows": 36 * world_size, "commit_every": 3, "ttl": 4, **module}
        options = {"use_distributed_sampler": False, "enable_checkpointing": True, **options}
        return run(path / name, "prefetch", train=train, module=module, callbacks=list(callbacks), **options)

    some: dict[str, Any] = {"host_rows": 10 * world_size}
    evicted = Evicted()
    plain = trained("plain", {}, Keeping(path / "none", 100))
    background = {"async_checkpoints": True}
    host = trained("host", some, Keeping(path / "kept", 4), evicted, strategy=background)
    some["id_map_device"] = "device"
    losses, state = trained("new", some, Keeping(path / "none", 100), ckpt_path=path / "kept" / "step=4.ckpt")
    return [plain, host, (plain[0][:4] + losses, state), evicted.number]


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_in_host_memory_and_ids_on_the_device_change_nothing(world_size: int, tmp_path: Path) -> None:
    for plain, host, again, evicted in run_ranks(with_host_rows, world_size, tmp_path):
        assert evicted > 20
        assert host[0] == plain[0] == again[0]
        assert same(host[1], plain[1])
        assert same(again[1], plain[1])


def one_epoch(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    callbacks = [Keeping(path / "kept", 6)]
    _, state = run(
        path / f"of {world_size}",
        "prefetch",
        train=loader(48, batch_size=8 // world_size, in_order=True),
        use_distributed_sampler=False,
        enable_checkpointing=True,
        max_epochs=1,
        callbacks=callbacks,
    )
    return state


def second_epoch(rank: int, world_size: int, path: Path, store: str) -> dict[str, Any]:
    _, state = run(
        path / store,
        "prefetch",
        train=loader(48, batch_size=8 // world_size, in_order=True),
        use_distributed_sampler=False,
        max_epochs=2,
        ckpt_path=path / "kept" / "step=6.ckpt",
    )
    return state


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: {name: value for state in states for name, value in state[key].items()} for key in states[0]}


def test_a_checkpoint_of_two_ranks_is_trained_on_by_one_in_the_same_folder(tmp_path: Path) -> None:
    run_ranks(one_epoch, 2, tmp_path)
    ((expected),) = (merged(run_ranks(second_epoch, 2, tmp_path, "of 2")),)
    found = merged(run_ranks(second_epoch, 1, tmp_path, "of 2"))
    for table in ("people", "past"):
        assert found[table].keys() == expected[table].keys()
        for id, columns in found[table].items():
            for one, other in zip(columns, expected[table][id], strict=True):
                assert torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------- a store that has rows


def test_rows_of_an_earlier_run_are_not_trained_on_unasked(tmp_path: Path) -> None:
    run_alone(tmp_path, "first")
    with pytest.raises(SetupError, match="holds rows that an earlier run has trained"):
        run_alone(tmp_path, "again")
    kept = run_alone(tmp_path, "kept", existing_rows="keep")
    forgotten = run_alone(tmp_path, "forgotten", existing_rows="forget")
    fresh = run_alone(tmp_path / "fresh", "fresh")
    assert same(forgotten, fresh)
    assert not same(kept, fresh)


class Untouched(Dataset[Any]):
    """Batches that nobody may ask for."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the data were asked for")


def refused_on_ranks(rank: int, world_size: int, store: Path) -> list[str]:
    untouched: Any = DataLoader(Untouched(), batch_size=None)
    run(store, "prefetch", max_epochs=1, train=loader(24 * world_size))

    def refusal(use: Any, **options: Any) -> str:
        module = clicks(store)
        used = trainer(recsys("prefetch", optimizer=ROW_WISE_ADAGRAD), **options)
        with pytest.raises(SetupError) as raised:
            use(used, module)
        used.strategy.sharded_model.close()  # type: ignore[attr-defined]
        return str(raised.value)

    return [
        refusal(lambda used, module: used.fit(module, untouched)),
        # In the check of a validation before training, and alone.
        refusal(lambda used, module: used.fit(module, untouched, loader(8)), num_sanity_val_steps=1),
        refusal(lambda used, module: used.validate(module, loader(8), verbose=False)),
    ]


def test_they_are_refused_on_every_rank_before_a_batch_is_asked_for(tmp_path: Path) -> None:
    for found in run_ranks(refused_on_ranks, 2, tmp_path):
        for said in found:
            assert said.startswith("the store of people holds rows that an earlier run has trained in ")
            assert "rank" not in said  # all say the same, once


def run_alone(store: Path, name: str, **module: Any) -> Any:
    return run(store, "prefetch", module=module, max_epochs=1)


def test_a_checkpoint_counts_whatever_was_to_become_of_rows_that_are_there(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True}
    train = {"train": loader(in_order=True)}
    whole = run(tmp_path / "whole", "prefetch", **train)
    run(tmp_path / "store", "prefetch", **train, **options, max_epochs=1, callbacks=[Keeping(tmp_path / "kept", 6)])
    for existing in ("forget", "keep", "refuse"):
        shutil.copytree(tmp_path / "store", tmp_path / existing)
        checkpoint = tmp_path / "kept" / "step=6.ckpt"
        module = {"existing_rows": existing}
        losses, state = run(tmp_path / existing, "prefetch", **train, module=module, ckpt_path=checkpoint)
        assert losses == whole[0][6:], existing
        assert same(state, whole[1]), existing


def test_a_checkpoint_whose_rows_are_damaged_is_refused_and_the_store_stays_as_it_was(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [Keeping(tmp_path / "kept", 6)]}
    run(tmp_path / "store", "prefetch", max_epochs=1, **options)
    checkpoint = tmp_path / "kept" / "step=6.ckpt"
    file = next((checkpoint / "rows" / "network.bags").glob("people.*.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SetupError, match=r"people\..*\.pt has \d+ bytes, expected \d+"):
        run(tmp_path / "other", "prefetch", ckpt_path=checkpoint)
    kept = run(tmp_path / "store", "prefetch", max_epochs=0, module={"existing_rows": "keep"})
    assert len(kept[1]["people"]) > 10


class Loaded(Clicks):
    """One that ``load_from_checkpoint`` can build."""

    def __init__(self, store: str) -> None:
        super().__init__(lambda: Dynamic(Path(store)), optimizers=optimizer)


def test_an_exported_file_is_loaded_without_rows_which_the_folder_brings(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [Keeping(tmp_path / "kept", 6)]}
    _, trained = run(tmp_path / "store", "prefetch", max_epochs=1, **options)
    checkpoint = tmp_path / "kept" / "step=6.ckpt"
    with pytest.warns(UserWarning, match=r"network\.bags, network\.history have no place in one file"):
        export_checkpoint(checkpoint, tmp_path / "whole.ckpt")
    assert "dynamic_rows" not in torch.load(tmp_path / "whole.ckpt", weights_only=True)
    module = Loaded.load_from_checkpoint(tmp_path / "whole.ckpt", store=str(tmp_path / "other"))
    dense = {name: value for name, value in module.state_dict().items() if ".over." in name}
    assert same(dense, trained["dense"])
    with pytest.raises(SetupError, match="must be sharded before it is called"):
        trainer("auto", max_epochs=1).fit(module, loader())
    used = trainer(recsys("prefetch", optimizer=ROW_WISE_ADAGRAD))
    used.validate(module, loader(12), ckpt_path=checkpoint, verbose=False)
    assert same(state_of(used), trained)
    used.strategy.sharded_model.close()  # type: ignore[attr-defined]


def test_an_evaluation_in_mid_epoch_changes_nothing(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", "prefetch")
    evaluated = run(tmp_path / "evaluated", "prefetch", val=loader(12), val_check_interval=2)
    assert same(plain, evaluated)


class Profile(Callback):
    """Asks for one in mid-training, whose losses do not count."""

    def __init__(self, batches: list[Any], tasks: list[str] | None = None) -> None:
        self.batches, self.tasks, self.result = batches, tasks, None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == 10:
            before, strategy = len(module.losses), trainer.strategy
            self.result = strategy.profile(self.batches, self.tasks, rounds=1, iterations=2)  # type: ignore[attr-defined]
            del module.losses[before:]


class AtOnce(Profile):
    """Asks for one before the first batch, and for another later."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            self.result = trainer.strategy.profile(self.batches, ["EmbPrefetch"], rounds=1, iterations=2)  # type: ignore[attr-defined]
            module.losses.clear()


def test_training_begins_as_without_a_profile_before_it(tmp_path: Path) -> None:
    found = []
    for name, callbacks in (("without", []), ("with", [AtOnce(list(loader(24, in_order=True)))])):
        train = loader(64, in_order=True, ids=400)
        found.append(run(tmp_path / name, "prefetch", train=train, callbacks=callbacks, module={"cache_rows": 128}))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def profiled(rank: int, world_size: int, path: Path, plan: str, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    found: list[Any] = []
    profile, evictions = Profile(list(loader(24 * world_size, in_order=True, ids=400))[rank::world_size]), Evicted()
    for name, callbacks in (("without", [evictions]), ("with", [profile])):
        given = {key: dict(value) if isinstance(value, dict) else value for key, value in options.items()}
        train = loader(64 * world_size, in_order=True, ids=400)
        given.update(train=train, use_distributed_sampler=False, callbacks=callbacks, max_epochs=1)
        found.append(run(path / name, plan, **given))
    assert evictions.number > 0
    return found[0], found[1], profile.result


PROFILED_UNDER = ("serial", "prefetch", "semi_sync")
PROFILED: dict[str, dict[str, Any]] = {
    "sgd": {"sparse": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}, "module": {"cache_rows": 128}},
    "adam, commits": {"sparse": ADAM, "module": {"commit_every": 1, "cache_rows": 128}},
    "commits in the background": {
        "module": {"commit_every": 2, "cache_rows": 128},
        "strategy": {"async_checkpoints": True},
    },
    "host rows": {"module": {"host_rows": 100, "cache_rows": 128}},
    "ids on the device": {"module": {"id_map_device": "device", "cache_rows": 128}},
    "ttl, admission": {"module": {"ttl": 3, "admission_threshold": 2, "cache_rows": 128}},
}


@pytest.mark.parametrize(
    ("world_size", "plan", "name"),
    sampled_rows(
        [*product((1,), PROFILED_UNDER, PROFILED), (2, "prefetch", "adam, commits")],
        lambda case: case[0] == 1 and case[1] == "prefetch",
        lambda case: "-".join(map(str, case)),
    ),
)
def test_training_goes_on_to_the_bit_after_a_profile(world_size: int, plan: str, name: str, tmp_path: Path) -> None:
    for without, found, result in run_ranks(profiled, world_size, tmp_path, plan, PROFILED[name]):
        assert found[0] == without[0]
        assert same(found[1], without[1])
        assert result.tasks["EmbPrefetch"].exposed is not None


# ---------------------------------------------------------------------- killed


class Kill(Callback):
    """The process ends at once, in a batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_run(path: str, step: int, resume: str, in_background: bool) -> None:
    """What the process does that is killed."""
    callbacks = [Keeping(Path(path) / "kept", 2), *([Kill(step)] if step else [])]
    module = clicks(Path(path) / "store", commit_every=3)
    used = fit(
        module,
        recsys("prefetch", optimizer=ROW_WISE_ADAGRAD, async_checkpoints=in_background),
        loader(24, in_order=True),
        ckpt_path=resume or None,
        enable_checkpointing=True,
        callbacks=callbacks,
    )
    torch.save((module.losses, state_of(used)), Path(path) / "state.pt")


def start(path: Path, step: int, resume: Path | None, in_background: bool) -> int:
    call = f"killed_run({str(path)!r}, {step}, {str(resume or '')!r}, {in_background})"
    code = f"from tests.scenarios.recommenders.test_dynamic_embeddings import killed_run; {call}"
    done = subprocess.run([sys.executable, "-c", code], timeout=HANG, capture_output=True, text=True)
    if done.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(done.stderr[-4000:])
    return done.returncode


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_to_the_same_end(in_background: bool, tmp_path: Path) -> None:
    assert start(tmp_path / "whole", 0, None, False) == 0
    assert start(tmp_path / "killed", 7, None, in_background) == -signal.SIGKILL
    # The checkpoint of step 6 waited for it.
    checkpoint = tmp_path / "killed" / "kept" / "step=4.ckpt"
    assert start(tmp_path / "killed", 0, checkpoint, in_background) == 0
    (losses, whole), (rest, found) = (
        torch.load(tmp_path / name / "state.pt", weights_only=False) for name in ("whole", "killed")
    )
    assert rest == losses[4:]
    assert same(found, whole)
