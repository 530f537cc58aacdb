"""One process that trains an ``nn.Sequential`` on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_pipe.engine import PlanError, SetupError, TaskSpan
from lightning_pipe.engine.common.options import check_flags
from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.data.orphaned_workers import ending_with_rank
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.pipe import Pipe
from lightning_pipe.pipe.batch_norm import undefer_batch_norm
from lightning_pipe.pipe.partitioning import Checkpoint, check_checkpoint
from lightning_pipe.pipe.recorder import PartitionRecorder
from lightning_pipe.strategies.base import reading_plain_types
from lightning_pipe.strategies.checkpoint_contents import checked_contents
from lightning_pipe.strategies.pipe_balance import Measure, measured_balance
from lightning_pipe.strategies.refusals import loss_scaler
from lightning_pipe.strategies.running_work import Running

__all__ = ["InProcessPipelineStrategy"]

_BALANCES = ("parameters", *get_args(Measure))
_CHUNKS = 4  # for each partition: three of seven or more steps of a partition are then not waiting


class InProcessPipelineStrategy(SingleDeviceStrategy):
    """Runs a module's ``nn.Sequential`` as a :class:`~lightning_pipe.pipe.Pipe` over the Trainer's devices.

    One process, without a launcher, in notebooks too: ``Trainer(devices=2, strategy="in_process_pipeline")``. The
    LightningModule is an ordinary one, whose ``self.model`` is a Sequential, or which names another attribute as its
    ``pipe_module``, ``"model.body"`` say. While the trainer runs a pipe is in its place, with the same layers and keys
    of the state dict; behind that the Sequential, on the CPU, as Lightning leaves modules. What else the module holds
    is on the first device.

    ``training_step`` calls ``self.model(x)``, and its loss runs backward through all partitions at once; or it returns
    ``pipe_loss(self.model, x, y, loss_fn)``, which runs 1F1B (:func:`~lightning_pipe.pipe.pipe_loss`).

    Of a batch that is a tuple or a list the last element goes to the last device, where the loss is, and all others to
    the first; any other batch goes to the first as a whole. A ``place_batch(batch, devices)`` of the module's says it
    otherwise: it returns the batch with its tensors where they are needed. On CPUs partitions share cores: set
    ``torch.set_num_threads`` to the number of cores over that of partitions.

    Args:
        chunks: micro-batches of a batch; by default four for each device.
        checkpoint: see :class:`~lightning_pipe.pipe.Pipe`, as for all that follows.
        balance: number of layers of each partition; or ``"parameters"`` (the default), ``"time"`` or ``"memory"``: an
            even share of that. The last two measure each layer, when the trainer sets up, on the module's
            ``example_input_array``, which is to have about as many rows as a micro-batch.
        deferred_batch_norm: move running statistics once a batch.
        compile_partitions: compile the layers of each partition together.
        pipe_module: the attribute that is the Sequential; by default what the module's own ``pipe_module`` says, and
            ``"model"`` if it says nothing.
        parallel_devices: of the partitions; by default the Trainer's. One may be there several times.
        accelerator: as Lightning's ``SingleDeviceStrategy``, and so are the others.
        checkpoint_io: see there.
        precision_plugin: see there.

    Raises:
        PlanError: no number of micro-batches, no such mode, a balance that does not fit.
        SetupError: there is no such Sequential, or it cannot be cut.
    """

    strategy_name = "in_process_pipeline"

    def __init__(
        self,
        chunks: int | None = None,
        *,
        checkpoint: Checkpoint = "except_last",
        balance: Sequence[int] | Literal["parameters"] | Measure | None = None,
        deferred_batch_norm: bool = False,
        compile_partitions: bool = False,
        pipe_module: str | None = None,
        parallel_devices: Sequence[torch.device | str] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        check_checkpoint(1 if chunks is None else chunks, checkpoint)
        if isinstance(balance, str) and balance not in _BALANCES:
            raise PlanError(
                f"balance is {balance!r}; needed is a number of layers for each partition, or one of"
                f" {', '.join(map(repr, _BALANCES))}"
            )
        if pipe_module is not None and not isinstance(pipe_module, str):
            raise SetupError(
                f"pipe_module is {pipe_module!r}; needed is the name of an attribute, such as 'encoder.body'"
            )
        check_flags(deferred_batch_norm=deferred_batch_norm, compile_partitions=compile_partitions)
        if isinstance(parallel_devices, str | torch.device):
            raise SetupError(f"parallel_devices is the single device {parallel_devices!r}; give a list")
        self._chunks = chunks
        self._checkpoint: Checkpoint = checkpoint
        self._balance = balance
        self._deferred_batch_norm = deferred_batch_norm
        self._compile_partitions = compile_partitions
        self._pipe_module = pipe_module
        self._devices = [torch.device(one) for one in parallel_devices or ()]
        self._pipe: Pipe | None = None
        self._sequential: nn.Sequential | None = None

    # ------------------------------------------------------------------ devices

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Of the partitions."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        # Lightning's, of a Trainer whose strategy names none.
        self._devices = list(devices)

    @property
    def num_nodes(self) -> int:
        """Machines: one."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        # The Trainer's.
        if number != 1:
            raise SetupError(
                f"num_nodes is {number}, and a pipe is one process on one machine; needed is 1, or"
                " strategy='llm_1f1b_pipeline', in several processes"
            )

    @property
    def root_device(self) -> torch.device:
        return self._devices[0] if self._devices else torch.device("cpu")

    @property
    def pipe(self) -> Pipe:
        """The pipe in the Sequential's place; there while the trainer runs."""
        if self._pipe is None:
            raise SetupError("there is no pipe; Trainer.fit, validate, test or predict makes one when it sets up")
        return self._pipe

    def running(self) -> Running:
        """Answers of this strategy to callbacks, once the trainer has set it up."""
        return Running(
            title=f"pipe of {len(self.pipe.balance)} partitions",
            record=lambda keep: PartitionRecorder(self.pipe, keep),
            has_pipe=True,
        )

    def start_trace(self) -> None:
        """Record when each partition is at which micro-batch, from now on."""
        self.pipe.start_trace()

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the spans in the order in which they ended."""
        return self.pipe.stop_trace()

    # ------------------------------------------------------------------ set-up

    def setup(self, trainer: pl.Trainer) -> None:
        install_evaluation_loops(trainer)
        install_interrupted_saves(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            PipelineTrainingEpochLoop.install(trainer)
        super().setup(trainer)
        # Lightning moves optimisers' states to the first device; there are none yet, but for those of a second fit.
        for optimizer in self.optimizers:
            _to_their_parameters(optimizer)

    def model_to_device(self) -> None:
        """Put a pipe in the Sequential's place, and all else on the first device."""
        module = self.lightning_module
        assert module is not None
        holder, name, sequential = self._found(module)
        # Without it: a model for several devices may be too large for the first.
        setattr(holder, name, None)
        try:
            module.to(self.root_device)
            devices = self._devices or [self.root_device]
            chunks = _CHUNKS * len(devices) if self._chunks is None else self._chunks
            balance = self._balance
            if balance == "time" or balance == "memory":
                setattr(holder, name, sequential)  # the module's forward leads to it
                kept = chunks if self._checkpoint == "never" else 1
                balance = measured_balance(balance, module, sequential, len(devices), kept, self.root_device)
            elif isinstance(balance, str):
                balance = None
            pipe = Pipe(sequential, chunks, self._checkpoint, devices, balance, self._deferred_batch_norm)
        except BaseException:
            setattr(holder, name, sequential)
            raise
        if self._compile_partitions:
            pipe.compile_partitions()
        scaler = loss_scaler(self.precision_plugin)
        if scaler is not None:
            pipe.scale_loss(scaler.get_scale)
        setattr(holder, name, pipe)
        self._pipe, self._sequential = pipe, sequential

    def _found(self, module: pl.LightningModule) -> tuple[nn.Module, str, nn.Sequential]:
        """The Sequential, and the module that holds it under a name."""
        path = self._pipe_module or getattr(module, "pipe_module", None) or "model"
        *parents, name = str(path).split(".")
        holder: Any = module
        for parent in parents:
            holder = getattr(holder, parent, None)
        found = getattr(holder, name, None)
        if not isinstance(found, nn.Sequential):
            sequentials = [one for one, child in module.named_modules() if isinstance(child, nn.Sequential) and one]
            what = f"{type(module).__name__} has no {path!r}"
            if found is not None:
                what = f"{path!r} of {type(module).__name__} is a {type(found).__name__}"
            fix = f"name one of those it has by pipe_module: {', '.join(map(repr, sequentials))}"
            if not sequentials:
                fix = "it has none: make one of the layers that are to be shared out"
            raise SetupError(f"{what}; needed is an nn.Sequential, and {fix}")
        assert isinstance(holder, nn.Module)
        return holder, name, found

    def teardown(self) -> None:
        module, pipe, sequential = self.lightning_module, self._pipe, self._sequential
        if module is not None and pipe is not None and sequential is not None:
            self._pipe = self._sequential = None
            pipe.close()
            places = [
                (parent, name)
                for parent in module.modules()
                for name, child in parent._modules.items()
                if child is pipe
            ]
            sequential.training = pipe.training
            undefer_batch_norm(sequential, pipe.deferred)
            for holder, name in places:  # none where the module has replaced it
                setattr(holder, name, sequential)
        super().teardown()

    # ------------------------------------------------------------------ batches

    def process_dataloader(self, dataloader: object) -> object:
        """Let the workers of a loader end after this process, however it ends."""
        return ending_with_rank(super().process_dataloader(dataloader))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        module = self.lightning_module
        hooks = "transfer_batch_to_device"
        if module is None or self._pipe is None or is_overridden(hooks, module):
            return super().batch_to_device(batch, device, dataloader_idx)
        data = getattr(module.trainer, "datamodule", None)
        if data is not None and is_overridden(hooks, data):
            return super().batch_to_device(batch, device, dataloader_idx)
        place = getattr(module, "place_batch", None)
        if place is not None and not callable(place):
            raise SetupError(
                f"place_batch of {type(module).__name__} is {place!r}; needed is a method of a batch and the devices"
            )
        batch = self._placed(batch) if place is None else place(batch, list(self._devices))
        return module._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)

    def _placed(self, batch: Any) -> Any:
        first, last = self.root_device, (self._devices or [self.root_device])[-1]
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            return move_data_to_device(batch, first)
        parts = [*move_data_to_device(list(batch[:-1]), first), move_data_to_device(batch[-1], last)]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)

    # ------------------------------------------------------------------ checkpoints

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, which may hold tensors and plain types, unless the user allows more."""
        with reading_plain_types(checkpoint_path):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only is not False)
        return checked_contents(checkpoint, checkpoint_path, self.lightning_module)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            _to_their_parameters(optimizer)


def _to_their_parameters(optimizer: Optimizer) -> None:
    """Put an optimiser's states on their parameters' devices; steps are counted where they are."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value.to(parameter.device)
