"""Generated rows in Criteo's schema, with known click probabilities.

Run ``python -m examples.recsys_criteo.generate FOLDER`` to write the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, DEFAULT_COLUMN_NAMES, INT_FEATURE_COUNT

from lightning_pipe.engine.common.errors import SetupError

# Numbers of distinct ids of the categorical columns, used in turn: columns differ as much as in Criteo's data.
CARDINALITIES = (10_000, 3, 1_500, 60, 4_000, 200, 10_000, 12, 2_500)
# Column with the probability of a click, which real data does not have. No model reads it.
PROBABILITY = "probability"
TRAINING, VALIDATION = "train", "val"  # prefixes of the file names

_ZIPF = 1.1  # exponent: the id of rank r is drawn in proportion to 1 / r ** _ZIPF
_FACTORS = 4  # width of the vectors whose products are the effects of pairs of ids
_BIAS = -1.6


class Structure:
    """Effects of dense values, ids and pairs of ids on the log-odds of a click.

    Args:
        seed: seed of the effects.
    """

    def __init__(self, seed: int) -> None:
        source = np.random.default_rng((seed, 0))
        self.sizes = [CARDINALITIES[column % len(CARDINALITIES)] for column in range(CAT_FEATURE_COUNT)]
        self.shares = [_zipf(size) for size in self.sizes]
        self.dense = source.normal(0, 0.12, INT_FEATURE_COUNT)
        scales = source.uniform(0, 0.4, CAT_FEATURE_COUNT)
        self.of_ids = [source.normal(0, scale, size) for scale, size in zip(scales, self.sizes, strict=True)]
        self.factors = [source.normal(0, 0.35, (size, _FACTORS)) for size in self.sizes]
        # Pairs of columns in a chain, each column in at most one pair.
        order = source.permutation(CAT_FEATURE_COUNT)[:12].reshape(-1, 2)
        self.pairs = [(int(first), int(second)) for first, second in order]

    def rows(self, count: int, source: np.random.Generator) -> pa.Table:
        """Draw rows.

        Args:
            count: number of rows N.
            source: random generator of the rows.

        Returns:
            Table of N rows with Criteo's 40 columns and ``PROBABILITY``. Dense columns hold counts, with missing
            values. Columns of ids hold int64 numbers from 1, and a missing value in place of id 0.
        """
        dense = np.floor(np.exp(source.normal(1.5, 1.2, (INT_FEATURE_COUNT, count)))).astype(np.int64)
        dense_missing = source.random(dense.shape) < 0.05
        dense[dense_missing] = 0
        ids = [source.choice(size, count, p=share) for size, share in zip(self.sizes, self.shares, strict=True)]
        log_odds = _BIAS + self.dense @ (np.log1p(dense) - 1.5)
        for column, values in enumerate(ids):
            log_odds += self.of_ids[column][values]
        for first, second in self.pairs:
            log_odds += (self.factors[first][ids[first]] * self.factors[second][ids[second]]).sum(axis=1)
        probability = 1 / (1 + np.exp(-log_odds))
        label = (source.random(count) < probability).astype(np.int64)
        arrays = [
            pa.array(label),
            *(pa.array(values, mask=missing) for values, missing in zip(dense, dense_missing, strict=True)),
            *(pa.array(values, mask=values == 0) for values in ids),
            pa.array(probability),
        ]
        return pa.table(arrays, names=[*DEFAULT_COLUMN_NAMES, PROBABILITY])


def generate(
    folder: Path, rows: int = 393_216, validation_rows: int = 49_152, rows_per_group: int = 4_096, seed: int = 1
) -> None:
    """Write ``train.parquet`` and ``val.parquet`` to *folder*. The files depend only on the arguments.

    Args:
        folder: folder of the files, created if needed.
        rows: number of training rows (default 393,216).
        validation_rows: number of validation rows (default 49,152).
        rows_per_group: number of rows of a row group (default 4,096). Each rank reads whole groups.
        seed: seed of the effects and of the rows (default 1).

    Raises:
        SetupError: a number of rows is not a positive multiple of *rows_per_group*.
    """
    for count in (rows, validation_rows):
        if count < 1 or count % rows_per_group:
            raise SetupError(f"expected a positive multiple of {rows_per_group} rows, got {count}")
    structure = Structure(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number, (part, count) in enumerate([(TRAINING, rows), (VALIDATION, validation_rows)]):
        source = np.random.default_rng((seed, 1 + number))
        # Complete or absent: a file gets its name after its last row.
        unfinished = folder / f"{part}.unfinished"
        writer = None
        for _ in range(count // rows_per_group):
            table = structure.rows(rows_per_group, source)
            writer = writer or pq.ParquetWriter(unfinished, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()
        unfinished.rename(folder / f"{part}.parquet")


def _zipf(size: int) -> NDArray[np.float64]:
    weights = np.arange(1, size + 1) ** -_ZIPF
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=393_216)
    parser.add_argument("--validation-rows", type=int, default=49_152)
    parser.add_argument("--rows-per-group", type=int, default=4_096)
    parser.add_argument("--seed", type=int, default=1)
    generate(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
