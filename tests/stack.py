"""What the installed stack has: the tests of what it lacks are skipped, by their names.

Some versions of PyTorch have no TorchRec, and language models need PyTorch 2.13. A skipped test says which is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

TESTS = Path(__file__).parent

HAS_TABLES = importlib.util.find_spec("torchrec") is not None
HAS_STAGES = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("torch"))[:2])) >= (2, 13)

# Of a test with parameters, their names decide, so that the cases of the others run.
_TABLES = re.compile(
    r"recsys|recommender|torchrec|table|dlrm|prefetch|fused_sparse_dist|movielens|cli/test_plan|public_api",
    re.IGNORECASE,
)
_STAGES = re.compile(
    r"llm|language_model|1f1b|gpipe|pipelining|schedule|stage|bubble|public_api|names_without_tables", re.IGNORECASE
)


def lacking(node: str) -> str | None:
    """Why a test cannot run on this stack, by its node's identifier; None if it can."""
    if not HAS_TABLES and _TABLES.search(node):
        return "the stack has no torchrec"
    if not HAS_STAGES and _STAGES.search(node):
        return "language models need torch 2.13"
    return None


def is_lacking(failure: str) -> str | None:
    """Why a file of tests cannot be imported on this stack, by its traceback; None for any other reason."""
    if not HAS_TABLES and re.search(
        r"No module named '(torchrec|fbgemm_gpu)|The recsys strategies need torch", failure
    ):
        return "the stack has no torchrec"
    if not HAS_STAGES and re.search(r"need torch 2\.13 or newer|cannot import name '\w+' from 'torch\.", failure):
        return "language models need torch 2.13"
    return None
