"""Scores and AUC of the Criteo example with quantized tables, next to bounds that follow from the rounding.

    python -m examples.serving.quantized_error CHECKPOINT VAL.parquet 8=model8.pt 4=model4.pt

The bounds are computed from the trained model alone, before any quantized program is run. docs/serving.md has results.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import fbgemm_gpu  # noqa: F401  # registers operators of quantized programs
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.func import functional_call
from torchmetrics.functional.classification import binary_auroc
from torchrec.datasets.utils import Batch

from examples.recsys_criteo.data import collator
from examples.recsys_criteo.model import CriteoDLRM
from lightning_pipe.strategies import export_checkpoint

_FLOAT32 = 1e-6  # rounding of sums, which the bounds do not follow


def value_bound(table: Tensor, bits: int) -> Tensor:
    """Largest error of a value of each row after quantization.

    A row is divided into 2**bits - 1 steps from its least to its largest value, and a value is rounded to the nearest:
    half a step. Scale and offset of the row are numbers of half precision, whose relative error is at most 2**-11, or
    2**-25 absolute if they are below its normal range. The scale is multiplied by at most the number of steps.

    Args:
        table: rows, [N, D].
        bits: bits of a value.

    Returns:
        Bounds, [N].
    """
    least, steps = table.amin(1), 2**bits - 1
    spread = table.amax(1) - least
    return spread / steps / 2 + (spread + least.abs()) * 2**-11 + (steps + 1) * 2**-25


class ScoreBounds:
    """Range of the scores of a DLRM whose tables are quantized, by affine arithmetic.

    Each number of the network is followed as ``middle + coefficients @ noise``, give or take ``rest``, where ``noise``
    has an entry in [-1, 1] for each value that the tables return. Linear layers are exact. Products of two noises, and
    ReLUs whose sign is not certain, add to ``rest``.

    Args:
        model: trained model with the interaction ``dlrm`` and tables whose vectors are summed.
        bits: bits of a value of the tables.
    """

    def __init__(self, model: CriteoDLRM, bits: int) -> None:
        self.dlrm = model.dlrm.model
        tables = self.dlrm.sparse_arch.named_parameters()
        self.errors = {name: value_bound(table.detach(), bits)[:, None] + 0 * table.detach() for name, table in tables}
        hidden, last = self.dlrm.over_arch.model
        self.layers = [layer._linear for layer in hidden._mlp] + [last]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Least and largest possible score of each sample, [B] each."""
        vectors = self.dlrm.sparse_arch(batch.sparse_features)
        errors = functional_call(self.dlrm.sparse_arch, self.errors, (batch.sparse_features,)).double()  # summed too
        dense = self.dlrm.dense_arch(batch.dense_features)[:, None]
        vectors, errors = torch.cat([dense, vectors], 1).double(), torch.cat([0 * dense, errors], 1)
        rows, _, width = vectors.shape
        first, second = self.dlrm.inter_arch.triu_indices
        pairs = torch.arange(len(first))
        coefficients = vectors.new_zeros(rows, len(first), *vectors.shape[1:])
        coefficients[:, pairs, first] = vectors[:, second] * errors[:, first]
        coefficients[:, pairs, second] = vectors[:, first] * errors[:, second]
        products = (vectors[:, first] * vectors[:, second]).sum(2), (errors[:, first] * errors[:, second]).sum(2)
        middle, slack = torch.cat([vectors[:, 0], products[0]], 1), torch.cat([0 * vectors[:, 0], products[1]], 1)
        coefficients = torch.cat([vectors.new_zeros(rows, width, errors[0].numel()), coefficients.flatten(2)], 1)
        for place, layer in enumerate(self.layers):
            weight = layer.weight.double()
            middle, slack = middle @ weight.T + layer.bias.double(), slack @ weight.abs().T
            coefficients = weight @ coefficients
            radius = coefficients.abs().sum(2) + slack
            if place < len(self.layers) - 1:
                low, high = middle - radius, middle + radius
                unsure = (low < 0) & (high > 0)
                slope = torch.where(unsure, high / (high - low), (low >= 0).double())
                gap = torch.where(unsure, -slope * low / 2, 0)  # ReLU(x) is within slope * x + gap, give or take gap
                middle, slack = slope * middle + gap, slope * slack + gap
                coefficients = slope[..., None] * coefficients
        ends = torch.sigmoid(middle - radius), torch.sigmoid(middle + radius)
        return (ends[0][:, 0] - _FLOAT32).clamp(min=0), (ends[1][:, 0] + _FLOAT32).clamp(max=1)


def auc_bounds(lower: Tensor, upper: Tensor, labels: Tensor) -> tuple[float, float]:
    """Least and largest AUC of scores within bounds: clicks score lowest and the others highest, and the reverse."""
    ends = torch.where(labels == 1, lower, upper), torch.where(labels == 1, upper, lower)
    least, most = (binary_auroc(scores, labels.long()).item() for scores in ends)
    return least, most


def load(checkpoint: str) -> CriteoDLRM:
    """The example's model, with default arguments."""
    model = CriteoDLRM()
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(checkpoint, Path(folder) / "one.ckpt", weights_only=True)
        model.load_state_dict(torch.load(Path(folder) / "one.ckpt")["state_dict"])
    return model.eval()


def batches(file: str, table_rows: int, size: int = 64) -> Iterator[Batch]:
    for part in pq.ParquetFile(file).iter_batches(size):
        yield collator(table_rows)(part)


@torch.no_grad()
def scores(program: torch.nn.Module, data: Sequence[Batch]) -> Tensor:
    """Scores of a program that ``lightning-pipe export`` wrote for the example's batches."""
    keyed = [(batch.dense_features, batch.sparse_features) for batch in data]
    return torch.cat([program(dense, ids.values(), ids.lengths().view(len(ids.keys()), -1)) for dense, ids in keyed])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("validation", metavar="VAL.parquet")
    parser.add_argument("programs", nargs="+", metavar="BITS=FILE", help="artifact of --to quantized")
    options = parser.parse_args(arguments)
    model = load(options.checkpoint)
    data = list(batches(options.validation, model.table_rows))
    labels = torch.cat([batch.labels for batch in data])
    with torch.no_grad():
        exact = torch.cat([model.predict_step(batch, 0) for batch in data]).double()
    print(f"not quantized: AUC {binary_auroc(exact, labels.long()).item():.6f} of {len(labels)} rows")
    for name in options.programs:
        bits, _, file = name.partition("=")
        quantized_scores = scores(torch.jit.load(file), data).double()
        bounds = ScoreBounds(model, int(bits))
        lower, upper = (torch.cat(ends) for ends in zip(*map(bounds, data), strict=True))
        error, bound = (quantized_scores - exact).abs(), torch.maximum(exact - lower, upper - exact)
        least, most = auc_bounds(lower, upper, labels)
        print(
            f"{bits} bits: AUC {binary_auroc(quantized_scores, labels.long()).item():.6f}, bounds {least:.4f} and"
            f" {most:.4f}; difference of a score: mean {error.mean():.6f}, largest {error.max():.6f};"
            f" bound: mean {bound.mean():.4f}, largest {bound.max():.4f}; within bounds: {bool((error <= bound).all())}"
        )


if __name__ == "__main__":
    main()
