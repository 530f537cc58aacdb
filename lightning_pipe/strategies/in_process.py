"""Strategy that trains an ``nn.Sequential`` on several devices of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_pipe._compat.lightning import call_on_after_batch_transfer
from lightning_pipe.checkpoints.compiled_names import CompiledNameMap
from lightning_pipe.engine import PlanError, SetupError, TaskSpan
from lightning_pipe.engine.common.options import check_booleans
from lightning_pipe.loops.data.orphaned_workers import end_workers_with_process
from lightning_pipe.pipe import Pipe
from lightning_pipe.pipe.batch_norm import undefer_batch_norm
from lightning_pipe.pipe.partitioning import CheckpointMode, check_pipe_options
from lightning_pipe.pipe.recorder import PartitionRecorder
from lightning_pipe.strategies.base import install_loops, read_checkpoint_file
from lightning_pipe.strategies.pipe_balance import Measure, measured_balance
from lightning_pipe.strategies.setup_checks import get_grad_scaler
from lightning_pipe.strategies.strategy_info import StrategyInfo

_BALANCES = ("parameters", *get_args(Measure))
_CHUNKS = 4  # micro-batches per partition: the bubble is then less than 1/5 of the time


class InProcessPipelineStrategy(SingleDeviceStrategy):
    """Runs an ``nn.Sequential`` of a LightningModule as a :class:`~lightning_pipe.pipe.Pipe` on the Trainer's devices.

    Runs in one process without a launcher, also in notebooks:
    ``Trainer(devices=2, strategy="in_process_pipeline")``. The LightningModule needs no changes if ``self.model`` is
    the Sequential; otherwise its attribute ``pipe_module`` names the Sequential, for example ``"model.body"``. While
    the trainer runs, a pipe with the same layers and the same keys of the state dict replaces the Sequential.
    Afterwards, the Sequential is restored on the CPU, where Lightning leaves modules. All other parts of the
    LightningModule are on the first device.

    ``training_step`` calls ``self.model(x)``, and the backward of its loss runs through all partitions. To train with
    1F1B, ``training_step`` returns ``compute_pipe_or_module_loss(self.model, x, y, loss_fn)`` instead; see
    :func:`~lightning_pipe.pipe.compute_pipe_or_module_loss`.

    If a batch is a tuple or list of at least two elements, the last element is moved to the last device, where the loss
    is computed, and the other elements are moved to the first device. Any other batch is moved to the first device.
    Define ``place_batch(batch, devices)`` in the LightningModule to change this; it returns the batch with each tensor
    on its device. On CPUs, partitions share cores: call ``torch.set_num_threads`` with the number of cores divided by
    the number of partitions.

    Args:
        chunks: number of micro-batches per batch (default None: four per device). Increase it to shrink the bubble;
            smaller micro-batches use a device less efficiently.
        checkpoint: micro-batches that recompute activations: ``"except_last"`` (default), ``"always"`` or ``"never"``;
            see :class:`~lightning_pipe.pipe.Pipe`. Recomputation saves memory and costs one more forward.
        balance: number of layers of each partition, or the cost that is shared evenly between partitions:
            ``"parameters"`` (default), ``"time"`` or ``"memory"``. ``"time"`` and ``"memory"`` measure each layer
            during set-up, on the LightningModule's ``example_input_array``, which should have about as many rows as a
            micro-batch.
        deferred_batch_norm: True to update running statistics of batch normalizations once per batch and not once per
            micro-batch (default False).
        compile_partitions: True to compile the layers of each partition into one function (default False). Requires
            torch 2.13 or newer and costs compilation time in the first batches.
        pipe_module: name of the attribute that holds the Sequential (default None: the LightningModule's
            ``pipe_module``, or else ``"model"``).
        parallel_devices: device of each partition; a device may appear several times (default None: the Trainer's
            devices).
        accelerator: see Lightning's ``SingleDeviceStrategy``.
        checkpoint_io: see Lightning's ``SingleDeviceStrategy``.
        precision_plugin: see Lightning's ``SingleDeviceStrategy``.

    Raises:
        PlanError: *chunks* is less than 1, *checkpoint* is not a known mode, or *balance* does not fit.
        SetupError: an argument has the wrong type, the Sequential does not exist, or it cannot be partitioned.
    """

    strategy_name = "in_process_pipeline"

    def __init__(
        self,
        chunks: int | None = None,
        *,
        checkpoint: CheckpointMode = "except_last",
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
        check_pipe_options(1 if chunks is None else chunks, checkpoint)
        if isinstance(balance, str) and balance not in _BALANCES:
            raise PlanError(
                f"balance is {balance!r}; expected the number of layers of each partition as a list, or one of"
                f" {', '.join(map(repr, _BALANCES))}"
            )
        check_booleans(deferred_batch_norm=deferred_batch_norm, compile_partitions=compile_partitions)
        self._chunks = chunks
        self._checkpoint: CheckpointMode = checkpoint
        self._balance = balance
        self._deferred_batch_norm = deferred_batch_norm
        self._compile_partitions = compile_partitions
        self._pipe_module = pipe_module
        self._devices = [torch.device(device) for device in parallel_devices or ()]
        self._pipe: Pipe | None = None
        self._sequential: nn.Sequential | None = None

    # ------------------------------------------------------------------ devices

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Device of each partition."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        # Lightning sets the Trainer's devices if the strategy has none.
        self._devices = list(devices)

    @property
    def num_nodes(self) -> int:
        """Number of machines, always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        # Lightning sets the Trainer's num_nodes.
        if number != 1:
            raise SetupError(
                f"num_nodes is {number}; expected 1, since a pipe is one process on one machine. For several machines"
                " use strategy='llm_1f1b_pipeline'"
            )

    @property
    def root_device(self) -> torch.device:
        return self._devices[0] if self._devices else torch.device("cpu")

    @property
    def pipe(self) -> Pipe:
        """Pipe that replaces the Sequential while the trainer runs."""
        if self._pipe is None:
            raise SetupError(
                "the strategy has no pipe before set-up. Access it while Trainer.fit, validate, test or predict runs"
            )
        return self._pipe

    def strategy_info(self) -> StrategyInfo:
        """Description of the strategy's work for callbacks, after set-up."""
        return StrategyInfo(
            title=f"pipe of {len(self.pipe.balance)} partitions",
            make_recorder=lambda keep: PartitionRecorder(self.pipe, keep),
            has_pipe=True,
        )

    def start_trace(self) -> None:
        """Start recording the time of each micro-batch in each partition."""
        self.pipe.start_trace()

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording and return the spans in the order in which they ended."""
        return self.pipe.stop_trace()

    # ------------------------------------------------------------------ set-up

    def setup(self, trainer: pl.Trainer) -> None:
        install_loops(trainer)
        super().setup(trainer)
        # Lightning moves optimizer states to the first device. States exist here only in a second fit.
        for optimizer in self.optimizers:
            _move_optimizer_states(optimizer)

    def model_to_device(self) -> None:
        """Replace the Sequential by a pipe, and move the rest of the module to the first device."""
        module = self.lightning_module
        assert module is not None
        holder, name, sequential = self._find_sequential(module)
        # Move the module without the Sequential, which may be too large for the first device.
        setattr(holder, name, None)
        try:
            module.to(self.root_device)
            devices = self._devices or [self.root_device]
            chunks = _CHUNKS * len(devices) if self._chunks is None else self._chunks
            balance = self._balance
            if balance == "time" or balance == "memory":
                setattr(holder, name, sequential)  # the measurement runs the module's forward, which calls it
                stored_chunks = chunks if self._checkpoint == "never" else 1
                balance = measured_balance(balance, module, sequential, len(devices), stored_chunks, self.root_device)
            elif isinstance(balance, str):
                balance = None
            pipe = Pipe(sequential, chunks, self._checkpoint, devices, balance, self._deferred_batch_norm)
        except BaseException:
            setattr(holder, name, sequential)
            raise
        if self._compile_partitions:
            pipe.compile_partitions()
        scaler = get_grad_scaler(self.precision_plugin)
        if scaler is not None:
            pipe.set_loss_scale(scaler.get_scale)
        setattr(holder, name, pipe)
        self._pipe, self._sequential = pipe, sequential

    def _find_sequential(self, module: pl.LightningModule) -> tuple[nn.Module, str, nn.Sequential]:
        """Return the module that holds the Sequential, the name of the attribute, and the Sequential."""
        path = self._pipe_module or getattr(module, "pipe_module", None) or "model"
        *parents, name = str(path).split(".")
        holder: Any = module
        for parent in parents:
            holder = getattr(holder, parent, None)
        sequential = getattr(holder, name, None)
        if not isinstance(sequential, nn.Sequential):
            sequentials = [
                child_name
                for child_name, child in module.named_modules()
                if isinstance(child, nn.Sequential) and child_name
            ]
            problem = f"{type(module).__name__} has no {path!r}"
            if sequential is not None:
                problem = f"{path!r} of {type(module).__name__} is a {type(sequential).__name__}"
            fix = f"Set pipe_module to one of {', '.join(map(repr, sequentials))}"
            if isinstance(sequential, Pipe):
                fix = f"Assign the nn.Sequential to {path!r}: the strategy builds the Pipe"
            elif not sequentials:
                fix = (
                    f"Put the layers to split into an nn.Sequential, and assign it to {path!r}."
                    " strategy='llm_1f1b_pipeline' also splits language models of other classes"
                )
            raise SetupError(f"{problem}; expected an nn.Sequential. {fix}")
        assert isinstance(holder, nn.Module)
        return holder, name, sequential

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
            undefer_batch_norm(sequential, pipe.replaced_batch_norms)
            for holder, name in places:  # empty if the module has replaced the pipe
                setattr(holder, name, sequential)
        super().teardown()

    # ------------------------------------------------------------------ batches

    def process_dataloader(self, dataloader: object) -> object:
        """Make the loader's workers exit after this process ends for any reason."""
        return end_workers_with_process(super().process_dataloader(dataloader))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        module = self.lightning_module
        hooks = "transfer_batch_to_device"
        if module is None or self._pipe is None or is_overridden(hooks, module):
            return super().batch_to_device(batch, device, dataloader_idx)
        data = getattr(module.trainer, "datamodule", None)
        if data is not None and is_overridden(hooks, data):
            return super().batch_to_device(batch, device, dataloader_idx)
        place = getattr(module, "place_batch", None)
        batch = self._place_batch_on_devices(batch) if place is None else place(batch, list(self._devices))
        return call_on_after_batch_transfer(module, batch, dataloader_idx)

    def _place_batch_on_devices(self, batch: Any) -> Any:
        first, last = self.root_device, (self._devices or [self.root_device])[-1]
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            return move_data_to_device(batch, first)
        parts = [*move_data_to_device(list(batch[:-1]), first), move_data_to_device(batch[-1], last)]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)

    # ------------------------------------------------------------------ checkpoints

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; see :meth:`lightning_pipe.strategies.PipelineStrategy.load_checkpoint`."""
        return read_checkpoint_file(super().load_checkpoint, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's values. Names may differ by ``torch.compile``."""
        assert self.lightning_module is not None
        names = CompiledNameMap(self.lightning_module.state_dict())
        super().load_model_state_dict({**checkpoint, "state_dict": names.rename_keys(checkpoint["state_dict"])}, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers' states, each to the device of its parameter.

        Args:
            checkpoint: checkpoint as Lightning reads it, with ``optimizer_states``.
        """
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            _move_optimizer_states(optimizer)


def _move_optimizer_states(optimizer: Optimizer) -> None:
    """Move optimizer states to the devices of their parameters. Zero-dimensional states, such as step counts, stay."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value.to(parameter.device)
