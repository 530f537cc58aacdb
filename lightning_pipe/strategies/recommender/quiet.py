"""Silences what TorchRec's own workings make it and PyTorch say, and no user can do anything about.

Each line is named by its text and by who says it; everything else is heard as before.
"""

from __future__ import annotations

import logging
import warnings

__all__ = ["quiet_torchrec"]

# How the message begins (a regular expression), its category, the module that says it.
_WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    (r"fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel was not", UserWarning, r"torch\.autograd\."),
    (
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        FutureWarning,
        r"torch\.distributed\.",
    ),
)

# The logger, and how the message begins.
_LINES = (
    ("root", "Sharding spec not found for "),  # of every data-parallel table, which has none
    ("torchrec.distributed.comm", "TORCHREC_RESOLVED_POD_SIZE not set"),
    ("torchrec.distributed.comm", "[Connection] "),  # of the groups that it makes for table-row-wise sharding
    ("torchrec.distributed.utils", "Sharding Type is data_parallel, caching params will be ignored"),
    ("torch.fx._symbolic_trace", "is_fx_tracing will return true for both fx.symbolic_trace and torch.export."),
)


class _Silence(logging.Filter):
    """Keeps back one message; equal to another of the same message, so that a logger holds it once."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Silence) and other._beginning == self._beginning

    def __hash__(self) -> int:
        return hash(self._beginning)


def quiet_torchrec() -> None:
    """Silence those lines in this process from now on; again changes nothing."""
    for beginning, category, module in _WARNINGS:
        warnings.filterwarnings("ignore", beginning, category, module)
    for name, beginning in _LINES:
        # A logger's filter is for what is said to it, not for what comes up from loggers below.
        logging.getLogger(None if name == "root" else name).addFilter(_Silence(beginning))
