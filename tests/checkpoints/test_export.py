"""A checkpoint of sharded tables as one file, for a module that is not sharded; of stages see test_stage_checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
from tests.rounding import Reference
from tests.strategies import llm_cases
from tests.strategies.cases import ROW_WISE_ADAGRAD, Clicks, Mixed, fit, loader, recsys, state_of, trainer

KINDS = {"people": "row_wise", "things": "column_wise", "tags": "data_parallel"}


class Kept(Clicks):
    """Keeps a hyper-parameter, by which the file makes it again."""

    def __init__(self, name: str = "unknown") -> None:
        super().__init__(Mixed)
        self.save_hyperparameters()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    """Of one rank (of several see test_sharded_checkpoint); the file is in ``folder / "whole.ckpt"``."""
    used = fit(Kept("one"), recsys("prefetch", KINDS, ROW_WISE_ADAGRAD))
    used.save_checkpoint(folder / "saved")
    export_checkpoint(folder / "saved", folder / "whole.ckpt")
    (result,) = used.validate(used.lightning_module, loader(8), verbose=False)
    return {"state": state_of(used), "loss": result["val_loss"]}


def test_the_file_is_all_that_an_export_leaves(saved: dict[str, Any], folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"saved", "whole.ckpt"}


def test_the_unsharded_module_takes_the_state(saved: dict[str, Any], folder: Path) -> None:
    module = Kept()
    checkpoint = torch.load(folder / "whole.ckpt", weights_only=True)
    module.load_state_dict(checkpoint["state_dict"])
    for name, value in module.state_dict().items():
        if name in saved["state"]:
            assert torch.equal(value, saved["state"][name]), name
        else:
            assert name.endswith("num_batches_tracked")
    assert sum("embedding_bags" in name for name in module.state_dict()) == 3


def test_lightning_makes_the_module_from_the_file(saved: dict[str, Any], folder: Path) -> None:
    module = Kept.load_from_checkpoint(folder / "whole.ckpt")
    assert module.hparams["name"] == "one"

    def validated() -> dict[str, float]:
        return dict(trainer("auto").validate(module, loader(8), verbose=False)[0])

    assert Reference.of(validated).differences({"val_loss": saved["loss"]}) == []
    # And a trainer reads the file by itself.
    (result,) = trainer("auto").validate(Kept(), loader(8), folder / "whole.ckpt", verbose=False)
    assert result == validated()


def test_states_of_optimizers_are_left_out_as_lightning_leaves_them_out(saved: dict[str, Any], folder: Path) -> None:
    with pytest.raises(KeyError, match="contains only the model"):
        fit(Kept(), "auto", ckpt_path=folder / "whole.ckpt")


EXPORT = r"whole\.ckpt' is a file, expected a folder written under "


def test_a_file_in_the_place_of_its_folder_is_named_and_what_the_error_advises_helps(
    saved: dict[str, Any], folder: Path
) -> None:
    file = folder / "whole.ckpt"
    with pytest.raises(SetupError, match=EXPORT + "a recsys plan"):
        fit(Kept(), recsys("prefetch", KINDS, ROW_WISE_ADAGRAD), ckpt_path=file)
    with pytest.raises(SetupError, match=rf"{EXPORT}.*\.load_state_dict\(torch\.load\('.*', weights_only=True\)"):
        trainer(recsys("prefetch", KINDS, ROW_WISE_ADAGRAD)).validate(Kept(), loader(8), file, verbose=False)
    module = Kept()
    module.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
    used = trainer(recsys("prefetch", KINDS, ROW_WISE_ADAGRAD))
    assert used.validate(module, loader(8), verbose=False)[0]["val_loss"] == saved["loss"]


def test_a_file_in_the_place_of_a_folder_of_stages_is_named_and_what_the_error_advises_helps(tmp_path: Path) -> None:
    def used() -> Any:
        return llm_cases.trainer(LLMPipelineStrategy(num_microbatches=2))

    batches, file, first = llm_cases.loader(llm_cases.row_batches(1)), tmp_path / "whole.ckpt", used()
    first.fit(llm_cases.Tiny(), batches)
    first.save_checkpoint(tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", file)
    with pytest.raises(SetupError, match=EXPORT + "LLMPipelineStrategy"):
        used().fit(llm_cases.Tiny(), batches, ckpt_path=file)
    module, state = llm_cases.Tiny(), torch.load(file, weights_only=True)["state_dict"]
    module.configure_model()
    module.load_state_dict(state)
    used().fit(module, batches)
    assert all(torch.equal(value, state[f"model.{name}"]) for name, value in module.initial.items())


def test_a_file_is_written_over_when_all_is_there(saved: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("before")
    with pytest.raises(SetupError, match="cannot be read"):
        export_checkpoint(_cut(folder / "saved", tmp_path), target)
    assert target.read_text() == "before"
    export_checkpoint(folder / "saved", target)
    assert torch.load(target, weights_only=True)["state_dict"]


def _cut(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "cut"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    for path in copy.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:200])
    return copy
