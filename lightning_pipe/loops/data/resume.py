"""Point from which a run resumes: the position after the last trained batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import escape_unprintable
from lightning_pipe.engine.ranks.object_collectives import run_on_all_ranks
from lightning_pipe.loops.data.random_streams import (
    RNGStates,
    get_rng_states,
    pack_rng_states,
    set_rng_states,
    unpack_rng_states,
)
from lightning_pipe.loops.data.resumable_loader import load_loader_states, make_constant_state_getter
from lightning_pipe.loops.data.stateful_loaders import IteratorState, load_iterator_states


@dataclass
class ResumePoint:
    """Positions of one rank's data and random generators.

    Attributes:
        loaders: state of each train dataloader; None for a dataloader without a state.
        common: states of the generators that the model draws from.
        streams: states of the generators of work that runs ahead, by stream name. Empty at the end of an epoch, since
            the next epoch starts new streams.
        iterators: state of each loader's iterator that the loader's own state does not contain. Empty if unknown.
        common_after_iterators: ``common`` after iterators have been created from this point.
        streams_after_iterators: ``streams`` after iterators have been created from this point.
    """

    loaders: list[Any]
    common: RNGStates
    streams: dict[str, RNGStates] = field(default_factory=dict)
    iterators: list[IteratorState | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.common_after_iterators = self.common
        self.streams_after_iterators = dict(self.streams)

    @property
    def in_mid_epoch(self) -> bool:
        """True if the run continues in the middle of an epoch."""
        return bool(self.streams)

    def load_into_loaders(self, combined: CombinedLoader) -> None:
        """Let the next iteration of each loader begin at this point."""
        load_loader_states(combined.flattened, self.loaders)
        load_iterator_states(combined, self.loaders, self.iterators)

    def positions(self) -> dict[str, Any]:
        """Return the positions of loaders and their iterators in the format of a ledger's entries."""
        loaders = [None if state is None else make_constant_state_getter(state) for state in self.loaders]
        return {"loaders": loaders, "iterators": self.iterators}

    def restore_generators(self, device: torch.device) -> None:
        """Restore the generators to their states when iterators were created, or would have been created next."""
        set_rng_states(self.streams.get("fetch", self.common), device)

    @contextmanager
    def replay_iterator_creation(self, device: torch.device) -> Iterator[None]:
        """Context for creating loaders, then calling :meth:`restore_generators`, then creating iterators.

        Iterators then draw the same random numbers, and prefetch the same samples, as in the previous run. If the
        checkpoint was written before the first epoch, generators are also restored before the loaders are created.
        """
        before = get_rng_states(device)
        if not self.loaders:
            self.restore_generators(device)
        try:
            yield
            if self.in_mid_epoch:
                self.streams_after_iterators["fetch"] = get_rng_states(device)
            else:
                self.common_after_iterators = get_rng_states(device)
        finally:
            set_rng_states(before, device)

    def packed(self) -> dict[str, Any]:
        """Return the contents for a checkpoint: tensors, plain values, and the states of user-defined loaders."""
        return {
            "loaders": self.loaders,
            "common": pack_rng_states(self.common),
            "streams": {name: pack_rng_states(states) for name, states in self.streams.items()},
            "iterators": [None if iterator is None else iterator.packed() for iterator in self.iterators],
        }

    @staticmethod
    def from_packed(packed: dict[str, Any]) -> ResumePoint:
        """Restore the point from the result of :meth:`packed`."""
        return ResumePoint(
            packed["loaders"],
            unpack_rng_states(packed["common"]),
            {name: unpack_rng_states(states) for name, states in packed["streams"].items()},
            [None if iterator is None else IteratorState.from_packed(iterator) for iterator in packed["iterators"]],
        )


def load_state_on_all_ranks(part: str, read: Callable[[], None]) -> None:
    """Read *part* of a checkpoint. Every rank must call this."""

    def read_state_wrapping_errors() -> None:
        try:
            read()
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            is_setup_error = isinstance(error, SetupError)
            cause = str(error) if is_setup_error else f"{type(error).__name__}: {escape_unprintable(str(error)[:200])}"
            raise SetupError(
                f"{part} is damaged, or belongs to other dataloaders ({cause}). Resume from another checkpoint, or load"
                " only the weights of the module."
            ) from error

    run_on_all_ranks(read_state_wrapping_errors, f"{part} cannot be read", dist.group.WORLD)


def are_equal(first: Any, second: Any) -> bool:
    """Return True if two loader states are equal. States of the user's loaders may hold tensors and arrays."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(are_equal(value, second[name]) for name, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(are_equal, first, second))
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    equal: Any = first == second
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
