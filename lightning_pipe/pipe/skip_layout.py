"""Which partitions skips lead from and to: checked when a pipe is made.

Tested in ``tests/pipe/test_skip.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe.skip import SkipKey, skip_keys

__all__ = ["SkipRoute", "skip_routes"]


class SkipRoute(NamedTuple):
    """A skip, and the partitions that it leads from and to."""

    key: SkipKey
    source: int
    target: int


def skip_routes(partitions: Sequence[Sequence[nn.Module]]) -> list[SkipRoute]:
    """All skips that lead from one partition to another.

    Args:
        partitions: the layers of each.

    Raises:
        SetupError: a skip that is stashed or popped twice, never popped, never stashed, or popped before that.
    """
    left: dict[SkipKey, tuple[int, int]] = {}
    taken: dict[SkipKey, tuple[int, int]] = {}
    number = 0
    for partition, layers in enumerate(partitions):
        for layer in layers:
            stashed, popped = skip_keys(layer)
            # A layer takes before it leaves, or holds layers of its own, in their order.
            for key in popped:
                if key in taken:
                    raise SetupError(
                        f"the skip {key} is popped by layers {taken[key][1]} and {number}; a skip is popped once: stash"
                        " it under a second name, or isolate() one of them in a Namespace"
                    )
                taken[key] = partition, number
            for key in stashed:
                if key in left:
                    raise SetupError(
                        f"the skip {key} is stashed by layers {left[key][1]} and {number}; give one another name, or"
                        " isolate() it in a Namespace"
                    )
                left[key] = partition, number
            number += 1
    if lost := [key for key in left if key not in taken]:
        layers_of = ", ".join(f"{key} (by layer {left[key][1]})" for key in lost)
        raise SetupError(f"skips are stashed and never popped: {layers_of}; pop each in a later layer, or leave it out")
    if missing := [key for key in taken if key not in left]:
        layers_of = ", ".join(f"{key} (by layer {taken[key][1]})" for key in missing)
        raise SetupError(f"skips are popped and never stashed: {layers_of}; stash each in an earlier layer")
    if early := [key for key in taken if taken[key][1] < left[key][1]]:
        key = early[0]
        raise SetupError(
            f"the skip {key} is popped by layer {taken[key][1]}, before layer {left[key][1]} stashes it; a skip leads"
            " to a later layer"
        )
    return [SkipRoute(key, source, taken[key][0]) for key, (source, _) in left.items() if source != taken[key][0]]
