"""What Lightning's Trainer and its callbacks offer works with sharded tables too, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipe.engine import SetupError
from tests.rounding import Reference
from tests.scenarios.trainer import test_features as plain
from tests.scenarios.trainer.test_features import FEATURES, Clock, Feature, clock, train
from tests.strategies import cases
from tests.strategies.cases import SGD, Batch, Clicks, difference, loader, recsys, state_of

__all__ = ["clock"]


def of_all(module: Clicks) -> Any:
    """One optimizer for tables and the rest, as an unsharded module has it."""
    return torch.optim.SGD(module.parameters(), lr=0.5)


class Net(Clicks):
    """Says of its training what the plain tests' module says."""

    def __init__(self, optimizers: Callable[[Any], Any] = of_all) -> None:
        super().__init__(optimizers=optimizers)
        self.trained: list[list[float]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.trained.append(batch.dense[:, 0].tolist())
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(batch.label))
        return loss

    def train_dataloader(self) -> Any:
        return loader(24, shuffle=True)


class Combined(Net):
    """Tables are fed by one of the two loaders: by the one that is never without a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["b"], batch_idx)


class Tuned(Net):
    lr = 0.5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        network: Any = self.network
        network.over = torch.compile(network.over, backend="aot_eager")


class Failing(Net):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if len(self.losses) == 9:
            raise KeyError("no such column")
        return super().training_step(batch, batch_idx)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, length: int) -> None:
        self.rows = cases.Rows(length)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


def stream(length: int) -> DataLoader[Any]:
    return DataLoader(Stream(length), 4, collate_fn=cases.collate)


def combined(mode: Any) -> Callable[[], CombinedLoader]:
    return lambda: CombinedLoader({"a": loader(12), "b": loader(24)}, mode)


def plateau(module: Clicks) -> Any:
    optimizer = of_all(module)
    schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": "step", "monitor": "train_loss_step"},
    }


# What a run needs of its own here; the others are options of the trainer, and callbacks.
OWN: dict[str, dict[str, Any]] = {
    "the shortest of two loaders": {"module": Combined, "train": combined("min_size")},
    "the longest of two loaders": {"module": Combined, "train": combined("max_size")},
    "the longest of two loaders, the other again and again": {"module": Combined, "train": combined("max_size_cycle")},
    "two loaders one after the other": {"module": Combined, "train": combined("sequential")},
    "a stream, some of it": {"train": lambda: stream(30)},
    "a stream, validation every few batches": {"train": lambda: stream(30)},
    "loaders made anew": {"batches": 18},
    "a plateau of steps": {"module": lambda: Net(plateau), "options": {}},
    "a part compiled": {"module": Compiled},
    "a checkpoint on an exception": {"module": Failing},
    "a learning rate looked for": {"module": Tuned},
}
# What is left out otherwise is in tests/scenarios/recommenders/test_recsys_features.py, or below.
NAMES = [
    *OWN,
    "limit_train_batches and limit_val_batches, numbers",
    "validation across epochs",
    "detect_anomaly",
    "checkpoints of the best, and the last",
    "a stop when nothing gets better",
    "max_time",
]


@pytest.fixture(scope="module")
def rounding() -> float:
    """How far any number may be off after more steps than any feature's run has.

    A feature chooses what is trained, how often and at which rate: no number's rounding is amplified by it.
    """

    def plain() -> dict[str, Any]:
        module = Net()
        return cases.outcome(module, cases.fit(module, "auto", max_epochs=6))

    return max(Reference.of(plain).within.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_feature_works_as_for_the_unsharded_module_in_lightnings_own_loop(
    name: str, clock: Clock, tmp_path: Path, rounding: float
) -> None:
    feature = replace(FEATURES[name], **({"module": Net} | OWN.get(name, {})))
    val = loader(12)
    plain_trainer, theirs = train(feature, clock, tmp_path / "theirs", val=val)
    used, ours = train(feature, clock, tmp_path / "ours", recsys(optimizer=SGD), val=val)
    assert approximately(ours, theirs, rounding) == []
    if feature.raises is not ValueError:  # nothing is sharded then
        expected = state_of(plain_trainer)
        found = state_of(used)
        assert difference({key: found[key] for key in expected}, expected, within=rounding) == []


def approximately(one: Any, other: Any, within: float, place: str = "") -> list[str]:
    """Where two outcomes differ, by more than rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        return [
            where for key in keys for where in approximately(one.get(key), other.get(key), within, f"{place} {key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            where
            for i, (a, b) in enumerate(zip(one, other, strict=True))
            for where in approximately(a, b, within, f"{place} {i}")
        ]
    try:
        same = abs(float(one) - float(other)) <= within
    except (TypeError, ValueError):
        same = one == other
    return [] if same else [f"{place}: {one}, and should be {other}"]


REFUSED: dict[str, tuple[Feature, type[Exception], str]] = {
    "manual optimization": (Feature(Manual), SetupError, "uses manual optimization"),
    "clipping by value": (
        Feature(Net, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        SetupError,
        "Set it to 'norm'",
    ),
    "64-true": (Feature(Net, {"precision": "64-true"}), SetupError, "'64-true', which would cast"),
    "weights averaged": (
        Feature(Net, callbacks=(plain.averaging,)),
        SetupError,
        r"StochasticWeightAveraging works on the weights of the whole module, but .* in parts, one for each rank"
        r" \(1 here\).* use WeightAveraging or EMAWeightAveraging",
    ),
    "pruning": (
        Feature(Net, callbacks=(lambda: ModelPruning("l1_unstructured", amount=0.5),)),
        SetupError,
        "ModelPruning works on the weights of the whole module",
    ),
    "a batch size looked for": (
        Feature(Net, callbacks=(plain.BatchSizeFinder,)),
        MisconfigurationException,
        "not supported with distributed strategies",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_when_training_is_set_up(name: str, clock: Clock, tmp_path: Path) -> None:
    feature, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        train(feature, clock, tmp_path, recsys(optimizer=SGD), val=loader(12))
    assert clock.module.losses == []
