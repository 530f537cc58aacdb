"""The cycle of a graph that takes longest for the iterations it spans.

Tested in ``tests/engine/planning/test_planner.py``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Edge(NamedTuple):
    """*downstream* begins at least *seconds* after *upstream* of *distance* iterations before began."""

    upstream: Hashable
    downstream: Hashable
    seconds: float
    distance: int


class Cycle(NamedTuple):
    """Edges that lead back to where they start; each begins where the one before ends."""

    edges: tuple[Edge, ...]

    @property
    def iterations(self) -> int:
        """How many it spans."""
        return sum(edge.distance for edge in self.edges)

    @property
    def seconds(self) -> float:
        """How long once around takes."""
        return sum(edge.seconds for edge in self.edges)

    @property
    def ratio(self) -> float:
        """Seconds per iteration."""
        return self.seconds / self.iterations


def maximum_cycle_ratio(edges: Sequence[Edge]) -> Cycle | None:
    """The cycle with the most seconds per iteration; None where there is no cycle, or none takes any time.

    From a guess of the ratio, each edge gets the weight ``seconds - guess * distance``; a cycle of positive weight has
    a higher ratio, which is the next guess (Lawler, "Combinatorial Optimization", 1976, by way of Bellman and Ford).

    Args:
        edges: of a graph in which every cycle spans an iteration at least.
    """
    best, guess = None, 0.0
    while cycle := _positive_cycle(edges, guess):
        if best is not None and cycle.ratio <= best.ratio:
            break  # above the guess by rounding only
        best, guess = cycle, cycle.ratio
    return best


def _positive_cycle(edges: Sequence[Edge], guess: float) -> Cycle | None:
    """A cycle whose weights sum to more than 0."""
    nodes = dict.fromkeys(node for edge in edges for node in (edge.upstream, edge.downstream))
    longest = dict.fromkeys(nodes, 0.0)
    into: dict[Hashable, Edge] = {}
    tolerance = 1e-12 * (sum(edge.seconds for edge in edges) + guess)
    for _ in range(len(nodes)):
        changed = None
        for edge in edges:
            length = longest[edge.upstream] + edge.seconds - guess * edge.distance
            if length > longest[edge.downstream] + tolerance:
                longest[edge.downstream] = length
                into[edge.downstream] = edge
                changed = edge.downstream
        if changed is None:
            return None
    # A path with as many edges as nodes goes around somewhere: so many steps back lead there.
    node = changed
    for _ in nodes:
        node = into[node].upstream
    around = [into[node]]
    while around[-1].upstream != node:
        around.append(into[around[-1].upstream])
    return Cycle(tuple(reversed(around)))
