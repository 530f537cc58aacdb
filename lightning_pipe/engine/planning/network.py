"""How long a collective takes on a network of which latency, bandwidth and the number of ranks are known.

The usual model: a message of m bytes between two ranks takes ``latency + m / bandwidth``, a rank sends and receives at
once, and no two messages of one collective share a link.

Tested in ``tests/engine/planning/test_simulation.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.options import check_whole_number

_LONGEST = 1e6  # seconds of latency: eleven days
CollectiveKind = Literal["all_to_all", "all_reduce", "broadcast"]


@dataclass(frozen=True)
class Message:
    """What a collective moves.

    Args:
        kind: which collective.
        bytes: size of one rank's buffer: what it sends to all ranks together, itself included (all-to-all), what it
            contributes (all-reduce), what everyone receives (broadcast). With the number of ranks it may change; then
            it is the caller who knows how.

    Raises:
        PlanError: an unknown kind, or a size that is none.
    """

    kind: CollectiveKind
    bytes: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(CollectiveKind):
            raise PlanError(f"a message has kind {self.kind!r}; the kinds are {', '.join(get_args(CollectiveKind))}")
        if not (math.isfinite(self.bytes) and self.bytes >= 0):
            raise PlanError(f"a message has {self.bytes!r} bytes; give a finite number from 0")


@dataclass(frozen=True)
class NetworkModel:
    """A network between ranks that are all alike.

    The formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), for the algorithms that Gloo and NCCL use for large messages: pairwise exchange for the all-to-all,
    a ring for the all-reduce, and for the broadcast the better of a binomial tree and a scatter with a ring all-gather.

    Args:
        latency: of one message between two ranks, in seconds.
        bandwidth: of one rank's link in each direction, in bytes per second.
        ranks: how many take part.

    Raises:
        PlanError: a negative latency, or no bandwidth or ranks.
    """

    latency: float
    bandwidth: float
    ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.latency <= _LONGEST:
            raise PlanError(f"the network has latency {self.latency!r}; give seconds, from 0 to {_LONGEST:g}")
        if not self.bandwidth > 0:
            raise PlanError(f"the network has bandwidth {self.bandwidth!r}; give bytes per second, more than 0")
        check_whole_number("the number of ranks of the network", self.ranks, 1, error=PlanError)

    def seconds(self, message: Message) -> float:
        """How long *message* takes if nothing else is on the network; nothing with one rank."""
        others = self.ranks - 1
        if not others:
            return 0.0
        once = message.bytes / self.bandwidth
        share = others / self.ranks  # of a buffer, what does not stay at its rank
        if message.kind == "all_to_all":
            return others * self.latency + share * once
        if message.kind == "all_reduce":
            return 2 * others * self.latency + 2 * share * once
        rounds = math.ceil(math.log2(self.ranks))
        tree = rounds * (self.latency + once)
        scatter_and_gather = (rounds + others) * self.latency + 2 * share * once
        return min(tree, scatter_and_gather)
