"""Base class of the distributed strategies, with clean-up of the process group at exit and errors of checkpoints."""

from __future__ import annotations

import atexit
import inspect
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_pipe._compat.lightning import disable_distributed_sampler, strategy_timeout
from lightning_pipe.checkpoints.safe_reading import check_checksums, name_file_in_errors
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_choice
from lightning_pipe.engine.common.safe_text import short_repr
from lightning_pipe.engine.ranks.current_tasks import current_tasks, describe_current_tasks
from lightning_pipe.engine.ranks.tensors_at_exit import keep_tensors_alive_at_exit
from lightning_pipe.engine.runtime.fork_garbage import freeze_gc_in_forks
from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.data.batch_source import UnevenPolicy
from lightning_pipe.loops.data.orphaned_workers import end_workers_with_process
from lightning_pipe.loops.data.torchdata_samplers import fix_torchdata_distributed_shuffle
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_all_ranks_save_check
from lightning_pipe.loops.programs.user_errors import is_process_group_error
from lightning_pipe.loops.uneven_evaluation import UnevenBatchCoordinator, UnevenEvaluation
from lightning_pipe.strategies.cluster_environment import (
    get_environment_without_srun,
    get_torchrun_nodes_and_devices,
    refuse_multi_node_without_srun,
)


def read_checkpoint_file(read: Callable[..., Any], path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Checkpoint that Lightning's method *read* reads. A damaged or foreign file is one SetupError that names it."""
    with name_file_in_errors(path):
        if "://" not in str(path) and zipfile.is_zipfile(path):
            check_checksums(Path(path))
        checkpoint = read(path, weights_only=weights_only is not False)
        if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
            raise ValueError(f"expected a dict with the key 'pytorch-lightning_version', got {short_repr(checkpoint)}")
    return dict(checkpoint)


# True if the last call of a Trainer in this process completed.
_ended_well = False


def _destroy_process_group_at_exit() -> None:
    """Leave the process group before the interpreter exits, unless the run failed.

    After an error, a collective may still wait for a rank that waits for the exit of this process.
    """
    if _ended_well and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _get_max_torchrun_restarts() -> int:
    """Return how often torchrun may restart this job."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def install_loops(trainer: pl.Trainer) -> None:
    """Replace Lightning's loops by those that run programs of tasks."""
    install_evaluation_loops(trainer)
    install_all_ranks_save_check(trainer)
    if trainer.state.fn == TrainerFn.FITTING:
        PipelineTrainingEpochLoop.install(trainer)


class DistributedStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy``, except that a single process keeps its random streams and its loaders' order."""

    # Lightning distributes data over ranks for its own strategies, and for strategies with this attribute.
    is_distributed = True
    # True if ranks wait for each other in every evaluation batch.
    evaluates_together = False
    # True if all ranks read the same batches.
    all_ranks_share_data = False
    # Handling of ranks with fewer training batches: the epoch ends with the first rank that runs out, or all raise.
    uneven_batches: UnevenPolicy = "shortest"
    # Handling of ranks with fewer batches to evaluate: they join the other ranks, or all ranks raise.
    uneven_evaluation: UnevenEvaluation = "join"
    # True if values that an evaluation step logs without sync_dist are the same on all ranks.
    logs_for_all = False
    # Evaluation batch in progress that only some ranks have.
    _coordinator: UnevenBatchCoordinator | None = None

    def __init__(self, *, cluster_environment: ClusterEnvironment | None = None, **arguments: Any) -> None:
        # DDPStrategy accepts any argument, and gives it to DistributedDataParallel, which a single rank never makes.
        accepted = {
            **inspect.signature(DDPStrategy).parameters,
            **inspect.signature(DistributedDataParallel).parameters,
        }
        self._refuse_unknown_arguments(arguments.keys() - accepted)
        super().__init__(cluster_environment=cluster_environment or get_environment_without_srun(), **arguments)

    def _refuse_unknown_arguments(self, unknown: Iterable[str]) -> None:
        """Refuse unknown arguments under the name of the class that was called."""
        initializers = [vars(base)["__init__"] for base in type(self).__mro__ if "__init__" in vars(base)]
        signatures = map(inspect.signature, initializers)
        accepted = {
            parameter.name
            for signature in signatures
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        for name in unknown:
            close = get_close_matches(name, accepted, n=1, cutoff=0.5)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}{hint}")

    @property
    def num_nodes(self) -> int:
        """Number of machines: the Trainer's, or under torchrun the number of nodes that torchrun has started."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        # Lightning sets this after the devices, and before the ranks.
        self._num_nodes, self.parallel_devices = get_torchrun_nodes_and_devices(
            self.cluster_environment, number, self.parallel_devices or []
        )

    def _set_uneven_policies(self, uneven_batches: UnevenPolicy, uneven_evaluation: UnevenEvaluation) -> None:
        check_choice("uneven_batches", uneven_batches, get_args(UnevenPolicy))
        check_choice("uneven_evaluation", uneven_evaluation, get_args(UnevenEvaluation))
        self.uneven_batches, self.uneven_evaluation = uneven_batches, uneven_evaluation

    def setup_distributed(self) -> None:
        """Set up the process group.

        Lightning resets the random streams to the seed here, so that ranks agree. A single process keeps its random
        streams, as it does without a strategy.
        """
        global _ended_well
        _ended_well = False
        freeze_gc_in_forks()
        refuse_multi_node_without_srun(self.num_nodes, self.cluster_environment)
        ranks = self.num_nodes * self.num_processes
        if dist.is_initialized() and dist.get_world_size() != ranks:
            raise SetupError(
                f"this process is in a process group of {dist.get_world_size()} rank(s), made by an earlier Trainer or"
                f" by the script, and this Trainer has {ranks} (devices times num_nodes): data would be split over"
                f" {ranks}, and results collected from {dist.get_world_size()}. Use the same number of devices, call"
                " torch.distributed.destroy_process_group() first, or run this Trainer in a separate process"
            )
        if ranks > 1:
            self._warn_of_failing_restarts()
            users = dist.is_initialized()
            # Stays alive during set-up: rank 0's store is the server of the store that PyTorch creates.
            store = None if users else self._wait_for_all_ranks()
            current_tasks.clear()
            super().setup_distributed()
            del store
            keep_tensors_alive_at_exit()
            if not users:
                # Unregister first, so that the handler runs once even if several groups were made in this process.
                atexit.unregister(_destroy_process_group_at_exit)
                atexit.register(_destroy_process_group_at_exit)
        else:
            with isolate_rng():
                super().setup_distributed()

    def process_dataloader(self, dataloader: object) -> object:
        """Make torchdata's samplers shuffle alike on all ranks, and the loader's workers exit after this process."""
        return end_workers_with_process(fix_torchdata_distributed_shuffle(super().process_dataloader(dataloader)))

    # ------------------------------------------------------------------ batches that only some ranks have

    @contextmanager
    def announce_collectives_to_ranks(self, coordinator: UnevenBatchCoordinator, step: str) -> Iterator[None]:
        """Context in which collectives of an evaluation step are announced to *coordinator*."""
        self._coordinator = coordinator
        try:
            yield
        finally:
            self._coordinator = None

    def join_collective_of_other_rank(self, action: str, payload: object) -> None:
        """Start an announced collective with empty input. A barrier, the only one here, needs nothing."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, but in an evaluation step that only some ranks run, over these ranks only.

        The mean of integers is a floating-point number here. Lightning 2.6 truncates it: it divides the sum of a logged
        value by the truncated mean number of rows per rank, for example 3 instead of 3.5.
        """
        if self._coordinator is not None and isinstance(tensor, Tensor):
            if group is not None and group is not dist.group.WORLD:
                self._coordinator.refuse_collective("reduce over a group of some ranks (sync_dist_group)")
            return self._coordinator.reduce_tensor(tensor, reduce_op)
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in (None, "mean", "avg"):
            return super().reduce(tensor.double(), group, reduce_op).to(torch.get_default_dtype())
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather as Lightning does."""
        if self._coordinator is not None:
            self._coordinator.refuse_collective("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast as Lightning does."""
        if self._coordinator is not None:
            self._coordinator.refuse_collective("broadcast")
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, or in an evaluation step that only some ranks run, announce the barrier to the others."""
        if self._coordinator is None:
            super().barrier(*args, **kwargs)
        else:
            self._coordinator.announce_collective("barrier")

    def on_exception(self, exception: BaseException) -> None:
        """Add the batch and tasks of this rank to the error of a collective."""
        module = self.lightning_module
        if module is not None and (is_process_group_error(exception) or is_process_group_error(exception.__cause__)):
            epoch, batch = module.trainer.current_epoch, max(module.trainer.fit_loop.batch_idx, 0)
            exception.add_note(
                f"rank {self.global_rank} was in batch {batch} of epoch {epoch}, {describe_current_tasks()}. Compare"
                " this with the other ranks; a rank without such a note has ended, or never reached the collective"
            )
        super().on_exception(exception)

    def teardown(self) -> None:
        super().teardown()
        self._record_run_completion()

    def _record_run_completion(self) -> None:
        """Record if the call completed. If so, no rank is in a collective and leaving the process group cannot hang."""
        global _ended_well
        module = self.lightning_module
        _ended_well = module is not None and module.trainer.state.status != TrainerStatus.INTERRUPTED

    def _warn_of_failing_restarts(self) -> None:
        """Warn that restarts by torchrun will fail (seen with PyTorch 2.13 and Gloo)."""
        restarts = _get_max_torchrun_restarts()
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        defaults = dist.Backend.default_device_backend_map
        if shared and restarts and "gloo" in (self.process_group_backend or defaults[self.root_device.type]):
            rank_zero_warn(
                f"torchrun may restart this job {restarts} time(s), but it keeps the addresses of ended ranks, and Gloo"
                " connects the new ranks to them. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, so that"
                " restarts work",
                category=RuntimeWarning,
            )

    def _wait_for_all_ranks(self) -> dist.Store:
        """Wait until all ranks have started, and return the store that they have joined."""
        environment = self.cluster_environment
        assert environment is not None
        rank, world_size = environment.global_rank(), environment.world_size()
        wait = strategy_timeout(self)
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        # The agent's store outlives a start. Nodes count starts separately, and a node that joined later has fewer.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agents else "0"
        try:
            # With multi_tenant, the store that PyTorch creates at the same port in rank 0's process shares this server.
            store = dist.TCPStore(
                environment.main_address,
                environment.main_port,
                is_master=rank == 0 and not agents,
                timeout=wait,
                wait_for_workers=False,
                multi_tenant=True,
            )
            keys = [f"lightning_pipe/arrived/{attempt}/{other_rank}" for other_rank in range(world_size)]
            store.set(keys[rank], "")
        except dist.DistError as error:
            raise SetupError(
                f"rank {rank} of {world_size} does not reach rank 0 at {environment.main_address}:"
                f"{environment.main_port} ({error}). Start all ranks, and check that they can reach that address"
            ) from error
        try:
            store.wait(keys, wait)
        except dist.DistError as error:
            missing = [str(other_rank) for other_rank, key in enumerate(keys) if not store.check([key])]
            # Rank 0's process serves the store, so it leaves last.
            store.set(f"{keys[rank]}/left", "")
            if rank == 0:
                with suppress(dist.DistError):
                    left_keys = [f"{key}/left" for other_rank, key in enumerate(keys) if str(other_rank) not in missing]
                    store.wait(left_keys, timedelta(seconds=10))
            raise SetupError(
                f"rank(s) {', '.join(missing)} of {world_size} did not arrive in {wait.total_seconds():g} s, as seen by"
                f" rank {rank}. Start them, or look for errors in their output; the strategy's timeout sets the time"
                " limit"
            ) from error
        return store

    def _disable_sampler_if_single_process(self, trainer: pl.Trainer) -> None:
        """Make a single process read its data in the order of its loaders.

        Lightning assumes that a distributed strategy has several processes, and installs a sampler that shuffles
        training data even if the user's loader does not. A job that torchrun may restart keeps the sampler, whose order
        other numbers of ranks can continue.
        """
        if trainer.world_size == 1 and not _get_max_torchrun_restarts():
            disable_distributed_sampler(trainer)
