"""Status of each rank's next batch, a number and a flag, which every rank posts and collects from all.

A status is posted when the batch is fetched and collected one batch later, so that no rank waits. It is exchanged by a
collective in the background or, if all ranks are on one machine, through a board in shared memory. Gloo's all-reduce of
three numbers wakes threads on each rank: with two ranks on two cores it took 0.31, 0.35 and 0.40 ms of processor time
per rank and step more than the board in three runs, which is 3 to 4 % of a step of 10 ms. The machine had other work,
so wall times were not meaningful.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lightning_pipe._compat.torch import timeout_of
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.engine.ranks.together import any_of, from_rank, place_of_process

try:
    import fcntl
except ImportError:  # not a POSIX system, so the board is not available
    fcntl = None  # type: ignore[assignment]


class Collected(NamedTuple):
    """Smallest and largest number that any rank posted, and True if any rank posted the flag."""

    least: int
    greatest: int
    flagged: bool


class Statuses(Protocol):
    """Exchange of statuses between ranks. Every rank must make the same calls."""

    def post(self, number: int, flag: bool) -> None:
        """Post a status to all ranks. The previous status must have been collected with ``hear`` or ``forget``."""
        ...

    def collect(self) -> Collected:
        """Wait until all ranks have posted, and return their statuses combined."""
        ...

    def forget(self) -> None:
        """Wait for pending statuses, if any, and discard them."""
        ...

    def close(self) -> None:
        """Leave the exchange."""
        ...


def statuses_of(group: dist.ProcessGroup) -> Statuses:
    """Return a board if all ranks of the group share memory, otherwise collectives. Every rank must call this."""
    return StatusBoard.of(group) or ReducedStatuses(group)


class StatusGroup:
    """CPU process group of all ranks with an exchange of statuses, created on first use."""

    def __init__(self) -> None:
        self._opened: tuple[dist.ProcessGroup, Statuses] | None = None

    def open(self) -> tuple[dist.ProcessGroup, Statuses]:
        """Return the group and the exchange, and create them on the first call. Every rank must call this."""
        if self._opened is None:
            group = new_group(backend="gloo")
            self._opened = group, statuses_of(group)
        return self._opened

    def close(self) -> None:
        """Close the exchange and destroy the group, if they exist."""
        opened, self._opened = self._opened, None
        if opened is not None:
            group, statuses = opened
            statuses.close()
            # The user may have destroyed the default process group, and with it all groups.
            if dist.is_initialized():
                dist.destroy_process_group(group)


class ReducedStatuses:
    """Exchange of statuses by an all-reduce in the background."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._round: tuple[torch.Tensor, Any] | None = None

    def post(self, number: int, flag: bool) -> None:
        # The minimum over ranks of number, -number and -flag gives the smallest and the largest number, and the flag.
        said = torch.tensor([number, -number, -int(flag)])
        self._round = said, dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group, async_op=True)

    def collect(self) -> Collected:
        assert self._round is not None
        (said, work), self._round = self._round, None
        work.wait()
        least, negative, flags = said.tolist()
        return Collected(least, -negative, flags < 0)

    def forget(self) -> None:
        pending, self._round = self._round, None
        if pending is not None:
            pending[1].wait()

    def close(self) -> None:
        pass


# A status is one 64-bit word, which is written atomically: the number of the round, the flag's bit, and the number.
_ROUND, _FLAG, _ZERO = 32, 1 << 31, 1 << 30
_TOKEN = 8  # bytes
# Seconds between two checks that a rank that has not posted is still alive.
_LOOK = 0.05


class StatusBoard:
    """Exchange of statuses through words in memory that the ranks of one machine share.

    Each rank writes its words alternately to two places. It posts status n + 2, which overwrites status n, only after
    it has collected status n + 1 from all ranks. A rank posts status n + 1 only after it has collected status n.
    Therefore all ranks have read a word before it is overwritten.

    Each rank holds a lock on one byte of the file while it is alive. The kernel releases the lock when the process
    ends, for any reason.
    """

    def __init__(self, file: int, rank: int, size: int, timeout: float) -> None:
        self._file, self._rank, self._size, self._timeout = file, rank, size, timeout
        self._memory = mmap.mmap(file, _bytes(size))
        self._words = memoryview(self._memory).cast("q")
        self._told = self._heard = 0
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> StatusBoard | None:
        """Return a board for *group*, or None on all ranks if they do not share memory. Every rank must call this."""
        own, board, token = None, None, secrets.token_bytes(_TOKEN)
        boot, _ = place_of_process()
        try:
            if group.rank() == 0 and fcntl is not None:
                own = _new_file(token, group.size())
            path, token, its_boot = from_rank(lambda: (own, token, boot), "no memory can be shared", group)
            seconds = timeout_of(group).total_seconds()
            if its_boot == boot:  # other hosts may see the same file on a network file system, but not the same memory
                board = _opened(path, token, lambda file: cls(file, group.rank(), group.size(), seconds))
            (some_lack,) = any_of([board is None], group)
        finally:
            if own is not None:
                own.unlink()  # all ranks have opened it or do not use it, so no file remains when they end
        if some_lack and board is not None:
            board.close()
        return None if some_lack else board

    def post(self, number: int, flag: bool) -> None:
        assert self._heard == self._told, "the previous status has not been collected"
        told = self._told + 1
        self._words[self._place(self._rank, told)] = told << _ROUND | (_FLAG if flag else 0) | number + _ZERO
        self._told = told

    def collect(self) -> Collected:
        assert self._heard < self._told
        words = [self._word_of(rank) for rank in range(self._size)]
        self._heard = self._told
        numbers = [(word & (_FLAG - 1)) - _ZERO for word in words]
        return Collected(min(numbers), max(numbers), any(word & _FLAG for word in words))

    def forget(self) -> None:
        if self._heard < self._told:
            self.collect()  # the next post could overwrite a word that other ranks have not read

    def close(self) -> None:
        if not self._memory.closed:
            self._words[2 * self._size + self._rank] = 1
            self._words.release()
            self._memory.close()
            os.close(self._file)

    def _place(self, rank: int, of_round: int) -> int:
        return of_round % 2 * self._size + rank

    def _word_of(self, rank: int) -> int:
        word = self._words[self._place(rank, self._told)]
        return word if word >> _ROUND == self._told else self._awaited(rank)

    def _awaited(self, rank: int) -> int:
        begun = looked = time.monotonic()
        pause = 2e-5
        while True:
            ended = False
            if (now := time.monotonic()) - looked > _LOOK:
                looked, ended = now, self._has_ended(rank)
            # The word is read after the check, since the rank may have posted it and then ended.
            word = self._words[self._place(rank, self._told)]
            if word >> _ROUND == self._told:
                return word
            if ended:
                raise RuntimeError(f"rank {rank} has ended")
            if now - begun > self._timeout:
                raise RuntimeError(f"rank {rank} has not posted a status for {self._timeout:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)

    def _has_ended(self, rank: int) -> bool:
        if self._words[2 * self._size + rank]:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:  # the rank holds the lock
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def _bytes(size: int) -> int:
    return 8 * (3 * size + 1)  # two status words per rank, one word per rank that marks its end, and the token


def _new_file(token: bytes, size: int) -> Path | None:
    memory = Path("/dev/shm")
    with suppress(OSError):
        file, name = tempfile.mkstemp(prefix="lightning_pipe_", dir=memory if memory.is_dir() else None)
        try:
            if os.write(file, bytes(_bytes(size) - len(token)) + token) == _bytes(size):
                return Path(name)
        except OSError:  # no space left
            os.unlink(name)
            raise
        finally:
            os.close(file)
        os.unlink(name)
    return None


def _opened(path: Path | None, token: bytes, board: Callable[[int], StatusBoard]) -> StatusBoard | None:
    """Return a board on the file; None if this process cannot open it, or finds another file at the path."""
    if path is None or fcntl is None:
        return None
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(file, os.fstat(file).st_size, 0)[-len(token) :] == token:
            return board(file)
    except OSError:  # a file system without locks
        pass
    os.close(file)
    return None
