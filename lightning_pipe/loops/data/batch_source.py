"""Where the ledger's batches come from: the loader, and, among several ranks, an agreement on each before it is given.

A rank that has no more batches, or cannot fetch one, would leave the others waiting in the collectives of the next. So
for each batch all ranks say whether they have it, and hear each other while batches before it train::

    call      fetches   is sure of        gives
    0         0, 1      0 and 1           0, which is not the last one
    1         2         2 (begun in 0)    1
    2         3         3: rank 1 has none
                                          2, the last one on every rank

What is fetched and not given stays in this process's memory: two batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_pipe.engine import InputError
from lightning_pipe.engine.ranks.together import gather
from lightning_pipe.loops.data.next_batch_status import Statuses

__all__ = ["AgreedSource", "BatchSource", "Fetched", "Source", "Uneven", "given_again"]

# A batch, whether it is the loader's last one, and where things are behind it.
Fetched = tuple[Any, bool, dict[str, Any]]
# What becomes of an epoch in which some ranks have fewer batches.
Uneven = Literal["shortest", "error"]

_HAS, _ENDED = 1, 0  # and the batch's kind is added; a rank that could not fetch says minus its number, minus one

_ADVICE = (
    "Give every rank as many (drop_last=True, or a sampler that fills up), or let epochs end with the shortest"
    " (uneven_batches='shortest')"
)


class Source(Protocol):
    """Gives batches in order."""

    def __call__(self) -> Fetched:
        """The next one; raises ``StopIteration`` after the last."""
        ...

    def unread(self) -> list[Callable[[], Fetched]]:
        """What it has read and not given, in order."""
        ...


class BatchSource:
    """One rank's batches.

    Args:
        fetch: gives the next batch; raises ``StopIteration`` after the last.
        kept: give what was read before and not trained; they come first.
    """

    def __init__(self, fetch: Callable[[], Fetched], kept: Sequence[Callable[[], Fetched]] = ()) -> None:
        self._fetch = fetch
        self._kept = deque(kept)

    def __call__(self) -> Fetched:
        return self._kept.popleft()() if self._kept else self._fetch()

    def unread(self) -> list[Callable[[], Fetched]]:
        return list(self._kept)


class AgreedSource:
    """Batches that every rank has; every rank makes the same calls.

    Args:
        source: this rank's.
        group: of all ranks, on the CPU, used by nothing else.
        statuses: how ranks tell each other whether they have a batch.
        remaining: how many batches the loader has not been asked for; None where it does not know.
        uneven: ``shortest`` ends the epoch where the first rank's data ends, and says what the others leave;
            ``error`` raises there; None ends there without a word, and the others' batches are left :meth:`unread`.
        told_to_end: whether this rank was told to end training.
        kind: of a batch: a number from 0 on. Where ranks have batches of different kinds, they are uneven there.
        of: what it is that errors count batches of.
        advice: what they say to do about uneven numbers.

    Attributes:
        to_end: whether any rank was, when it read a batch that all have agreed on. It changes on all ranks together.
    """

    def __init__(
        self,
        source: Source,
        group: dist.ProcessGroup,
        statuses: Statuses,
        remaining: Callable[[], int | None],
        uneven: Uneven | None = "shortest",
        told_to_end: Callable[[], bool] = lambda: False,
        *,
        kind: Callable[[Fetched], int] = lambda _: 0,
        of: str = "epoch",
        advice: str = _ADVICE,
    ) -> None:
        self.to_end = False
        self._kind = kind
        self._of = of
        self._advice = advice
        self._told_to_end = told_to_end
        self._source = source
        self._group = group
        self._statuses = statuses
        self._remaining = remaining
        self._uneven = uneven
        self._ahead: deque[Fetched] = deque()
        self._error: BaseException | None = None
        self._read_here = 0
        self._had_by_all = 0
        self._begun = False
        self._ended = False

    def __call__(self) -> Fetched:
        if not self._begun:
            self._begun = True
            # What was told of batches behind an error, with which the source before this one ended.
            self._statuses.forget()
            self._read()
            self._ended = not self._all_have_it()
            if not self._ended:
                self._read()
        if self._ended:
            raise StopIteration
        # Of the batch behind the one that is given.
        self._ended = not self._all_have_it()
        batch, _, after = self._ahead.popleft()
        if not self._ended:
            self._read()
        return batch, self._ended, after

    def unread(self) -> list[Callable[[], Fetched]]:
        return [partial(given_again, one) for one in self._ahead] + self._source.unread()

    def close(self) -> None:
        """Wait for what the ranks still have to say to each other."""
        self._statuses.forget()

    def _read(self) -> None:
        """Fetch a batch, and tell the other ranks whether it is there."""
        says = _HAS
        try:
            self._ahead.append(self._source())
            says += self._kind(self._ahead[-1])
            self._read_here += 1
        except StopIteration:
            says = _ENDED
        except BaseException as error:  # the other ranks wait for what this one says
            says, self._error = -self._group.rank() - 1, error
        self._statuses.tell(says, self._told_to_end())

    def _all_have_it(self) -> bool:
        try:
            least, most, told_to_end = self._statuses.hear()
        except RuntimeError as error:
            raise self._error or InputError(
                f"the ranks could not agree on batch {self._had_by_all} of the {self._of}: one of them has ended, or"
                f" did not answer in time ({error}). Its own output says why; start all ranks again from the last"
                " checkpoint"
            ) from error
        if self._error is not None:
            raise self._error
        self.to_end |= told_to_end
        if least < _ENDED:
            raise InputError(
                f"rank {-least - 1} could not fetch its batch {self._had_by_all} of the {self._of}; its own error says"
                " why"
            )
        even = least == most
        if not even and self._uneven is not None:
            self._say_what_is_left()
        had = even and least != _ENDED
        self._had_by_all += had
        return had

    def _say_what_is_left(self) -> None:
        had, remaining = self._had_by_all, self._remaining()
        left = self._read_here - had
        ranks = gather((left + (remaining or 0), not left or remaining is not None), self._group)
        counts = ", ".join(
            f"{count}{'' if exact else ' or more'} on rank {rank}" for rank, (count, exact) in enumerate(ranks) if count
        )
        said = f"anks have uneven numbers of batches: all have {had}, and beyond those there are {counts}"
        if self._uneven == "error":
            raise InputError(f"r{said}. {self._advice}")
        rank_zero_info(f"R{said}. The epoch ends after {had} on every rank.")


def given_again(fetched: Fetched) -> Fetched:
    """Return a batch that was fetched before, as an entry of :meth:`Source.unread`."""
    return fetched
