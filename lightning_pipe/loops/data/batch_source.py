"""Sources of batches for the ledger: the loader and, with several ranks, an agreement of all ranks on each batch.

A rank that has no more batches, or that cannot fetch one, would leave the other ranks waiting in the collectives of the
next step. Therefore all ranks exchange the status of each batch before it is returned. The exchange overlaps with the
training of earlier batches::

    call      fetches   status known of     returns
    0         0, 1      0 and 1             0, not the last batch
    1         2         2 (posted in 0)     1
    2         3         3: rank 1 has none
                                            2, the last batch on every rank

Up to two fetched batches are held in this process until they are returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_pipe.engine import InputError
from lightning_pipe.engine.ranks.batch_status import BatchStatusExchange
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects

# A batch, True if it is the loader's last one, and the positions of loaders and random streams after it.
Fetched = tuple[Any, bool, dict[str, Any]]
# Behavior in an epoch in which some ranks have fewer batches.
UnevenPolicy = Literal["shortest", "error"]

# Status numbers. The kind of the batch is added to _HAS. A rank that could not fetch posts -rank - 1.
_HAS, _ENDED = 1, 0

_ADVICE = (
    "Give every rank the same number of batches (drop_last=True, or a sampler that pads), or end epochs with the"
    " shortest rank (uneven_batches='shortest')."
)


class BatchSource:
    """Source of one rank's batches: first *unread* ones, then those of *fetch*."""

    termination_due = False  # True after any rank was told to end training, from the same batch on all ranks

    def __init__(self, fetch: Callable[[], Fetched], unread: Sequence[Callable[[], Fetched]] = ()) -> None:
        self._fetch = fetch
        self._unread = deque(unread)

    def __call__(self) -> Fetched:
        """Return the next batch. Raises ``StopIteration`` after the last one."""
        return self._unread.popleft()() if self._unread else self._fetch()

    def get_undelivered_batches(self) -> list[Callable[[], Fetched]]:
        """Return functions that give the batches that were read but not returned, in order."""
        return list(self._unread)

    def close(self) -> None:
        """End the source after its last batch."""


class SynchronizedBatchSource(BatchSource):
    """Source of the batches that all ranks have. Every rank must make the same calls."""

    def __init__(
        self,
        fetch: Callable[[], Fetched],
        unread: Sequence[Callable[[], Fetched]],
        statuses: BatchStatusExchange,
        remaining: Callable[[], int | None],
        uneven: UnevenPolicy | None = "shortest",
        told_to_end: Callable[[], bool] | None = None,
        *,
        kind: Callable[[Fetched], int] | None = None,
        phase: str = "epoch",
        advice: str = _ADVICE,
    ) -> None:
        super().__init__(fetch, unread)
        self._kind = kind
        self._phase = phase
        self._advice = advice
        self._told_to_end = told_to_end
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
            # Discard statuses still pending from a previous source that failed.
            self._statuses.discard_pending()
            self._read()
            self._ended = not self._all_have_it()
            if not self._ended:
                self._read()
        if self._ended:
            raise StopIteration
        # Collect the status of the batch after the one that is returned, which shows if that one is the last.
        self._ended = not self._all_have_it()
        batch, _, after = self._ahead.popleft()
        if not self._ended:
            self._read()
        return batch, self._ended, after

    def get_undelivered_batches(self) -> list[Callable[[], Fetched]]:
        return [partial(get_fetched_batch, fetched) for fetched in self._ahead] + super().get_undelivered_batches()

    def close(self) -> None:
        """Wait for statuses that are still in flight."""
        self._statuses.discard_pending()

    def _read(self) -> None:
        """Fetch a batch, and post its status to the other ranks."""
        status = _HAS
        try:
            fetched = super().__call__()
            self._ahead.append(fetched)
            status += 0 if self._kind is None else self._kind(fetched)
            self._read_here += 1
        except StopIteration:
            status = _ENDED
        except BaseException as error:  # any exception, since the other ranks wait for this rank's status
            status, self._error = -self._statuses.group.rank() - 1, error
        self._statuses.post(status, self._told_to_end is not None and self._told_to_end())

    def _all_have_it(self) -> bool:
        try:
            least, most, told_to_end = self._statuses.collect()
        except RuntimeError as error:
            raise self._error or InputError(
                f"The ranks could not agree on batch {self._had_by_all} of the {self._phase}, because a rank has ended"
                f" or did not respond in time ({error}). See the output of that rank for the cause, and restart all"
                " ranks from the last checkpoint."
            ) from error
        if self._error is not None:
            raise self._error
        self.termination_due |= told_to_end
        if least < _ENDED:
            raise InputError(
                f"Rank {-least - 1} could not fetch its batch {self._had_by_all} of the {self._phase}. See the error of"
                " that rank for the cause."
            )
        even = least == most
        if not even and self._uneven is not None:
            self._report_leftover_batches()
        had = even and least != _ENDED
        self._had_by_all += had
        return had

    def _report_leftover_batches(self) -> None:
        had, remaining = self._had_by_all, self._remaining()
        left = self._read_here - had
        ranks = all_gather_objects((left + (remaining or 0), not left or remaining is not None), self._statuses.group)
        counts = ", ".join(
            f"{count}{'' if exact else ' or more'} on rank {rank}" for rank, (count, exact) in enumerate(ranks) if count
        )
        message = f"Ranks have uneven numbers of batches: all ranks have {had}, with {counts} left over"
        if self._uneven == "error":
            raise InputError(f"{message}. {self._advice}")
        rank_zero_info(f"{message}. The epoch ends after {had} batches on every rank.")


def get_fetched_batch(fetched: Fetched) -> Fetched:
    """Return a batch that was fetched earlier, for :meth:`BatchSource.get_undelivered_batches`."""
    return fetched
