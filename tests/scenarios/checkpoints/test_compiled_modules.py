"""Checkpoints of modules in which ``torch.compile`` has changed the names, read by modules in which it has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.recsys import DynamicEmbeddingBagCollection, DynamicTable
from tests.distributed import run_ranks
from tests.strategies.cases import (
    ADAGRAD,
    IDS,
    WIDTH,
    Batch,
    Clicks,
    Pooled,
    fit,
    loader,
    mapped,
    predictions,
    recsys,
    state_of,
)
from tests.strategies.cases import trainer as trainer_of_tables
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


class Mapped(Pooled):
    """Ids of one table are mapped to its rows, by a module whose windows are in checkpoints, too."""

    def __init__(self) -> None:
        super().__init__()
        people = self.bags.embedding_bag_configs()[:1]
        self.mapped = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=people), mapped(people, DistanceLFU_EvictionPolicy, IDS)
        )
        self.over = nn.Sequential(nn.Linear(3 + 5 * WIDTH, 1))

    def forward(self, batch: Batch) -> Tensor:
        parts = [batch.dense, self.mapped(batch.sparse)[0].values(), self.bags(batch.sparse).values()]
        return self.over(torch.cat(parts, dim=1))[:, 0]


class Unbounded(nn.Module):
    """A table without a size, in a store of its own."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        table = DynamicTable(
            name="people", feature_names=["user"], embedding_dim=WIDTH, cache_rows=96, initial={"uniform": [-0.5, 0.5]}
        )
        self.bags = DynamicEmbeddingBagCollection([table], store, seed=3)
        self.over = nn.Sequential(nn.Linear(3 + WIDTH, 1))

    forward = Pooled.forward


def under_plain_names(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def names_of_torch_compile(checkpoint: Path) -> list[str]:
    """Files of a checkpoint that have a name which ``torch.compile`` changed."""
    return [str(path) for path in checkpoint.rglob("*") if path.is_file() and b"_orig_mod" in path.read_bytes()]


class Saving(pl.Callback):
    """Writes a checkpoint in the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 8:
            trainer.save_checkpoint(self.path)


@pairs
@pytest.mark.parametrize("name", ["pipeline", "recsys"])
def test_a_run_goes_on_exactly_from_a_checkpoint_with_other_compiled_modules(
    name: str, first: Change, second: Change, tmp_path: Path
) -> None:
    def run(change: Change, **options: Any) -> pl.Trainer:
        module = Clicks()
        module.network.over = change(module.network.over)
        return fit(module, recsys() if name == "recsys" else "pipeline", max_epochs=2, **options)

    path = tmp_path / "part.ckpt"
    expected = state_of(run(plain))
    run(first, callbacks=[Saving(path)])
    assert same(under_plain_names(state_of(run(second, ckpt_path=path))), expected)
    if name == "recsys":
        assert names_of_torch_compile(path) == []


NETWORKS: dict[str, Callable[[Path], nn.Module]] = {
    "tables": lambda _: Pooled(),
    "mapped ids": lambda _: Mapped(),
    "dynamic tables": Unbounded,
}


def all_in_one(module: Clicks) -> Any:
    """One optimizer for tables, which the strategy removes from it, and the rest."""
    return torch.optim.Adam(module.parameters(), lr=0.05)


def resumed_with_tables(rank: int, world: int, network: str, folder: Path) -> list[Any]:
    """Losses that differ after a run resumes with the other kind of module, and names that are in the checkpoint."""

    def run(change: Change, store: str, **options: Any) -> list[float]:
        module = Clicks(lambda: change(nn.Sequential(NETWORKS[network](folder / store))), optimizers=all_in_one)
        strategy = recsys("prefetch" if network == "dynamic tables" else "compute_ahead")
        data = loader(24 * world, in_order=True)
        fit(module, strategy, data, max_epochs=2, use_distributed_sampler=False, **options)
        return module.losses

    results: list[Any] = []
    for first, second in ((wrapped, plain), (plain, wrapped)):
        path = folder / f"{first.__name__}.ckpt"
        whole = run(first, f"first {first.__name__}", callbacks=[Saving(path)])
        rest = run(second, f"second {first.__name__}", ckpt_path=path)
        differing = [pair for pair in zip(whole[8:], rest, strict=True) if pair[0] != pair[1]]
        results.append((differing, names_of_torch_compile(path)))
    return results


@pytest.mark.parametrize("network", NETWORKS)
def test_a_run_goes_on_exactly_with_tables_in_a_compiled_module(network: str, tmp_path: Path) -> None:
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        assert run_ranks(resumed_with_tables, world, network, folder) == [[([], []), ([], [])]] * world


def test_a_checkpoint_of_compiled_parts_is_evaluated_and_exported_without_them(tmp_path: Path) -> None:
    module = Shop(nested)
    fit(module, recsys(optimizer=None), max_epochs=1, limit_val_batches=0).save_checkpoint(tmp_path / "one.ckpt")
    export_checkpoint(tmp_path / "one.ckpt", tmp_path / "one.pt")
    unsharded = Clicks()
    unsharded.load_state_dict(torch.load(tmp_path / "one.pt")["state_dict"])
    expected = predictions(trainer_of_tables("auto"), unsharded, loader())
    for change in (plain, wrapped):
        used = trainer_of_tables(recsys())
        used.validate(Shop(change), loader(), ckpt_path=tmp_path / "one.ckpt", verbose=False)
        batches: Any = used.predict(Shop(change), loader(), ckpt_path=tmp_path / "one.ckpt")
        assert torch.equal(torch.cat(batches), expected)


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
    assert names_of_torch_compile(tmp_path / "half.ckpt") == []
    found, _ = run(second, 2, tmp_path / "half.ckpt")
    assert same(found, expected)
