"""pyarrow, with an error of ours if it is not installed."""

from __future__ import annotations

from lightning_pipe.engine.common.errors import SetupError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SetupError(
        f"Parquet files need the package pyarrow, which cannot be imported: {error}. Install lightning-pipe[data]"
    ) from error

__all__ = ["pa", "pq"]
