"""``lightning-pipe export``: from a checkpoint folder and a configuration to an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from lightning_pipe.cli.main import main
from lightning_pipe.recsys import DynamicEmbeddingBagCollection, DynamicTable
from tests.strategies.cases import ADAGRAD, Clicks, fit, loader, recsys

CONFIG = """
model: {class_path: tests.cli.test_export.Served}
trainer: {accelerator: cpu, devices: 1, logger: false, strategy: recsys_prefetch_pipeline}
"""


class Served(Clicks):
    def __init__(self) -> None:
        super().__init__(in_backward=ADAGRAD)

    def val_dataloader(self) -> Any:
        return loader()


class Compiled(Served):
    def __init__(self) -> None:
        super().__init__()
        network: Any = self.network
        network.over = torch.compile(network.over, backend="eager")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "compiled.yaml").write_text(CONFIG.replace("Served", "Compiled"))
    used = fit(Served(), recsys(optimizer=None), max_epochs=1, limit_val_batches=0)
    used.save_checkpoint(folder / "one.ckpt")
    used.save_checkpoint(folder / "other.ckpt")
    return folder / "one.ckpt"


def run(checkpoint: Path, kind: str, out: Path, *more: str) -> int:
    return main(["export", str(checkpoint), "--to", kind, "--out", str(out), *more])


def test_a_program_has_the_checkpoints_values_and_a_description_of_its_inputs(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = str(checkpoint.parent / "config.yaml"), tmp_path / "model.pt2"
    assert run(checkpoint, "torch_export", out, "--config", config) == 0
    assert "which takes the tensors of" in capsys.readouterr().out
    described = json.loads((tmp_path / "model.pt2.inputs.json").read_text())
    assert (described["step"], described["state_dict"]) == (6, sorted(Served().state_dict()))
    names = [one["name"] for one in described["inputs"]]
    assert names[:3] == ["dense", "sparse.values", "sparse.lengths"]
    assert "label" not in names  # the model does not read it
    module = Served()
    main(["checkpoint", "export", str(checkpoint), str(tmp_path / "one.pt")])
    module.load_state_dict(torch.load(tmp_path / "one.pt")["state_dict"])
    batch = next(iter(module.val_dataloader()))
    tensors = {"dense": batch.dense, "sparse.values": batch.sparse.values(), "tags.values": batch.tags.values()}
    tensors |= {"sparse.lengths": batch.sparse.lengths().view(4, -1), "tags.lengths": batch.tags.lengths().view(1, -1)}
    given = [tensors[name] for name in names]
    with torch.no_grad():
        found = torch.export.load(out).module()(*given)
        assert torch.allclose(found, module.eval().predict_step(batch, 0), rtol=0, atol=1e-6)


def test_quantized_tables_and_rows(checkpoint: Path, tmp_path: Path) -> None:
    config = str(checkpoint.parent / "config.yaml")
    assert run(checkpoint, "quantized", tmp_path / "model.pt", "--config", config, "--bits", "4") == 0
    assert torch.jit.load(tmp_path / "model.pt") is not None
    assert run(checkpoint, "rows", tmp_path / "tables") == 0
    assert len(pq.read_table(next((tmp_path / "tables").glob("*people*.parquet")))) == 24


def test_a_compiled_model_gives_the_programs_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    readers = {"torch_export": lambda path: torch.export.load(path).module(), "quantized": torch.jit.load}
    for kind, read in readers.items():
        outputs = []
        for config in ("config", "compiled"):
            out = tmp_path / f"{config} {kind}.pt2"
            assert run(checkpoint, kind, out, "--config", str(checkpoint.parent / f"{config}.yaml")) == 0
            batch = next(iter(loader()))
            given = [batch.dense, batch.sparse.values(), batch.sparse.lengths().view(4, -1)]
            with torch.no_grad():
                outputs.append(read(out)(*given))
        assert torch.equal(*outputs)


def test_wrong_calls_say_what_to_give(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkpoint, "aoti", tmp_path / "model.pt2") == 1
    assert "give --config FILE, the configuration of the training" in capsys.readouterr().err
    (tmp_path / "there").touch()
    assert run(checkpoint, "rows", tmp_path / "there") == 1
    assert "Give another name, or remove it" in capsys.readouterr().err


class Unsized(Served):
    """Its tables have no fixed size, so a program cannot contain them."""

    def __init__(self) -> None:
        super().__init__()
        table = DynamicTable(name="t", embedding_dim=4, feature_names=["f"], cache_rows=8)
        self.bags = DynamicEmbeddingBagCollection([table], store="unused")


def test_dynamic_tables_are_refused_before_anything_is_traced(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("Served", "Unsized"))
    assert run(checkpoint, "quantized", tmp_path / "out", "--config", str(tmp_path / "config.yaml")) == 1
    assert "the model's bags have dynamic tables" in capsys.readouterr().err
