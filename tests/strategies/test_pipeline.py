"""Any LightningModule under ``strategy="pipeline"`` trains as under Lightning's strategies, with the batch ahead."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.loops.models import Net, Rows
from tests.strategies.cases import SGD, Clicks, difference, fit, state_of, trainer


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Iterating(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        self.trained.append(batch[:, 0].tolist())
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.item())
        return loss


class ClosureTwice(Net):
    """An optimizer that asks for several forward passes on one batch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


FEATURES: dict[str, tuple[Callable[[], Net], dict[str, Any]]] = {
    "as it is": (Net, {}),
    "accumulation": (Net, {"accumulate_grad_batches": 4}),
    "clipping by norm": (Net, {"gradient_clip_val": 0.05}),
    "clipping by value": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16": (Net, {"precision": "bf16-mixed"}),
    "validation in mid-epoch": (Net, {"val_check_interval": 2}),
    "max_steps": (Net, {"max_steps": 4, "max_epochs": -1}),
    "fast_dev_run": (Net, {"fast_dev_run": True}),
    "manual optimization": (Manual, {}),
    "an optimizer that calls its closure again": (ClosureTwice, {}),
    "a step that takes the iterator": (Iterating, {}),
}


def outcome(make: Callable[[], Net], strategy: Any, **options: Any) -> tuple[Any, ...]:
    """Losses, batches trained, optimizer steps, and what is left."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = make()
    used = fit(module, strategy, module.train_dataloader(), module.val_dataloader(), **options)
    return module.losses, module.trained, used.global_step, state_of(used)


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...], count: int) -> None:
    assert len(expected[0]) >= count
    assert found[:3] == expected[:3]
    assert difference(found[3], expected[3]) == []


def both(rank: int, world_size: int) -> dict[str, Any]:
    return {
        feature: [outcome(make, strategy, **options) for strategy in ("pipeline", "ddp")]
        for feature, (make, options) in FEATURES.items()
    }


def with_an_optimizer_in_backward(rank: int, world_size: int) -> str:
    with pytest.raises(SetupError) as caught:
        fit(Clicks(in_backward=SGD), "pipeline")
    return str(caught.value)


def test_two_processes_refuse_an_optimizer_inside_backward() -> None:
    for message in run_ranks(with_an_optimizer_in_backward, 2):
        assert "people.weight" in message
        assert "strategy='recsys_prefetch_pipeline'" in message


def test_two_processes_train_to_the_same_bits_as_lightnings_ddp() -> None:
    first, second = run_ranks(both, 2)
    for feature in FEATURES:
        for results in (first, second):
            found, expected = results[feature]
            assert_same(found, expected, 1)
        assert first[feature][0][1] != second[feature][0][1], "both ranks trained the same rows"
        # An optimizer may keep its own rank's loss.
        values, others = (
            {name: value for name, value in results[feature][0][3].items() if not name.startswith("optimizer")}
            for results in (first, second)
        )
        assert values
        assert difference(values, others) == []


# ---------------------------------------------------------------------- what runs ahead


class Transfers(Net):
    """Writes down which row is copied, and which is trained, and when."""

    def __init__(self) -> None:
        super().__init__(Rows(8), batch_size=2, shuffle=False)
        self.calls: list[tuple[str, float]] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.calls.append(("copy", batch[0, 0].item()))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(("train", batch[0, 0].item()))
        return super().training_step(batch, batch_idx)


def test_the_next_batch_is_copied_before_this_one_trains() -> None:
    module = Transfers()
    fit(module, "pipeline", module.train_dataloader(), max_epochs=1)
    copies = [row for kind, row in module.calls if kind == "copy"]
    assert copies == [0.0, 2.0, 4.0, 6.0]
    assert module.calls == [
        ("copy", 0.0),
        ("copy", 2.0),
        ("train", 0.0),
        ("copy", 4.0),
        ("train", 2.0),
        ("copy", 6.0),
        ("train", 4.0),
        ("train", 6.0),
    ]


def test_one_process_that_torchrun_may_restart_reads_an_order_that_more_can_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    module = Net()
    used = fit(module, "pipeline", module.train_dataloader(), max_epochs=1)
    loader: Any = used.train_dataloader
    assert isinstance(loader.sampler, DistributedSampler)
    assert sorted(row for batch in module.trained for row in batch) == [
        float(row) for row in range(len(module.dataset))
    ]


# ---------------------------------------------------------------------- again


def test_a_trainer_can_train_and_evaluate_again() -> None:
    def twice(strategy: str) -> tuple[Any, ...]:
        torch.manual_seed(3)
        module = Net()
        used = trainer(strategy, max_epochs=1)
        used.fit(module, module.train_dataloader(), module.val_dataloader())
        validated = used.validate(module, module.val_dataloader(), verbose=False)
        used.fit_loop.max_epochs = 2
        used.fit(module, module.train_dataloader(), module.val_dataloader())
        return module.losses, module.trained, validated, state_of(used)

    assert_same(twice("pipeline"), twice("auto"), 12)


def test_a_checkpoint_goes_from_and_to_lightnings_own_strategy(tmp_path: Path) -> None:
    def resumed(first: str, second: str) -> tuple[Any, ...]:
        torch.manual_seed(3)
        module = Net(shuffle=False)
        path = tmp_path / f"{first}.ckpt"
        fit(module, first, module.train_dataloader(), max_epochs=1).save_checkpoint(path)
        again = Net(shuffle=False)
        used = fit(again, second, again.train_dataloader(), max_epochs=2, ckpt_path=path)
        return again.losses, again.trained, used.global_step, state_of(used)

    expected = resumed("auto", "auto")
    assert_same(resumed("pipeline", "auto"), expected, 6)
    assert_same(resumed("auto", "pipeline"), expected, 6)


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_checkpoint_runs_no_code_unless_it_is_allowed(tmp_path: Path) -> None:
    path, marker = tmp_path / "a.ckpt", tmp_path / "marker"
    module = Net()
    fit(module, "pipeline", module.train_dataloader(), max_epochs=1).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    torch.save(checkpoint | {"evil": Evil(marker)}, path)
    with pytest.raises(SetupError, match=r"a.ckpt' holds more than tensors .* Trainer.fit\(..., weights_only=False\)"):
        fit(Net(), "pipeline", module.train_dataloader(), max_epochs=2, ckpt_path=path)
    assert not marker.exists()
    trainer("pipeline", max_epochs=2).fit(Net(), module.train_dataloader(), ckpt_path=path, weights_only=False)
    assert marker.exists()
