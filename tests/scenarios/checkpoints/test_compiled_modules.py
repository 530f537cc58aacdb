"""Checkpoints of modules in which ``torch.compile`` has changed the names, read by modules in which it has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.strategies.cases import ADAGRAD, Clicks, Pooled, fit, loader, recsys, state_of
from tests.strategies.llm_cases import Tiny, TinyLM, llm, row_batches, trainer, values_of
from tests.strategies.llm_cases import fit as fit_language_model
from tests.strategies.llm_cases import loader as language_model_loader


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def wrapped(layers: nn.Sequential) -> nn.Sequential:
    return compiled(layers)


def nested(layers: nn.Sequential) -> nn.Sequential:
    return compiled(nn.Sequential(compiled(layers[0]), *layers[1:]))


def in_place(layers: nn.Sequential) -> nn.Sequential:
    layers.compile(backend="eager")
    return layers


def plain(layers: nn.Sequential) -> nn.Sequential:
    return layers


Change = Callable[[Any], Any]
PAIRS = [(plain, nested), (wrapped, in_place)]
pairs = pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda change: change.__name__)


class Shop(Clicks):
    def __init__(self, change: Change = plain) -> None:
        super().__init__(in_backward=ADAGRAD)
        self.network.over = change(self.network.over)

    def val_dataloader(self) -> Any:
        return loader()


def under_plain_names(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pairs
@pytest.mark.parametrize("name", ["pipeline", "recsys"])
def test_a_run_goes_on_exactly_from_a_checkpoint_with_other_compiled_modules(
    name: str, first: Change, second: Change, tmp_path: Path
) -> None:
    def run(change: Change, epochs: int, path: Path | None = None) -> tuple[Clicks, pl.Trainer]:
        module = Clicks()
        module.network.over = change(module.network.over)
        return module, fit(module, recsys() if name == "recsys" else "pipeline", max_epochs=epochs, ckpt_path=path)

    _, expected = run(plain, 2)
    _, half = run(first, 1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, whole = run(second, 2, tmp_path / "half.ckpt")
    assert same(under_plain_names(state_of(whole)), state_of(expected))


def test_tables_inside_a_compiled_module_start_with_their_values_and_states(tmp_path: Path) -> None:
    def module(change: Any) -> Clicks:
        return Clicks(lambda: change(nn.Sequential(Pooled())))

    before = fit(module(plain), recsys(), max_epochs=1)
    before.save_checkpoint(tmp_path / "before.ckpt")
    after = fit(module(wrapped), recsys(init_from=tmp_path / "before.ckpt"), max_steps=0)
    values = [
        {name: value for name, value in under_plain_names(state_of(used)).items() if not name.startswith("optimizer")}
        for used in (after, before)
    ]
    assert same(*values)
    assert any(name.endswith("momentum1") for name in values[0])


def test_dense_values_that_a_warm_start_does_not_read_are_a_warning(tmp_path: Path) -> None:
    class Renamed(Pooled):
        def __init__(self) -> None:
            super().__init__()
            self.top = self.over
            del self.over

        def forward(self, batch: Any) -> Tensor:
            return self.top(torch.cat([batch.dense, self.bags(batch.sparse).values()], dim=1))[:, 0]

    fit(Clicks(), recsys(), max_epochs=1).save_checkpoint(tmp_path / "before.ckpt")
    with pytest.warns(UserWarning, match=r"init_from: 4 dense values .* are not read.*network\.over\.0\.weight"):
        fit(Clicks(Renamed), recsys(init_from=tmp_path / "before.ckpt"), max_steps=0)


class Compiled(Tiny):
    """A language model with compiled parts in its layers."""

    def __init__(self, change: Change) -> None:
        super().__init__(2, optimizer="adamw")
        self.change = change

    def build_model(self) -> nn.Module:
        model = TinyLM(self.layers)
        for layer in model.layers:
            layer.mlp = self.change(layer.mlp)
        return model


@pairs
def test_a_language_model_goes_on_from_other_compiled_layers(first: Change, second: Change, tmp_path: Path) -> None:
    batches = row_batches(2, rows=8)

    def run(change: Change, epochs: int, path: Path | None = None) -> tuple[dict[str, Tensor], pl.Trainer]:
        module = Compiled(change)
        if path is None:
            used = fit_language_model(module, llm(), batches, max_epochs=epochs)
        else:
            used = trainer(llm(), max_epochs=epochs)
            used.fit(module, language_model_loader(batches), ckpt_path=path)
        return under_plain_names(values_of(module.model)), used

    expected, _ = run(plain, 2)
    _, half = run(first, 1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    found, _ = run(second, 2, tmp_path / "half.ckpt")
    assert same(found, expected)
