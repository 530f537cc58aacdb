"""Criteo's click logs as Parquet files.

Run ``python -m examples.recsys_criteo.convert DAY_FILE... PARQUET_FILE`` to write one Parquet file.

The values equal those of TorchRec's reader, ``torchrec.datasets.criteo.CriteoIterDataPipe``, with ids as numbers. That
reader needs the package iopath and parses one row at a time in Python; this module uses Arrow's reader of CSV files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_COLUMN_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME


def convert(days: Sequence[Path], target: Path, rows_per_group: int = 65_536) -> int:
    """Write the rows of *days* to one Parquet file, in their order.

    Args:
        days: tab-separated files without a header, with Criteo's 40 columns, also compressed (``.gz``).
        target: Parquet file to write. Labels and dense columns are int64, ids are the int64 values of the hexadecimal
            strings. Empty fields are missing values.
        rows_per_group: number of rows of a row group (default 65,536). The last one has the remaining rows.

    Returns:
        Number of rows.

    Raises:
        pyarrow.ArrowInvalid: a line does not have 40 columns, or a number cannot be parsed.
    """
    numbers = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES]
    types = {**dict.fromkeys(numbers, pa.int64()), **dict.fromkeys(DEFAULT_CAT_NAMES, pa.string())}
    schema = pa.schema([(name, pa.int64()) for name in DEFAULT_COLUMN_NAMES])
    waiting, rows = schema.empty_table(), 0
    with pq.ParquetWriter(target, schema) as writer:
        for day in days:
            batches = pa.csv.open_csv(
                day,
                pa.csv.ReadOptions(column_names=DEFAULT_COLUMN_NAMES, block_size=1 << 24),
                pa.csv.ParseOptions(delimiter="\t", quote_char=False),
                pa.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
            )
            for batch in batches:
                columns = [_number(batch[name]) if name in DEFAULT_CAT_NAMES else batch[name] for name in schema.names]
                waiting = pa.concat_tables([waiting, pa.table(columns, schema=schema)])
                rows += len(batch)
                while len(waiting) >= rows_per_group:
                    writer.write_table(waiting.slice(0, rows_per_group))
                    waiting = waiting.slice(rows_per_group)
        if len(waiting):
            writer.write_table(waiting)
    return rows


def _number(column: pa.Array) -> pa.Array:
    """Parse hexadecimal strings: each distinct one once."""
    coded = column.dictionary_encode()
    values = pa.array([int(text, 16) for text in coded.dictionary.to_pylist()], pa.int64())
    return values.take(coded.indices)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("days", type=Path, nargs="+")
    parser.add_argument("target", type=Path)
    parser.add_argument("--rows-per-group", type=int, default=65_536)
    print(f"{convert(**vars(parser.parse_args(arguments)))} rows")


if __name__ == "__main__":
    main()
