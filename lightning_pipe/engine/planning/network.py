"""Durations of collectives on a network with a given latency, bandwidth and number of ranks.

The model is the usual one: a message of m bytes between two ranks takes ``latency + m / bandwidth``, a rank can send
and receive simultaneously, and no two messages of one collective share a link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["all_to_all", "all_reduce", "broadcast"]


@dataclass(frozen=True)
class Collective:
    """Collective and its buffer size."""

    kind: CollectiveKind
    bytes: float  # of one rank's buffer: sent to all ranks including itself, contributed, or received


@dataclass(frozen=True)
class NetworkModel:
    """Network between ranks with identical links.

    The formulas come from Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), for the algorithms that Gloo and NCCL use for large messages: pairwise exchange for the all-to-all,
    a ring for the all-reduce, and for the broadcast the faster of a binomial tree and a scatter with a ring all-gather.
    """

    latency: float  # seconds of one message between two ranks
    bandwidth: float  # bytes per second of one rank's link in each direction
    ranks: int

    def seconds(self, message: Collective) -> float:
        """Duration of *message* in seconds on an otherwise idle network; 0 with one rank."""
        peers = self.ranks - 1
        if not peers:
            return 0.0
        once = message.bytes / self.bandwidth
        share = peers / self.ranks  # part of a buffer that leaves its rank
        if message.kind == "all_to_all":
            return peers * self.latency + share * once
        if message.kind == "all_reduce":
            return 2 * peers * self.latency + 2 * share * once
        rounds = math.ceil(math.log2(self.ranks))
        tree = rounds * (self.latency + once)
        scatter_and_gather = (rounds + peers) * self.latency + 2 * share * once
        return min(tree, scatter_and_gather)
