"""Runs a function on several ranks, each a process of its own, so that a rank that dies or hangs is a failed test.

The harness itself needs no torch. Ranks are forked from servers that have imported what most tests use
(:mod:`tests.preloaded`): a fork takes milliseconds, the imports up to 14 s of computing time. Two servers with other
seeds of Python's hash, so that ranks differ in the order of sets, as processes that start by themselves do.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from tests.patience import HANG

T = TypeVar("T")

# Of PyTorch's kernels, in each process of the tests. Results must not depend on the number of cores.
THREADS = int(os.environ.get("LIGHTNING_PIPE_TEST_THREADS", "1"))
# Once one rank has failed, the others have this long (seconds) to say why before they are killed.
GRACE = 60.0
# How long (seconds) a process may take to end once it was told to, and a thread that is about to end.
END = 60.0


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = HANG) -> list[T]:
    """Each rank's value of ``fn(rank, world_size, *args)`` in processes joined by Gloo over loopback.

    The function is one of a module. An AssertionError says of every rank whether it raised, died, left threads behind
    or did not end within *timeout* seconds; one that had to be killed shows where its threads stood.
    """
    deadline = time.monotonic() + timeout
    # Pickled here, once: multiprocessing would have the ranks share the memory of tensors.
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank(rank, world_size, call, Path(folder), timeout) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start()
            _collect(ranks, deadline)
            if all(rank.failure is None for rank in ranks):
                for rank in ranks:
                    rank.release()
                for rank in ranks:
                    rank.expect_end()
            failures = [f"rank {rank.index} of {world_size} {rank.failure}" for rank in ranks if rank.failure]
        finally:
            for rank in ranks:
                rank.end()
    if failures:
        raise AssertionError("\n\n".join(failures))
    return [rank.value for rank in ranks]


def with_detailed_debugging(rank: int, world_size: int, fn: Callable[[int, int], T], folder: Path) -> T:
    """Calls ``fn(rank, world_size)`` on a rank of `run_ranks` as if started with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    PyTorch reads that when it is imported, and a rank is a copy of a process that has done so: the level is set, and
    the world group made again. All ranks give the same empty *folder*.
    """
    import torch.distributed as dist

    dist.barrier()  # a rank that leaves early would break the connections that others still make
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=HANG),
    )
    return fn(rank, world_size)


class InParts:
    """What each rank has come to, part by part: a part is run when a test first asks for something of it.

    ``run(part)`` returns the results of each rank by key, and ``part_of(key)`` the part that a key belongs to.
    """

    def __init__(self, run: Callable[[str], list[dict[Any, Any]]], part_of: Callable[[Any], str]) -> None:
        self._run, self._part_of = cache(run), part_of

    def of_ranks(self, world_size: int) -> list[Any]:
        """A mapping for each rank."""
        return [_OfRank(self, rank) for rank in range(world_size)]

    def of(self, rank: int, key: Any) -> Any:
        """One rank's result."""
        return self._run(self._part_of(key))[rank][key]


class _OfRank:
    def __init__(self, parts: InParts, rank: int) -> None:
        self._parts, self._rank = parts, rank

    def __getitem__(self, key: Any) -> Any:
        return self._parts.of(self._rank, key)


def threads_left(before: Collection[threading.Thread], end: float | None = None) -> list[str]:
    """Names of the threads that are alive after *end* seconds, were not in *before*, and should have ended.

    Those are the threads that would keep the process alive, and the pipeline's workers, which are daemons.
    """
    new = [thread for thread in threading.enumerate() if thread not in before]
    owed = [thread for thread in new if not thread.daemon or thread.name.startswith("lightning_pipe")]
    for thread in owed:
        # One that was told to end may still be on its way.
        thread.join(END if end is None else end)
    return [thread.name for thread in owed if thread.is_alive()]


class _Rank:
    """One process, as the test sees it."""

    def __init__(self, index: int, world_size: int, call: bytes, folder: Path, timeout: float) -> None:
        self.index = index
        self.value: Any = None
        self.failure: str | None = None
        self.reported = False
        self._stacks = folder / f"stacks_{index}"
        self._server = _server(index % _SERVERS)
        environment = {**os.environ, **_environment(index, world_size)}
        self.connection, self._child_end = multiprocessing.Pipe()
        store = folder / "store"
        self._process: Any = multiprocessing.get_context("forkserver").Process(
            target=_serve,
            args=(call, index, world_size, self._child_end, str(store), str(self._stacks), timeout, END, environment),
            name=f"rank {index}",
        )

    def start(self) -> None:
        _start(self._process, self._server)
        # From now on only the process holds it, so that its death is seen as the end of the connection.
        self._child_end.close()

    def receive(self) -> None:
        """Takes the report that is there, or the death of the process in its place."""
        self.reported = True
        try:
            self.failure, value = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(END)
            self.failure = f"{self._how_it_ended()} before it returned{self._where_it_stood()}"
            return
        if self.failure is None:
            self.value = pickle.loads(value)

    def release(self) -> None:
        """Lets a rank that has returned leave the process group: no other needs it any more."""
        # One that died meanwhile is found by `expect_end`.
        with suppress(ConnectionError):
            self.connection.send(None)

    def expect_end(self) -> None:
        """A rank that was released ends by itself, and well."""
        self._process.join(END)
        if self._process.exitcode is None:
            self.abandon("had returned, but its process did not end and was killed")
        elif self._process.exitcode != 0:
            self.failure = f"had returned, but then {self._how_it_ended()}{self._where_it_stood()}"

    def abandon(self, reason: str) -> None:
        """Kills the process; the failure shows where its threads stood."""
        # The signal writes the stacks of all threads and ends the process, even one that hangs in native code.
        self._signal(signal.SIGUSR2)
        self._process.join(END)
        self.failure = reason + self._where_it_stood()

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process.pid is not None:
            self._process.join()
            self._process.close()
        self.connection.close()
        self._child_end.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            # The server that has forked it may not have told its end yet.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _where_it_stood(self) -> str:
        stacks = self._stacks.read_text().rstrip() if self._stacks.exists() else ""
        return f":\n{stacks}" if stacks else ""


def _collect(ranks: list[_Rank], deadline: float) -> None:
    """Waits until every rank has reported; gives up on the rest at the deadline, or soon after the first failure."""
    reason = "had not finished in time and was killed"
    while waiting := [rank for rank in ranks if not rank.reported]:
        ready = wait([rank.connection for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in waiting:
            if rank.connection in ready:
                rank.receive()
                if rank.failure is not None and time.monotonic() + GRACE < deadline:
                    deadline = time.monotonic() + GRACE
                    reason = f"had not finished {GRACE:g} s after another had failed and was killed"
    for rank in waiting:
        rank.abandon(reason)


def _environment(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun would set, but for the address; the number of threads, and Gloo's sockets on loopback."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(THREADS),
    }
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = min(loopback)
    return environment


# Of Python's hash, one for each server.
_SERVERS = 2
# Where they listen, in the environment of processes that run tests side by side.
_ADDRESSES = "LIGHTNING_PIPE_TEST_SERVERS"


def share_servers() -> None:
    """Start the servers of ranks, for all processes that are started from now on; they end with this one."""
    servers = [_server(index) for index in range(_SERVERS)]
    os.environ[_ADDRESSES] = os.pathsep.join(str(server._forkserver_address) for server in servers)  # type: ignore[attr-defined]


def fork_preloaded(target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    """Start ``target(*args)`` in a process that has imported :mod:`tests.preloaded`; returns the process."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    _start(process, _server(0))
    return process


def _start(process: Any, server: forkserver.ForkServer) -> None:
    with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        process.start()


class _SharedServer(forkserver.ForkServer):
    """A server that another process has started."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        # Of the pipe that tells a server that nobody needs it; this one asks who started it.
        self._forkserver_alive_fd = os.pipe()[1]

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


@cache
def _server(index: int) -> forkserver.ForkServer:
    """A process that is forked for ranks; it ends with the process that has started it."""
    if _ADDRESSES in os.environ:
        return _SharedServer(os.environ[_ADDRESSES].split(os.pathsep)[index])
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.preloaded"])
    # Libraries for linear algebra start threads when they are loaded, unless they are to have one.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    with mock.patch.dict(os.environ, {**threads, "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": str(index + 1)}):
        server.ensure_running()
    return server


def _start_anew(environment: dict[str, str]) -> None:
    """Make a forked process what a new one is: its environment, and random streams of its own."""
    import numpy
    import torch

    atexit._clear()  # what the server's imports have registered
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    numpy.random.seed()
    torch.seed()


def _serve(
    call: bytes,
    rank: int,
    world_size: int,
    connection: Connection,
    store: str,
    stacks: str,
    timeout: float,
    end: float,
    environment: dict[str, str],
) -> None:
    """The life of a rank's process: join the group, call, report, wait for the others, leave."""
    _start_anew(environment)
    # The rank's own processes, such as a loader's workers, start as those of a user's script do: multiprocessing would
    # have them start in the way that the rank was started, and import everything again.
    multiprocessing.set_start_method(None, force=True)
    # A bare descriptor, open until the process is gone: it may crash or hang while it ends.
    file = os.open(stacks, os.O_WRONLY | os.O_CREAT)
    faulthandler.enable(file)
    # After the stacks comes the signal's own effect, the end of the process.
    faulthandler.register(signal.SIGUSR2, file, chain=True)
    keep_fault_handlers()
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    codes = [1]
    # The last handler to run, since it is the first to register: Python has ended by then, and the libraries' own
    # ends are left out. Gloo's threads are still there in some, and PyTorch then aborts (seen once in 3000 tests).
    atexit.register(lambda: os._exit(codes[-1]))
    try:
        value = _call(call, rank, world_size, store, timeout, end)
    except BaseException:
        connection.send((f"raised:\n{traceback.format_exc().rstrip()}", None))
        raise SystemExit(1) from None
    connection.send((None, value))
    # A rank that leaves early would break the collectives that others are still in.
    connection.recv()
    _leave_group()
    codes.append(0)
    atexit._run_exitfuncs()  # which the server leaves out


def keep_fault_handlers() -> None:
    """Keep the handlers of `faulthandler`: after a run, Lightning resets all signals to handlers set in Python."""
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    faults = {signal.SIGUSR2, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
    others = signal.valid_signals() - faults
    _SignalConnector._valid_signals = staticmethod(lambda: set(others))  # type: ignore[method-assign]


def _call(call: bytes, rank: int, world_size: int, store: str, timeout: float, end: float) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(THREADS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    fn, args = pickle.loads(call)
    before = threading.enumerate()
    value = pickle.dumps(fn(rank, world_size, *args))
    left = threads_left(before, end)
    assert not left, f"{fn.__name__} left threads behind: {', '.join(left)}"
    return value


def _leave_group() -> None:
    import torch.distributed as dist

    # The function may have left it already, as Lightning does.
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """A test run that is killed leaves no ranks behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
