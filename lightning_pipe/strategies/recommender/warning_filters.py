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

# Loggers whose lines are filtered, and the beginnings of these lines.
_LOGGERS = ("", "torchrec.distributed.comm", "torchrec.distributed.utils", "torch.fx._symbolic_trace")
_LINES = (
    "Sharding spec not found for ",  # logged for every data-parallel table
    "TORCHREC_RESOLVED_POD_SIZE not set",
    "[Connection] ",  # groups for table-row-wise sharding
    "Sharding Type is data_parallel, caching params will be ignored",
    "is_fx_tracing will return true for both fx.symbolic_trace and torch.export.",
)


def _is_relevant_log_record(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_LINES)


def filter_torchrec_warnings() -> None:
    """Silence these messages in this process. Repeated calls have no effect."""
    for beginning, category, module in _WARNINGS:
        warnings.filterwarnings("ignore", beginning, category, module)
    for name in _LOGGERS:
        # A logger's filter applies only to its own messages, not to messages propagated from child loggers.
        logging.getLogger(name).addFilter(_is_relevant_log_record)
