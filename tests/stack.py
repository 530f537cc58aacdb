"""Skips of tests of language models, by their names, on torch 2.11, which only trains recommenders."""

from __future__ import annotations

import importlib.metadata
import re

REASON = "language models need torch 2.13"
HAS_STAGES = not importlib.metadata.version("torch").startswith("2.11.")

# Of a test with parameters, their names decide, so that the cases of the others run.
_STAGES = re.compile(
    r"llm|language_model|1f1b|gpipe|pipelining|schedule|stage|bubble|public_api|names_without_tables", re.IGNORECASE
)


def lacking(node: str) -> str | None:
    """Why a test cannot run on this stack, by its node's identifier; None if it can."""
    return REASON if not HAS_STAGES and _STAGES.search(node) else None


def is_lacking(failure: str) -> str | None:
    """Why a file of tests cannot be imported on this stack, by its traceback; None for any other reason."""
    failed = re.search(r"need torch 2\.13 or newer|cannot import name '\w+' from 'torch\.", failure)
    return REASON if not HAS_STAGES and failed else None
