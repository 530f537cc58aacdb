"""Programs of a trained model, in a process that knows neither the model nor this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.recsys.serving.batch_spec import BatchSpec, Scorer
from lightning_pipe.recsys.serving.programs import write_aoti, write_quantized, write_torch_export
from tests.patience import HANG
from tests.strategies.cases import IDS, Batch, Clicks, Dlrm, Mixed, Pooled, Rows, Sequenced, collate

LOADERS = {
    "torch_export": "import fbgemm_gpu; program = torch.export.load(sys.argv[1]).module()",
    "aoti": "program = torch._inductor.aoti_load_package(sys.argv[1])",
    "quantized": "import fbgemm_gpu; program = torch.jit.load(sys.argv[1])",
}
_SCORE = """
import sys, torch
{load}
with torch.no_grad():
    torch.save([program(*given) for given in torch.load(sys.argv[2])], sys.argv[3])
"""


def batches() -> list[Batch]:
    """An example, and batches of other sizes."""
    return [collate([Rows()[row] for row in rows]) for rows in (range(4), range(4, 11), range(11, 12))]


def scores_in_a_fresh_process(kind: str, file: Path, form: BatchSpec) -> list[Tensor]:
    given, found = file.with_name("given.pt"), file.with_name("found.pt")
    torch.save([form.flatten(batch) for batch in batches()], given)
    program = _SCORE.format(load=LOADERS[kind])
    subprocess.run([sys.executable, "-c", program, str(file), str(given), str(found)], check=True, timeout=HANG)
    scores: list[Tensor] = torch.load(found)
    return scores


def trained(network: Callable[[], nn.Module]) -> Clicks:
    module = Clicks(network)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return module.eval()


def expected(module: Clicks) -> list[Tensor]:
    with torch.no_grad():
        return [module.predict_step(batch, 0) for batch in batches()]


@pytest.mark.parametrize("network", [Mixed, Dlrm])
def test_a_program_of_torch_export_gives_the_models_scores(network: Callable[[], nn.Module], tmp_path: Path) -> None:
    module = trained(network)
    form = write_torch_export(module, batches()[0], tmp_path / "model.pt2")
    assert "label" not in form.names  # nothing reads it
    for found, score in zip(
        scores_in_a_fresh_process("torch_export", tmp_path / "model.pt2", form), expected(module), strict=True
    ):
        assert torch.allclose(found, score, rtol=0, atol=1e-6)


class OneKey(nn.Module):
    """The total of ids of a single key is the size of the tensor of ids."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="item", num_embeddings=IDS, embedding_dim=8, feature_names=["item"])
        self.tables = EmbeddingBagCollection([config], is_weighted=True)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.tables(ids).values().sum(1)


def weighted(count: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["item"], torch.arange(count), torch.full((count,), 0.5), lengths=torch.tensor([0, count]))


@pytest.mark.parametrize("collection", [EmbeddingBagCollection, EmbeddingCollection])
def test_weights_that_the_model_does_not_read_are_no_input(collection: Any, tmp_path: Path) -> None:
    class Unweighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = EmbeddingBagConfig if collection is EmbeddingBagCollection else EmbeddingConfig
            self.tables = collection([kind(name="item", embedding_dim=3, num_embeddings=IDS, feature_names=["item"])])

        def forward(self, ids: KeyedJaggedTensor) -> Tensor:
            found = self.tables(ids)
            return found.values() if collection is EmbeddingBagCollection else found["item"].values()

    model, file = Unweighted(), tmp_path / "model.pt2"
    form = write_torch_export(model, weighted(3), file)
    assert form.names == ["batch.values", "batch.lengths"]
    program = torch.export.load(file).module()
    with torch.no_grad():
        for count in (0, 1, 2, 5):
            assert torch.equal(program(*form.flatten(weighted(count))), model(weighted(count)))
    assert write_torch_export(OneKey(), weighted(3), file).names[2:] == ["batch.weights"]


def test_a_tensor_that_only_unused_code_reads_stays_an_input_if_the_code_needs_its_size(tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            scores = batch["dense"].sum(1)
            nn.functional.mse_loss(scores, batch["label"])
            return scores

    form = write_torch_export(WithLoss(), {"dense": torch.rand(3, 2), "label": torch.rand(3)}, tmp_path / "model.pt2")
    assert form.names == ["dense", "label"]
    program, dense = torch.export.load(tmp_path / "model.pt2").module(), torch.rand(5, 2)
    assert torch.equal(program(dense, torch.rand(5)), dense.sum(1))


@pytest.mark.parametrize("kind", ["torch_export", pytest.param("aoti", marks=pytest.mark.exhaustive)])
def test_a_batch_may_have_one_id_or_none(kind: str, tmp_path: Path) -> None:
    model, file = OneKey(), tmp_path / "model.pt2"
    form = write_aoti(model, weighted(3), file) if kind == "aoti" else write_torch_export(model, weighted(3), file)
    program = torch._inductor.aoti_load_package(file) if kind == "aoti" else torch.export.load(file).module()
    with torch.no_grad():
        for count in (0, 1, 2):
            found = program(*form.flatten(weighted(count)))
            assert torch.allclose(found, model(weighted(count)), rtol=0, atol=1e-6)


def test_a_compiler_that_is_absent_is_named(tmp_path: Path) -> None:
    class Product(nn.Module):
        def forward(self, dense: Tensor) -> Tensor:
            return dense.prod(1)

    absent: Any = {"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(absent),
        pytest.raises(SetupError, match=r"Product cannot be compiled.*no-such-compiler.*Install a C\+\+ compiler"),
    ):
        write_aoti(Product(), torch.rand(2, 3), tmp_path / "model.pt2")


@pytest.mark.exhaustive
def test_a_compiled_package_gives_the_models_scores(tmp_path: Path) -> None:
    module = trained(Mixed)
    form = write_aoti(module, batches()[0], tmp_path / "model.pt2")
    for found, score in zip(
        scores_in_a_fresh_process("aoti", tmp_path / "model.pt2", form), expected(module), strict=True
    ):
        assert torch.allclose(found, score, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_tables_change_scores_by_less_than_their_steps_allow(bits: int, tmp_path: Path) -> None:
    module = trained(Pooled)
    form = write_quantized(module, batches()[0], tmp_path / "model.pt", bits)
    assert form.names == ["dense", "sparse.values", "sparse.lengths"]
    found = scores_in_a_fresh_process("quantized", tmp_path / "model.pt", form)
    # A row's values are rounded to one of 2^bits - 1 steps between its least and its largest value.
    step = max(float((w.amax(1) - w.amin(1)).max()) for w in module.table_parameters()) / (2**bits - 1)
    layers = [
        parameter for name, parameter in module.named_parameters() if name.endswith("weight") and ".over." in name
    ]
    # At most three ids in a bag, half a step each; rows of weights bound what a change of inputs does; a sigmoid has a
    # slope of at most 1/4. One half for the rounding of scale and offset to half precision, which is far below a step.
    bound = 3 * step
    for weights in layers:
        bound *= float(weights.abs().sum(1).max())
    differences = [float((one - score).abs().max()) for one, score in zip(found, expected(module), strict=True)]
    assert 0 < max(differences) <= bound / 4


def test_inputs_are_described_for_a_server() -> None:
    form = BatchSpec(batches()[0])
    described = form.description(batches()[0], trained(Mixed))
    assert described["keys"] == {"sparse": ["friend", "item", "past", "user"], "tags": ["tag"]}
    shapes = {one["name"]: (one["type"], one["shape"]) for one in described["inputs"]}
    assert shapes["dense"] == ("float32", ["batch", 3])
    assert shapes["sparse.values"] == ("int64", ["ids"])
    assert shapes["sparse.lengths"] == ("int64", [4, "batch"])
    assert shapes["tags.weights"] == ("float32", ["ids"])
    assert described["rows"] == dict.fromkeys(["user", "item", "past", "tag"], IDS)  # no table reads "friend"


NESTS: dict[str, Callable[[Any], Any]] = {
    "in a mapping": lambda batch: {"a": [batch]},
    "in a tuple": lambda batch: (batch, 5),
    "as it is": lambda batch: batch,
}


@pytest.mark.parametrize("wrap", NESTS.values(), ids=NESTS)
def test_a_batch_in_any_nest_is_made_again_from_its_tensors(wrap: Callable[[Any], Any]) -> None:
    class Reads(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            inner = batch["a"][0] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch
            return inner.dense.sum(1) + inner.sparse["item"].lengths()

    form = BatchSpec(wrap(batches()[0]))
    for batch in batches():
        assert torch.equal(Scorer(Reads(), form)(*form.flatten(wrap(batch))), Reads()(wrap(batch)))


def test_what_cannot_be_exported_is_refused_with_the_way_on(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r"(?s)torch\.export cannot trace Clicks for any batch size.*Python loops over rows"
    ):
        write_torch_export(trained(Sequenced), batches()[0], tmp_path / "model.pt2")
    with pytest.raises(SetupError, match="at least 2 rows"):
        write_torch_export(trained(Pooled), batches()[2], tmp_path / "model.pt2")
    with pytest.raises(SetupError, match="bits must be 8 or 4, got 3"):
        write_quantized(trained(Pooled), batches()[0], tmp_path / "model.pt", 3)
    narrow = EmbeddingCollection([EmbeddingConfig(name="t", embedding_dim=6, num_embeddings=4, feature_names=["item"])])
    with pytest.raises(
        SetupError, match=r"table t has embedding_dim 6, but .* to 4 bits only if it is a multiple of 4"
    ):
        write_quantized(narrow, batches()[0], tmp_path / "model.pt", 4)
    with pytest.raises(InputError, match="expected a batch with tensors"):
        BatchSpec("text")
    jagged = replace(batches()[0], dense=batches()[0].sparse["item"])
    with pytest.raises(InputError, match="dense is a JaggedTensor"):
        BatchSpec(jagged)
