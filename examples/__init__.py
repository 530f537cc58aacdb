"""Runnable examples. Importing this package silences messages of other libraries that a reader can do nothing about."""

import logging
import warnings

# Calls inside of torchmetrics, Lightning, torchdata and peft, which their next releases change.
warnings.filterwarnings("ignore", "Using a non-tuple sequence for multidimensional indexing", module="torchmetrics")
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", module="lightning")
warnings.filterwarnings("ignore", "'set_vital' is deprecated", module="torchdata")
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", module="transformers")
warnings.filterwarnings("ignore", "Precision bf16-mixed is not supported by the model summary")


def _concerns_the_reader(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "Tip: " not in message and "is_fx_tracing will return true" not in message


# Lightning's hints at other products, and a warning about a call inside of TorchRec.
for _name in ("lightning.pytorch.utilities.rank_zero", "torch.fx._symbolic_trace"):
    logging.getLogger(_name).addFilter(_concerns_the_reader)
