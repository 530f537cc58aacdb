"""A sharded module's output, waited for.

Tested in ``tests/recsys/rewrite/test_model_rewrite.py``.
"""

from __future__ import annotations

from typing import Any

from torchrec.distributed.types import Awaitable

__all__ = ["wait_output"]


def wait_output(output: Any) -> Any:
    """Waits for the output dist.

    Args:
        output: what a sharded module's forward or ``compute_and_output_dist`` returned.

    Returns:
        A ``KeyedTensor`` (B x sum of dims), a dict of ``JaggedTensor``, or for managed-collision modules a pair of
        one of these and the remapped ids; in the order that the module itself gives them.
    """
    if isinstance(output, tuple):
        return tuple(wait_output(part) for part in output)
    return output.wait() if isinstance(output, Awaitable) else output
