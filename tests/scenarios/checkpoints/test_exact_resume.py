"""A run that is stopped at any batch and taken up from its checkpoint trains on as if it had never stopped."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lightning_pipe.engine import SetupError
from lightning_pipe.loops import PipelineTrainingEpochLoop
from tests.loops.models import FEATURES, Net, Rows, Stream, trainer


class Augmented(Dataset[Tensor]):
    """Rows with noise of three kinds of generators; the first value stays the index."""

    def __init__(self, length: int = 24) -> None:
        self.rows = Rows(length).rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.zeros(FEATURES)
        noise[1:4] = torch.tensor([torch.rand(()).item(), random.random(), float(numpy.random.rand())])
        return self.rows[index] + noise


class Single(Rows):
    """A row at a time, as a batch."""

    def __init__(self) -> None:
        super().__init__(10)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index].clone()[None]


class Resuming(Net):
    """Draws in every hook that runs ahead, too; any loader."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader
        self.validated: list[int] = []
        self.ended: list[int] = []
        self.done_when_saved: dict[Moment, dict[str, list[int]]] = {}

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(len(self.trained))

    def on_train_epoch_end(self) -> None:
        self.ended.append(len(self.trained))

    def train_dataloader(self) -> Any:
        return self.loader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            batch = _first(batch)
            batch[:, 4] += torch.rand(len(batch))
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            batch[:, 5] += torch.rand(len(batch)) + random.random()
        return batch


class NeedsSteps(Resuming):
    """Makes its loaders before a checkpoint is read, as schedulers do that end with training."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def _first(batch: Any) -> Tensor:
    """Of a combined batch what is there, together."""
    if isinstance(batch, Tensor):
        return batch
    return torch.cat([one for one in batch.values() if one is not None])


# A hook, and how many batches were trained when it is called.
Moment = tuple[str, int]


class Saves(Callback):
    """Writes a checkpoint at each of some moments."""

    def __init__(self, paths: Mapping[Moment, Path]) -> None:
        self.paths = dict(paths)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._called("on_train_epoch_start", trainer, module)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self._called("on_train_batch_start", trainer, module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self._called("on_train_batch_end", trainer, module)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._called("on_validation_end", trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._called("on_train_epoch_end", trainer, module)

    def _called(self, hook: str, trainer: pl.Trainer, module: Any) -> None:
        moment = hook, len(module.trained)
        if path := self.paths.pop(moment, None):
            trainer.save_checkpoint(path)
            # Of the hook itself nothing comes again; the module's own is yet to be called.
            own = [len(module.trained)] if hook == "on_train_epoch_end" else []
            module.done_when_saved[moment] = {"validated": list(module.validated), "ended": module.ended + own}


def at_end(batches: int, path: Path) -> Saves:
    """Writes one behind so many batches."""
    return Saves({("on_train_batch_end", batches): path})


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def plain(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Augmented(), **{"batch_size": 4, "shuffle": True, **options})


def own_generator() -> DataLoader[Tensor]:
    return plain(generator=torch.Generator().manual_seed(3))


def drawn_with_replacement() -> DataLoader[Tensor]:
    dataset = Augmented()
    return plain(shuffle=False, sampler=RandomSampler(dataset, replacement=True, num_samples=70))


def weighted() -> DataLoader[Tensor]:
    return plain(shuffle=False, sampler=WeightedRandomSampler(torch.arange(1.0, 25.0).tolist(), 24))


class Shuffled(BatchSampler):
    """Batches of a user's own, in an order that Python's generator draws."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        return iter(batches)


def own_batches() -> DataLoader[Tensor]:
    dataset = Augmented()
    sampler = Shuffled(RandomSampler(dataset), batch_size=4, drop_last=False)
    return DataLoader(dataset, batch_sampler=sampler)


class Counted(Sampler[int]):
    """Counts its epochs, and has generators of NumPy and Python of its own."""

    def __init__(self) -> None:
        self.epoch, self.python, self.numpy = 0, random.Random(2), numpy.random.default_rng(3)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = [int(index) for index in self.numpy.permutation(24)]
        self.python.shuffle(order)
        return iter(order[self.epoch :] + order[: self.epoch])


def own_sampler() -> DataLoader[Tensor]:
    return plain(shuffle=False, sampler=Counted())


def without_batches() -> DataLoader[Tensor]:
    return DataLoader(Single(), batch_size=None, shuffle=True)


def in_workers() -> DataLoader[Tensor]:
    # Without noise: what a dataset draws in workers begins anew with them.
    return DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=2)


def combined(mode: Any) -> CombinedLoader:
    return CombinedLoader({"long": plain(), "short": DataLoader(Augmented(10), batch_size=4, shuffle=True)}, mode)


class Counting:
    """An iterable with a state, which gives rows in an order of its own."""

    def __init__(self, sized: bool = True, length: int = 6) -> None:
        self.at, self.length = 0, length
        if sized:
            self.__class__ = _Sized

    def __iter__(self) -> Iterator[Tensor]:
        self.at %= self.length
        while self.at < self.length:
            self.at += 1
            row = Rows().rows[self.at * 3].clone()[None]
            row[:, 1] += torch.rand(())
            yield row

    def state_dict(self) -> dict[str, int]:
        return vars(self)  # the live one

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class _Sized(Counting):
    def __len__(self) -> int:
        return self.length


LOADERS: dict[str, Any] = {
    "shuffled": plain,
    "in order": lambda: plain(shuffle=False),
    "own generator": own_generator,
    "with replacement": drawn_with_replacement,
    "weighted": weighted,
    "own batches": own_batches,
    "own sampler": own_sampler,
    "no batches": without_batches,
    "workers": in_workers,
    "combined, cycling": lambda: combined("max_size_cycle"),
    "combined, shortest": lambda: combined("min_size"),
    "combined, longest": lambda: combined("max_size"),
    "stateful": Counting,
    "stateful, without a length": lambda: Counting(sized=False),
}


def final(module: Net) -> list[Tensor]:
    return [one.detach().clone() for one in module.parameters()]


def pipelined(**options: Any) -> pl.Trainer:
    made = trainer(**{"max_epochs": 3, **options})
    PipelineTrainingEpochLoop.install(made)
    return made


def undisturbed(loader: Any, kind: type[Resuming] = Resuming, **options: Any) -> Resuming:
    seed(1)
    module = kind(loader)
    pipelined(**options).fit(module)
    return module


@cache
def undisturbed_once(name: str, kind: Any = Resuming, **options: Any) -> Resuming:
    return undisturbed(LOADERS[name], kind, **options)


def saving(
    loader: Any, folder: Path, moments: Iterable[Moment], kind: type[Resuming] = Resuming, **options: Any
) -> tuple[Resuming, dict[Moment, Path]]:
    """A run that writes a checkpoint at each moment."""
    seed(1)
    before = kind(loader)
    paths = {(hook, batches): folder / f"{hook}-{batches}.ckpt" for hook, batches in moments}
    pipelined(callbacks=[Saves(paths)], **options).fit(before)
    assert sorted(folder.iterdir()) == sorted(paths.values())
    return before, paths


def resumed(loader: Any, path: Path, kind: type[Resuming] = Resuming, **options: Any) -> Resuming:
    """A run that goes on from a checkpoint with other seeds."""
    seed(99)
    after = kind(loader)
    pipelined(**options).fit(after, ckpt_path=path, weights_only=True)
    return after


def check(whole: Resuming, before: Resuming, after: Resuming, moment: Moment) -> None:
    _, batches = moment
    assert before.trained == whole.trained
    assert after.trained == whole.trained[batches:]
    assert after.losses == whole.losses[batches:]
    # What was done when the checkpoint was written is not done again, and all else is.
    for name, done in before.done_when_saved[moment].items():
        assert [batches + count for count in getattr(after, name)] == getattr(whole, name)[len(done) :], name
    for one, other in zip(final(after), final(whole), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Resuming) for name in LOADERS),
        *((name, NeedsSteps) for name in ("shuffled", "own sampler", "stateful")),
    ],
)
def test_training_goes_on_with_the_very_next_batch_to_the_same_bits(name: str, kind: Any, tmp_path: Path) -> None:
    loader = LOADERS[name]
    whole = undisturbed_once(name, kind)
    in_epoch = len(whole.trained) // 3
    counts = {in_epoch, in_epoch + 2}  # between and within epochs
    if name in ("shuffled", "stateful"):
        counts |= {1, in_epoch - 1, 3 * in_epoch - 1}
    before, paths = saving(loader, tmp_path, [("on_train_batch_end", count) for count in sorted(counts)], kind)
    for moment, path in paths.items():
        check(whole, before, resumed(loader, path, kind), moment)


@pytest.mark.parametrize(("length", "stop_after"), [(5, 4), (7, 2), (23, 2)])
def test_what_was_read_ahead_of_an_iterator_is_trained_in_the_next_epoch(length: int, stop_after: int) -> None:
    class Skipping(Resuming):
        """Leaves an epoch behind so many batches; the batch that it is asked about then is lost, as in Lightning."""

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == stop_after else None

    rows = iter([row.clone()[None] for row in Rows(length).rows])
    module = Skipping(lambda: rows)
    pipelined(limit_val_batches=0).fit(module)
    skipped = range(stop_after, length, stop_after + 1)
    assert [batch[0] for batch in module.trained] == [index for index in range(length) if index not in skipped][
        : 3 * stop_after
    ]


def test_a_loader_without_a_state_begins_anew_with_lightnings_warning(tmp_path: Path) -> None:
    def loader() -> DataLoader[Tensor]:
        return DataLoader(Stream(), batch_size=4)

    before = Resuming(loader)
    pipelined(callbacks=[at_end(2, tmp_path / "a.ckpt")], limit_train_batches=6).fit(before)
    after = Resuming(loader)
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        pipelined(limit_train_batches=6).fit(after, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert after.trained[:4] == before.trained[:4]


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("made anew", Resuming),
        ("shared generator", Resuming),
        ("shared sampler", Resuming),
        ("shared sampler", NeedsSteps),
    ],
)
def test_samplers_of_reloaded_loaders_are_where_they_would_be(kind: str, base: Any, tmp_path: Path) -> None:
    class Module(base):
        def __init__(self) -> None:
            super().__init__(None)
            self.generator = torch.Generator().manual_seed(3)
            self.sampler = Counted()

        def train_dataloader(self) -> Any:
            if kind == "shared sampler":
                return plain(shuffle=False, sampler=self.sampler)
            return plain(generator=self.generator) if kind == "shared generator" else own_generator()

    def fitted(number: int, callbacks: Any = (), ckpt_path: Path | None = None) -> Resuming:
        seed(number)
        module = Module()
        used = pipelined(callbacks=list(callbacks), reload_dataloaders_every_n_epochs=1, limit_val_batches=0)
        used.fit(module, ckpt_path=ckpt_path, weights_only=True)
        return module

    hooks = {"on_train_epoch_end": (6, 12), "on_train_epoch_start": (6, 12), "on_train_batch_end": (8, 14)}
    moments = [(hook, batches) for hook, counts in hooks.items() for batches in counts]
    paths = {moment: tmp_path / f"{moment}.ckpt" for moment in moments}
    whole, before = fitted(1), fitted(1, [Saves(paths)])
    for moment, path in paths.items():
        check(whole, before, fitted(99, ckpt_path=path), moment)


def test_the_users_loader_stays_as_it_was(tmp_path: Path) -> None:
    loader = plain()
    sampler = loader.batch_sampler
    module = Resuming(lambda: loader)
    pipelined().fit(module)
    assert type(loader) is DataLoader
    assert not hasattr(loader, "state_dict")
    assert loader.batch_sampler is sampler


def test_a_checkpoint_goes_from_lightnings_loop_to_this_one_and_back(tmp_path: Path) -> None:
    for first, second in [(trainer, pipelined), (pipelined, trainer)]:
        path = tmp_path / f"{first.__name__}.ckpt"
        module = Resuming(plain)
        first(callbacks=[Saves({("on_train_epoch_end", 6): path})], limit_val_batches=0).fit(module)
        following = Resuming(plain)
        second(limit_val_batches=0, max_epochs=3).fit(following, ckpt_path=path, weights_only=True)
        assert len(following.trained) == 12


def test_other_loaders_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    pipelined(callbacks=[at_end(2, tmp_path / "a.ckpt")]).fit(Resuming(lambda: combined("min_size")))
    with pytest.raises(SetupError, match=r"states of 2 train dataloader.s., got 1"):
        pipelined().fit(Resuming(plain), ckpt_path=tmp_path / "a.ckpt", weights_only=True)


def test_a_checkpoint_in_the_middle_of_an_accumulation_says_what_it_lacks(tmp_path: Path) -> None:
    for batches, path in [(3, tmp_path / "middle.ckpt"), (4, tmp_path / "stepped.ckpt")]:
        used = pipelined(callbacks=[at_end(batches, path)], accumulate_grad_batches=2, max_epochs=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            used.fit(Resuming(plain))
        said = [str(one.message) for one in caught if "in the middle of an accumulation" in str(one.message)]
        assert len(said) == (batches == 3)
        assert not said or "after 3 batches" in said[0]
