"""The point from which a run goes on: behind the last batch trained.

Tested in ``tests/scenarios/checkpoints/test_exact_resume.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import printable, shown
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.loops.data.random_streams import States, get_states, pack_states, set_states, unpack_states
from lightning_pipe.loops.data.resumable_loader import load_states
from lightning_pipe.loops.data.stateful_loaders import IteratorState, load_iterators

# Whose work may run ahead.
_STREAMS = {"fetch", "prepare", "transfer"}


@dataclass
class ResumePoint:
    """Where one rank's data and random generators are.

    Attributes:
        loaders: the state of each train dataloader, None for one that has none.
        common: the generators that the model draws from.
        streams: those of work that runs ahead, by their names; none at the end of an epoch, where data begins anew.
        iterators: of each loader with a state of its own, what that does not say; empty where nothing is known.
        common_behind_iterators: where the model's are once iterators are made from here.
        streams_behind_iterators: where those of work that runs ahead are then.
    """

    loaders: list[Any]
    common: States
    streams: dict[str, States] = field(default_factory=dict)
    iterators: list[IteratorState | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.common_behind_iterators = self.common
        self.streams_behind_iterators = dict(self.streams)

    @property
    def in_mid_epoch(self) -> bool:
        """Whether an epoch is gone on with."""
        return bool(self.streams)

    def load(self, combined: CombinedLoader) -> None:
        """Let the next iteration of each loader begin here.

        Raises:
            SetupError: there are other loaders than in the checkpoint, or a state is damaged.
        """
        load_states(combined.flattened, self.loaders)
        load_iterators(combined, self.loaders, self.iterators)

    def positions(self) -> dict[str, Any]:
        """Return where loaders and their iterators are, as a ledger's entries say it."""
        loaders = [None if state is None else partial(_same, state) for state in self.loaders]
        return {"loaders": loaders, "iterators": self.iterators}

    def put_generators(self, device: torch.device) -> None:
        """Put the generators where they were when iterators were made, or would have been made next."""
        set_states(self.streams.get("fetch", self.common), device)

    @contextmanager
    def making_iterators(self, device: torch.device) -> Iterator[None]:
        """Let loaders and iterators be made in the body, which calls :meth:`put_generators` between the two.

        What iterators draw then, and load already, they draw as in the run before. A checkpoint of before the first
        epoch comes before the loaders, too.
        """
        before = get_states(device)
        if not self.loaders:
            self.put_generators(device)
        try:
            yield
            if self.in_mid_epoch:
                self.streams_behind_iterators["fetch"] = get_states(device)
            else:
                self.common_behind_iterators = get_states(device)
        finally:
            set_states(before, device)

    def packed(self) -> dict[str, Any]:
        """As a checkpoint holds it: text, numbers, and what states of users' loaders are made of."""
        return {
            "loaders": self.loaders,
            "common": pack_states(self.common),
            "streams": {name: pack_states(states) for name, states in self.streams.items()},
            "iterators": [None if one is None else one.packed() for one in self.iterators],
        }

    @staticmethod
    def unpacked(packed: dict[str, Any]) -> ResumePoint:
        """What :meth:`packed` gave.

        Raises:
            SetupError: anything else.
        """
        for name, kind in (("loaders", list), ("common", str), ("streams", dict)):
            if not isinstance(packed, dict) or not isinstance(packed.get(name), kind):
                raise SetupError(f"expected {name} as a {kind.__name__}, got {shown(packed)}")
        # The other two begin with the first fetch.
        if set(packed["streams"]) not in (set(), {"fetch"}, _STREAMS):
            raise SetupError(f"expected streams of {', '.join(sorted(_STREAMS))}, got {shown(packed['streams'])}")
        streams = {name: unpack_states(states) for name, states in packed["streams"].items()}
        iterators = packed.get("iterators", [])
        if not isinstance(iterators, list) or len(iterators) not in (0, len(packed["loaders"])):
            raise SetupError(f"expected iterators as a list, one for each of the loaders, got {shown(iterators)}")
        states = [None if one is None else IteratorState.unpacked(one) for one in iterators]
        return ResumePoint(packed["loaders"], unpack_states(packed["common"]), streams, states)


def _same(state: Any) -> Any:
    return state


def read_on_all_ranks(what: str, read: Callable[[], None]) -> None:
    """Read *what* of a checkpoint; every rank calls this.

    Raises:
        SetupError: on every rank, with what each has found.
    """

    def checked() -> None:
        try:
            read()
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            known = isinstance(error, SetupError)
            said = str(error) if known else f"{type(error).__name__}: {printable(str(error)[:200])}"
            raise SetupError(
                f"{what} is damaged, or of other dataloaders ({said}); give another checkpoint, or load the module's"
                " values alone"
            ) from error

    on_all_ranks(checked, f"{what} cannot be read", dist.group.WORLD)
