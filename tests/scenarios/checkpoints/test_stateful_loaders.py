"""Loaders with a state of their own continue from a checkpoint as if the run had never stopped.

A run is compared with the undisturbed one from checkpoints within epochs and, above all, between them: there the
loader's own state does not say whether its iterator has ended, or is replaced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pipe.strategies import PipelineStrategy
from tests.distributed import run_ranks
from tests.loops.models import Rows, trainer
from tests.scenarios.checkpoints.test_exact_resume import (
    Augmented,
    Moment,
    Resuming,
    Saves,
    check,
    pipelined,
    plain,
    seed,
)


class Rewinding(IterableDataset[Tensor]):
    """Begins anew in each iteration but the first after a load, when its first item is asked for."""

    def __init__(self, length: int = 24) -> None:
        self.at, self.length, self.loaded = 0, length, False

    def __iter__(self) -> Iterator[Tensor]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        while self.at < self.length:
            self.at += 1
            yield Rows().rows[self.at - 1].clone()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.loaded = state["at"], True


class Endless(IterableDataset[Tensor]):
    """A stream that every iteration continues."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.at += 1
            yield Rows(240).rows[self.at % 240].clone()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Plain:
    """A user's own loader, which begins anew in each iteration but the first after a load."""

    def __init__(self) -> None:
        self.at, self.loaded = 0, False

    def __iter__(self) -> Iterator[Tensor]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        return self._batches()

    def _batches(self) -> Iterator[Tensor]:
        while self.at < 6:
            self.at += 1
            yield Rows().rows[self.at * 3].clone()[None]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.loaded = state["at"], True


def shuffled(length: int = 24, **options: Any) -> Any:
    return StatefulDataLoader(Augmented(length), **{"batch_size": 4, "shuffle": True, **options})


def stream(dataset: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=4)


def own_generator() -> Any:
    return shuffled(generator=torch.Generator().manual_seed(3))


def without_a_state() -> Any:
    """Of a sampler that has none: its order is what it drew when the iterator was made."""
    return shuffled(shuffle=False, sampler=RandomSampler(Augmented(), replacement=True, num_samples=24))


class Popping(Sampler[int]):
    """Has no state, and draws each index when it is asked for it, from a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(7)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        left = list(range(24))
        while left:
            yield left.pop(self.generator.randrange(len(left)))


def combined(long: Any, short: Any, mode: Any) -> CombinedLoader:
    return CombinedLoader({"long": long, "short": short}, mode)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "own generator": own_generator,
    "sampler without a state": without_a_state,
    "sampler with a generator": lambda: shuffled(shuffle=False, sampler=Popping()),
    "rewinding stream": lambda: stream(Rewinding()),
    "endless stream": lambda: stream(Endless()),
    "user's": Plain,
    "longest, beside PyTorch's": lambda: combined(plain(), shuffled(10), "max_size"),
    "longest, of streams": lambda: combined(stream(Rewinding()), stream(Rewinding(12)), "max_size"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole epochs": {},
    "limited": {"limit_train_batches": 4},
    "reloaded every second": {"reload_dataloaders_every_n_epochs": 2},
}
CASES = [
    ("shuffled", "whole epochs"),
    ("shuffled", "skipped"),
    ("own generator", "limited"),
    ("sampler without a state", "whole epochs"),
    ("sampler with a generator", "whole epochs"),
    ("rewinding stream", "whole epochs"),
    ("rewinding stream", "limited"),
    ("endless stream", "skipped"),
    ("user's", "whole epochs"),
    ("shuffled", "reloaded every second"),
    ("longest, beside PyTorch's", "whole epochs"),
    ("longest, of streams", "whole epochs"),
]
# From these at every moment; from the others within an epoch and at its very end.
AT_EVERY_MOMENT = {("shuffled", "whole epochs"), ("rewinding stream", "limited")}


class Skipping(Resuming):
    """Leaves each epoch before its fifth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


def run(
    number: int, loader: str, options: str, moments: dict[Moment, Path] | None = None, path: Path | None = None
) -> Resuming:
    """Train three epochs from a seed, and write a checkpoint at each moment, or continue from one."""
    seed(number)
    module = (Skipping if options == "skipped" else Resuming)(LOADERS[loader])
    given = OPTIONS.get(options, {}) | {"limit_val_batches": 0, "callbacks": [Saves(moments or {})]}
    pipelined(**given).fit(module, ckpt_path=path, weights_only=True)
    return module


@cache
def undisturbed(loader: str, options: str) -> Resuming:
    return run(1, loader, options)


@pytest.mark.parametrize(("loader", "options"), CASES)
def test_a_run_continues_from_a_checkpoint_within_or_between_epochs(loader: str, options: str, tmp_path: Path) -> None:
    whole = undisturbed(loader, options)
    in_epoch = len(whole.trained) // 3
    assert len(whole.trained) == 3 * in_epoch
    moments: list[Moment] = [("on_train_batch_end", in_epoch), ("on_train_batch_end", in_epoch + 2)]
    moments += [(hook, in_epoch) for hook in ("on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start")]
    if (loader, options) in AT_EVERY_MOMENT:
        counts = 1, in_epoch - 1, in_epoch + 1, 2 * in_epoch, 2 * in_epoch + 1
        moments += [("on_train_batch_end", count) for count in counts]
        moments += [("on_train_epoch_end", 2 * in_epoch), ("on_train_batch_start", in_epoch + 2)]
    paths = {(hook, count): tmp_path / f"{hook}-{count}.ckpt" for hook, count in moments}
    before = run(1, loader, options, paths)
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())
    for moment, path in paths.items():
        check(whole, before, run(99, loader, options, path=path), moment)


def test_a_stream_continues_after_the_last_batch_taken_of_an_epoch_that_was_cut_short() -> None:
    """Lightning loses what it has read ahead; here neither that nor what a plan reads ahead is lost."""
    found = [batch[0] for batch in undisturbed("endless stream", "skipped").trained]
    assert found == [1, 5, 9, 13, 21, 25, 29, 33, 41, 45, 49, 53]


def test_samples_that_workers_load_are_trained_once_in_every_epoch(tmp_path: Path) -> None:
    def loader() -> Any:
        return StatefulDataLoader(Rows(12), batch_size=4, shuffle=True, num_workers=1)

    paths = {("on_train_batch_end", count): tmp_path / f"{count}.ckpt" for count in (2, 3)}
    seed(1)
    whole = Resuming(loader)
    pipelined(max_epochs=2, limit_val_batches=0, callbacks=[Saves(paths)]).fit(whole)
    for (_, count), path in paths.items():
        seed(99)
        after = Resuming(loader)
        pipelined(max_epochs=2, limit_val_batches=0).fit(after, ckpt_path=path, weights_only=True)
        assert after.trained == whole.trained[count:]


class Saving(Callback):
    """Writes checkpoints within epochs and at their end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, used: Any, module: Any, *args: Any) -> None:
        used.save_checkpoint(self.folder / f"{used.global_step}.ckpt")

    def on_train_epoch_end(self, used: Any, module: Any) -> None:
        used.save_checkpoint(self.folder / f"epoch {used.current_epoch}.ckpt")


def test_a_checkpoint_that_a_continued_run_writes_draws_nothing(tmp_path: Path) -> None:
    def fitted(number: int, path: Path | None = None) -> Resuming:
        seed(number)
        module = Resuming(LOADERS["longest, beside PyTorch's"])
        (tmp_path / str(number)).mkdir(exist_ok=True)
        pipelined(limit_val_batches=0, callbacks=[Saving(tmp_path / str(number))]).fit(
            module, ckpt_path=path, weights_only=True
        )
        return module

    whole = fitted(1)
    in_epoch = len(whole.trained) // 3
    # The last batch of an epoch: the end of that epoch is still to come, with its checkpoint.
    after = fitted(99, tmp_path / "1" / f"{in_epoch}.ckpt")
    assert after.trained == whole.trained[in_epoch:]
    assert after.losses == whole.losses[in_epoch:]


RANKS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: StatefulDataLoader(Rows(24), batch_size=3, shuffle=True),
    "sampler with a generator": lambda: StatefulDataLoader(Rows(24), batch_size=3, sampler=Popping()),
}


def train_and_resume(
    rank: int, world_size: int, loader: str, folder: Path, names: list[str]
) -> tuple[list[Any], dict[str, list[Any]]]:
    def fitted(number: int, path: Path | None = None) -> list[Any]:
        seed(number + rank)  # no rank draws what another does
        module = Resuming(RANKS[loader])
        saves = [Saving(folder)] if path is None else []
        used = trainer(
            max_epochs=2, limit_val_batches=0, callbacks=saves, strategy=PipelineStrategy(), devices=world_size
        )
        used.fit(module, ckpt_path=path, weights_only=True)
        return module.trained

    whole = fitted(1)
    return whole, {name: fitted(50, folder / f"{name}.ckpt") for name in names}


@pytest.mark.parametrize("loader", RANKS)
def test_several_ranks_train_all_rows_once_in_every_epoch_and_continue(loader: str, tmp_path: Path) -> None:
    names = ["3", "4", "epoch 0", "5"]
    found = run_ranks(train_and_resume, 2, loader, tmp_path, names)
    for epoch in (0, 1):
        batches = [batch for whole, _ in found for batch in whole[4 * epoch : 4 * epoch + 4]]
        assert sorted(row for batch in batches for row in batch) == list(range(24))
    for whole, resumed in found:
        for name, trained in resumed.items():
            assert trained == whole[4 if name == "epoch 0" else int(name) :], name


def test_a_split_is_that_of_the_run_before_where_both_are_seeded_alike(tmp_path: Path) -> None:
    def loader() -> Any:
        part, _ = torch.utils.data.random_split(Rows(24), [12, 12])
        return torch.utils.data.DataLoader(part, batch_size=4, shuffle=True)

    def fitted(path: Path | None = None) -> Resuming:
        seed(5)
        module = Resuming(loader)
        saves = Saves({("on_train_batch_end", 4): tmp_path / "4.ckpt"} if path is None else {})
        pipelined(limit_val_batches=0, callbacks=[saves]).fit(module, ckpt_path=path, weights_only=True)
        return module

    whole = fitted()
    assert fitted(tmp_path / "4.ckpt").trained == whole.trained[4:]
