"""Bounds of what quantised tables do to values, scores and the AUC."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.criteo import DEFAULT_COLUMN_NAMES

from examples.recsys_criteo.data import collator
from examples.recsys_criteo.model import CriteoDLRM
from examples.serving.quantized_error import ScoreBounds, auc_bounds, scores, value_bound
from lightning_pipe.recsys.serving.programs import write_quantized

ROWS, WIDTH = 300, 8


class Vectors(nn.Module):
    """The rows of a table, for one id per sample."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=["item"])
        self.tables = EmbeddingBagCollection([config])
        self.tables.load_state_dict({"embedding_bags.item.weight": rows})

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.tables(ids).values()


# Scale of the rows, and a number that is added: half precision has few digits for values far from zero.
@pytest.mark.parametrize(
    ("bits", "scale", "offset"), [(8, 1.0, 0.0), (4, 1.0, 0.0), (8, 1e-2, 30.0), (4, 100.0, -5.0), (8, 0.0, 1.0)]
)
def test_a_value_differs_by_half_a_step_and_the_rounding_of_scale_and_offset(
    bits: int, scale: float, offset: float, tmp_path: Path
) -> None:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)) * scale + offset
    ids = KeyedJaggedTensor(["item"], torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.int64))
    write_quantized(Vectors(rows), ids, tmp_path / "model.pt", bits)
    with torch.no_grad():
        found = torch.jit.load(tmp_path / "model.pt")(torch.arange(ROWS), ids.lengths()[None])
    errors, bounds = (found - rows).abs().amax(1), value_bound(rows, bits)
    assert bool((errors <= bounds).all())
    if offset == 0 and scale == 1:  # the bound is not far above what is found
        assert float((errors / bounds).max()) > 0.7


@pytest.mark.parametrize("bits", [8, 4])
def test_scores_of_quantised_tables_are_within_their_bounds(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = CriteoDLRM(table_rows=50, embedding_dim=4, over_layers=[16, 8]).eval()
    with torch.no_grad():
        for table in model.dlrm.model.sparse_arch.parameters():
            table.normal_(0, 0.3)
    columns = {name: torch.randint(0, 50, (200,)).numpy() for name in DEFAULT_COLUMN_NAMES}
    batch = collator(50)(pa.table(columns))
    write_quantized(model, batch, tmp_path / "model.pt", bits)
    with torch.no_grad():
        exact = model.predict_step(batch, 0)
    found = scores(torch.jit.load(tmp_path / "model.pt"), [batch])
    lower, upper = ScoreBounds(model, bits)(batch)
    assert bool(((lower <= found) & (found <= upper)).all())
    assert bool(((lower < exact) & (exact < upper)).all())
    assert float((found - exact).abs().max()) > 1e-6
    if bits == 8:
        assert float((upper - lower).max()) < 0.1


def test_the_auc_is_bounded_by_the_worst_order_of_the_scores() -> None:
    labels = torch.tensor([1, 0, 1, 0])
    scores = torch.tensor([0.9, 0.8, 0.3, 0.1])  # three of four pairs are in order
    assert auc_bounds(scores - 0.02, scores + 0.02, labels) == (0.75, 0.75)
    assert auc_bounds(scores - 0.07, scores + 0.07, labels) == (0.5, 0.75)
    assert auc_bounds(scores - 0.41, scores + 0.41, labels) == (0.0, 1.0)
