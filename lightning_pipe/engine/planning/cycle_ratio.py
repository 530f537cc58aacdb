"""Cycle of a dependency graph with the most seconds per iteration."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Edge(NamedTuple):
    """*downstream* starts at least *seconds* after the start of *upstream* of *distance* iterations earlier."""

    upstream: Hashable
    downstream: Hashable
    seconds: float
    distance: int


class Cycle(NamedTuple):
    """Closed path of edges. Each edge starts at the end of the previous one."""

    edges: tuple[Edge, ...]

    @property
    def iterations(self) -> int:
        """Number of iterations that the cycle spans."""
        return sum(edge.distance for edge in self.edges)

    @property
    def seconds(self) -> float:
        """Duration of one pass around the cycle."""
        return sum(edge.seconds for edge in self.edges)

    @property
    def ratio(self) -> float:
        """Seconds per iteration."""
        return self.seconds / self.iterations


def maximum_cycle_ratio(edges: Sequence[Edge]) -> Cycle | None:
    """Cycle with the most seconds per iteration; None if no cycle takes any time.

    With a guess of the ratio, each edge gets the weight ``seconds - guess * distance``. A cycle of positive weight has
    a higher ratio, which is the next guess (Lawler, "Combinatorial Optimization", 1976). Cycles of positive weight are
    found with the Bellman-Ford algorithm.

    Args:
        edges: edges of a graph in which every cycle spans at least one iteration.
    """
    best, guess = None, 0.0
    while cycle := _positive_cycle(edges, guess):
        if best is not None and cycle.ratio <= best.ratio:
            break  # above the guess only because of rounding
        best, guess = cycle, cycle.ratio
    return best


def _positive_cycle(edges: Sequence[Edge], guess: float) -> Cycle | None:
    """Cycle whose weights sum to more than 0; None if no cycle does."""
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
    # The path into *changed* has at least len(nodes) edges, so it contains a cycle. Going back that far ends on it.
    node = changed
    for _ in nodes:
        node = into[node].upstream
    around = [into[node]]
    while around[-1].upstream != node:
        around.append(into[around[-1].upstream])
    return Cycle(tuple(reversed(around)))
