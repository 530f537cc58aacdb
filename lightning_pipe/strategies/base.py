"""What the strategies are to a Trainer: distributed, and on one process like Lightning's strategy for one device."""

from __future__ import annotations

import atexit
import errno
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.runtime.fork_garbage import keep_garbage_from_forks
from lightning_pipe.loops.data.batch_source import Uneven
from lightning_pipe.loops.data.orphaned_workers import ending_with_rank
from lightning_pipe.loops.data.stateful_loaders import shuffled_over_ranks
from lightning_pipe.loops.uneven_evaluation import Turn, UnevenEvaluation


@contextmanager
def reading_plain_types(path: str | Path) -> Iterator[None]:
    """In the body a checkpoint is read that may hold tensors and plain types.

    Raises:
        SetupError: it holds more, or is damaged.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise SetupError(
            f"the checkpoint {str(path)!r} holds more than tensors and plain types, or is damaged"
            f" ({str(error).strip().splitlines()[-1]}), and could run any code when it is read. If you trust"
            " whoever wrote it, give Trainer.fit(..., weights_only=False); or allow the class:"
            " torch.serialization.add_safe_globals([...])"
        ) from error
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise  # it is not there, or may not be read
        raise SetupError(
            f"the checkpoint {str(path)!r} cannot be read ({type(error).__name__}: {error}): it is damaged, or a file"
            " of another kind; take another checkpoint"
        ) from error


# What reading a damaged file ends in, beside the errors of unpickling and of the system.
_DAMAGED = (AttributeError, EOFError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


# Whether the last call of a Trainer in this process came to its end.
_ended_well = False
# Seconds that a process which ends after an error waits for its collectives; other ranks see its end only then.
_LAST_WAIT = 5.0


def _leave_at_exit() -> None:
    """Leave the process group before the interpreter ends.

    A thread of Gloo's may still hold the last collective's tensors when the interpreter is gone, and letting go of them
    then ends the process with "terminate called without an active exception" and signal 6: torchrun takes a run that
    has succeeded for one that has failed, and an error's own exit status is lost (seen with PyTorch 2.13). Leaving
    waits for such threads. After an error they may be waiting for a rank that waits for this one to end, so that the
    wait is bounded.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    if _ended_well:
        dist.destroy_process_group()
        return
    leaves = threading.Thread(target=_leave, name="leaves the process group", daemon=True)
    with suppress(RuntimeError):  # Python 3.12 and later start no thread this late
        leaves.start()
        leaves.join(_LAST_WAIT)


def _leave() -> None:
    with suppress(Exception):  # the error that ends the process has been told
        dist.destroy_process_group()


class DistributedStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy``, which leaves one process its random streams and its loaders' order."""

    # Lightning shards data for strategies it knows, and for those that say so.
    is_distributed = True
    # Whether ranks wait for each other in every batch that they evaluate.
    evaluates_together = False
    # Whether all ranks read the same batches.
    ranks_share_data = False
    # Where some ranks have fewer batches, an epoch ends with the shortest, or an error.
    uneven_batches: Uneven = "shortest"
    # Handling of ranks with fewer batches to evaluate: they join the other ranks, or all ranks raise.
    uneven_evaluation: UnevenEvaluation = "join"
    # True if values that an evaluation step logs without sync_dist are the same on all ranks.
    logs_for_all = False
    # Evaluation batch in progress that only some ranks have.
    _turn: Turn | None = None

    def _take_uneven(self, uneven_batches: Uneven, uneven_evaluation: UnevenEvaluation) -> None:
        given = {"uneven_batches": (uneven_batches, Uneven), "uneven_evaluation": (uneven_evaluation, UnevenEvaluation)}
        for name, (value, known) in given.items():
            if value not in get_args(known):
                raise SetupError(f"{name} is {value!r}; expected one of {', '.join(map(repr, get_args(known)))}")
        self.uneven_batches, self.uneven_evaluation = uneven_batches, uneven_evaluation

    def setup_distributed(self) -> None:
        """Set up the process group.

        Lightning starts the random streams anew from the seed here, for ranks to agree. One process goes on with its
        own, as it does without a strategy.
        """
        global _ended_well
        _ended_well = False
        keep_garbage_from_forks()
        ranks = self.num_nodes * self.num_processes
        if dist.is_initialized() and dist.get_world_size() != ranks:
            raise SetupError(
                f"this process is in a process group of {dist.get_world_size()} rank(s), made by an earlier Trainer or"
                f" by the script, and this Trainer has {ranks} (devices times num_nodes): data would be shared out to"
                f" {ranks} and results collected from {dist.get_world_size()}. Give it as many devices, or call"
                " torch.distributed.destroy_process_group() before, or run it in a process of its own"
            )
        if ranks > 1:
            self._warn_of_stale_addresses()
            users = dist.is_initialized()
            # Kept meanwhile: rank 0's is the server of the one that PyTorch makes.
            store = None if users else self._wait_for_all_ranks()
            super().setup_distributed()
            del store
            if not users:
                # Again in each process and for each group that was made: it counts once.
                atexit.unregister(_leave_at_exit)
                atexit.register(_leave_at_exit)
        else:
            with isolate_rng():
                super().setup_distributed()

    def process_dataloader(self, dataloader: object) -> object:
        """Let all ranks shuffle alike, and the workers of a loader end after this process, however it ends."""
        return ending_with_rank(shuffled_over_ranks(super().process_dataloader(dataloader)))

    # ------------------------------------------------------------------ batches that not all ranks have

    @contextmanager
    def in_turn(self, turn: Turn, step: str) -> Iterator[None]:
        """Context in which collectives of an evaluation step are announced to *turn*."""
        self._turn = turn
        try:
            yield
        finally:
            self._turn = None

    def join_evaluation(self, what: str, detail: object) -> None:
        """Start an announced collective with empty input.

        Raises:
            SetupError: unknown collective.
        """
        if what != "barrier":
            raise SetupError(f"{type(self).__name__} cannot join the collective {what!r}; expected 'barrier'")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does; in a step that only some ranks run, over those ranks.

        The mean of integers is a floating-point number. Lightning 2.6 truncates it, and divides the sum of a logged
        value by the truncated mean number of rows per rank, for example 3 instead of 3.5.
        """
        if self._turn is not None and isinstance(tensor, Tensor):
            if group is not None and group is not dist.group.WORLD:
                self._turn.refuse("reduce over a group of some ranks (sync_dist_group)")
            return self._turn.reduce(tensor, reduce_op)
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in (None, "mean", "avg"):
            return super().reduce(tensor.double(), group, reduce_op).to(torch.get_default_dtype())
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As Lightning's.

        Raises:
            InputError: called in a step that only some ranks run.
        """
        if self._turn is not None:
            self._turn.refuse("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As Lightning's.

        Raises:
            InputError: called in a step that only some ranks run.
        """
        if self._turn is not None:
            self._turn.refuse("broadcast")
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's."""
        if self._turn is None:
            super().barrier(*args, **kwargs)
        else:
            self._turn.call("barrier")

    def teardown(self) -> None:
        super().teardown()
        self._note_end()

    def _note_end(self) -> None:
        """Note whether all ranks have come to the end, so that none waits for another when it leaves."""
        global _ended_well
        module = self.lightning_module
        _ended_well = module is not None and module.trainer.state.status != TrainerStatus.INTERRUPTED

    def _warn_of_stale_addresses(self) -> None:
        """Say that torchrun's restarts will fail. Seen with PyTorch 2.13 and Gloo."""
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if shared and restarts not in ("", "0") and "gloo" in (self._get_process_group_backend() or ""):
            rank_zero_warn(
                f"torchrun may restart this job {restarts} time(s), and keeps the addresses of ended ranks, which new"
                " ones then try to reach (Gloo). Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and restarts"
                " work",
                category=RuntimeWarning,
            )

    def _wait_for_all_ranks(self) -> dist.Store:
        """Raise on every rank that is there, where one is not.

        Raises:
            SetupError: says which; on rank 0's host nobody may answer at all.
        """
        environment = self.cluster_environment
        assert environment is not None
        rank, world_size = environment.global_rank(), environment.world_size()
        wait: timedelta = self._timeout or timedelta(minutes=30)
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            # Within rank 0's process the one that PyTorch makes at the same port is this one (multi_tenant).
            store = dist.TCPStore(
                environment.main_address,
                environment.main_port,
                is_master=rank == 0 and not agents,
                timeout=wait,
                wait_for_workers=False,
                multi_tenant=True,
            )
            keys = [f"lightning_pipe/arrived/{attempt}/{other}" for other in range(world_size)]
            store.set(keys[rank], "")
        except dist.DistError as error:
            raise SetupError(
                f"rank {rank} of {world_size} does not reach rank 0 at {environment.main_address}:"
                f"{environment.main_port} ({error}). Start all ranks, and see that they can reach that address"
            ) from error
        try:
            store.wait(keys, wait)
        except dist.DistError as error:
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            # Rank 0's process has the store: it ends last.
            store.set(f"{keys[rank]}/left", "")
            if rank == 0:
                with suppress(dist.DistError):
                    here = [f"{key}/left" for other, key in enumerate(keys) if str(other) not in missing]
                    store.wait(here, timedelta(seconds=10))
            raise SetupError(
                f"of {world_size} ranks {', '.join(missing)} did not arrive in {wait.total_seconds():g} s, says rank"
                f" {rank}. Start them too, or look in their output; the strategy's timeout says how long to wait"
            ) from error
        return store

    def _leave_loaders_of_one_process(self, trainer: pl.Trainer) -> None:
        """Let one process read its data in its loaders' order.

        Lightning takes every strategy that is distributed for one of several processes, and gives it a sampler that
        shuffles training data even where the user's loader does not.
        """
        if trainer.world_size == 1:
            trainer._accelerator_connector.use_distributed_sampler = False
