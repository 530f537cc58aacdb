"""Runnable examples. Importing this package silences messages of other libraries that a reader can do nothing about."""

import logging
import warnings

# Calls inside of torchmetrics and Lightning, which their next releases change.
warnings.filterwarnings("ignore", "Using a non-tuple sequence for multidimensional indexing", module="torchmetrics")
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", module="lightning")


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip: " not in record.getMessage()


logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)
