"""Filters for warnings and log lines that TorchRec's internals cause and that users cannot avoid.

Each message is matched by the beginning of its text and by its source. All other messages pass.
"""

from __future__ import annotations

import logging
import warnings

# Regular expression for the beginning of the message, its category, and the module that emits it.
_WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    (r"fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel was not", UserWarning, r"torch\.autograd\."),
    (
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        FutureWarning,
        r"torch\.distributed\.",
    ),
)

# Name of the logger, and beginning of the message.
_LINES = (
    ("root", "Sharding spec not found for "),  # logged for every data-parallel table
    ("torchrec.distributed.comm", "TORCHREC_RESOLVED_POD_SIZE not set"),
    ("torchrec.distributed.comm", "[Connection] "),  # groups for table-row-wise sharding
    ("torchrec.distributed.utils", "Sharding Type is data_parallel, caching params will be ignored"),
    ("torch.fx._symbolic_trace", "is_fx_tracing will return true for both fx.symbolic_trace and torch.export."),
)


class _Silence(logging.Filter):
    """Filters out one message. Filters of the same message are equal, so a logger holds only one of them."""

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
    """Silence these messages in this process. Repeated calls have no effect."""
    for beginning, category, module in _WARNINGS:
        warnings.filterwarnings("ignore", beginning, category, module)
    for name, beginning in _LINES:
        # A logger's filter applies only to its own messages, not to messages propagated from child loggers.
        logging.getLogger(None if name == "root" else name).addFilter(_Silence(beginning))
