"""Pipeline parallelism for an ``nn.Sequential`` on several devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import device_from_to_args, pytree
from lightning_pipe.engine import InputError, IterContext, PipelinePlan, SetupError, TaskSpan
from lightning_pipe.pipe.batch_norm import defer_batch_norm, undefer_batch_norm
from lightning_pipe.pipe.gradients import attach_backward, attach_precomputed_gradients
from lightning_pipe.pipe.loss import LossFunction, MiniBatchLoss, Reduction, sum_losses
from lightning_pipe.pipe.mini_batch_run import MiniBatchRun
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.partitioning import CheckpointMode, check_pipe_options, check_sequential, make_partitions
from lightning_pipe.pipe.plans import get_input_field_name, get_input_gradient_field_name
from lightning_pipe.pipe.scatter import concat_micro_batch_outputs, count_batch_rows, to_device
from lightning_pipe.pipe.scheduler import Scheduler
from lightning_pipe.pipe.skip import SkipRoute


class Pipe(nn.Module):
    """Splits the layers of a Sequential into partitions that work on different micro-batches at the same time.

    Each partition has its own device and thread. A mini-batch is split into micro-batches along its first dimension;
    while one partition processes a micro-batch, the previous partition processes the next micro-batch. Forward,
    backward and recomputation run in parallel, on CPUs too. Outputs, gradients and parameters equal those of the
    Sequential on the same micro-batches, bit for bit. Layers that compute statistics over a batch, such as batch
    normalization, compute them over each micro-batch.

    The layers are the Sequential's own modules, with their hooks. They are moved to the devices of their partitions,
    and the state dict has the Sequential's keys. Gradients and optimizer states are on the devices of their parameters.

    The design is GPipe (Huang et al., 2019) as implemented by torchgpipe (Kim et al., 2020); :meth:`loss` runs 1F1B
    (Narayanan et al., 2019).

    Args:
        module: the Sequential.
        chunks: number of micro-batches per mini-batch. Increase it to shrink the bubble, which is
            ``(n - 1) / (chunks + n - 1)`` of the time with *n* partitions.
        checkpoint: micro-batches that discard their activations and run forward again before their backward:
            ``"always"`` for all, ``"except_last"`` (the default) for all but the last one, whose backward follows
            immediately, ``"never"`` for none. In :meth:`loss` the backward follows immediately for every micro-batch
            in the last partition, so ``"except_last"`` excludes that partition instead. Recomputation saves memory and
            costs one more forward. Evaluation mode never recomputes.
        devices: device of each partition; a device may appear several times (default all GPUs; without GPUs the CPU,
            once for each entry of *balance*).
        balance: number of layers of each partition (default: balanced by the number of parameters). Use
            ``balance_by_time`` or ``balance_by_memory`` to balance by measurements.
        deferred_batch_norm: True to update the running statistics of batch normalizations once per mini-batch, from
            all of its rows (default False). Replaces these layers by :class:`~lightning_pipe.pipe.DeferredBatchNorm`.

    Raises:
        PlanError: the balance does not fit, the Sequential has fewer layers than devices, or *chunks* is less than 1.
        SetupError: the module is not a Sequential, a parameter is in two partitions, a skip has no source or target, or
            a device does not exist.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int,
        checkpoint: CheckpointMode = "except_last",
        devices: Iterable[torch.device | str | int] | None = None,
        balance: Sequence[int] | None = None,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_sequential(module)
        self.chunks = chunks
        self.checkpoint = checkpoint
        check_pipe_options(chunks, checkpoint)
        self._partitions: list[Partition] = []
        self._routes: list[SkipRoute] = []
        self._scheduler: Scheduler | None = None
        self._loss_scale: Callable[[], float] | None = None
        self._known_losses: set[Any] = set()  # kinds of functions that are known to return means
        self._deferred: dict[nn.Module, nn.Module] = {}  # from each new layer to the replaced layer
        if any(isinstance(submodule, Pipe) for layer in module for submodule in layer.modules()):
            raise SetupError(
                "a layer of the Sequential contains a Pipe; expected layers without a Pipe. Build one Pipe over all"
                " layers"
            )
        # The Sequential's own hooks, of every kind.
        self.__dict__.update({name: hooks for name, hooks in module.__dict__.items() if "hook" in name})
        self.training = module.training  # without train(): some layers may be frozen in evaluation mode
        try:
            if deferred_batch_norm:
                defer_batch_norm(module, self._deferred)
            for name, layer in module._modules.items():
                self.add_module(name, layer)
            self._partitions, self._routes = make_partitions([*self], devices, balance)
        except BaseException:
            undefer_batch_norm(module, self._deferred)
            raise

    # ------------------------------------------------------------------ structure

    @property
    def devices(self) -> list[torch.device]:
        """Device of each partition."""
        return [partition.device for partition in self._partitions]

    @property
    def balance(self) -> list[int]:
        """Number of layers of each partition."""
        return [len(partition.layers) for partition in self._partitions]

    @property
    def replaced_batch_norms(self) -> dict[nn.Module, nn.Module]:
        """Original batch normalizations, keyed by the layers that *deferred_batch_norm* has replaced them with."""
        return self._deferred

    @property
    def plans(self) -> dict[str, PipelinePlan]:
        """Plans of forward, of backward, and of :meth:`loss`, by name."""
        return self._lazy_scheduler.plans

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int | slice) -> nn.Module:
        """Return a layer, or for a slice a plain Sequential, which runs its layers on their devices without a pipe."""
        layers = [*self]
        return nn.Sequential(*layers[index]) if isinstance(index, slice) else layers[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for layer in self._modules.values() if layer is not None)

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, balance={self.balance}, devices={self.devices}"

    def compile_partitions(self, **options: Any) -> Pipe:
        """Compile the layers of each partition into one function, and return the pipe.

        Partitions that draw random numbers run uncompiled, with a warning. Hooks of layers are compiled too.

        Args:
            options: keyword arguments of ``torch.compile``.
        """
        for partition in self._partitions:
            partition.compile(**options)
        return self

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any) -> Any:
        """Run the layers.

        Args:
            inputs: inputs of the first layer: tensors in any nesting of tuples, lists and dictionaries, all with the
                same number of rows. They are moved to the first device. Values other than tensors are passed to every
                micro-batch.

        Returns:
            outputs of the last layer, concatenated along the first dimension, on the last device.

        Raises:
            InputError: the inputs cannot be split, or the outputs cannot be concatenated.
            SetupError: a layer, hook or loss function of this pipe calls it.
            Exception: raised by a layer, with a note that names the partition and the micro-batch.
        """
        run = self._make_mini_batch_run(inputs, 6)  # through nn.Module's two calls
        last = len(self._partitions)
        outputs = self._lazy_scheduler.run(
            "gpipe_forward", run.build_micro_batches(), lambda ctx: getattr(ctx, get_input_field_name(last)).value
        )
        run.check_generators()
        with torch.no_grad():
            gathered, spec = pytree.tree_flatten(concat_micro_batch_outputs(outputs, run.rows_of_micro_batches))
        if not run.grad:
            return pytree.tree_unflatten(gathered, spec)
        leaves = [pytree.tree_leaves(output) for output in outputs]
        places = [
            place
            for place in range(len(gathered))
            if any(isinstance(chunk[place], Tensor) and chunk[place].requires_grad for chunk in leaves)
        ]
        if places:
            sizes = {place: [len(chunk[place]) for chunk in leaves] for place in places}

            # Captures the count, not the outputs: they hold this function, and the cycle would keep both alive.
            count = len(gathered)

            def run_mini_batch_backward(gradients: list[Tensor | None]) -> Sequence[Tensor | None]:
                return run.backward(count, dict(zip(places, gradients, strict=True)), sizes)

            attached = attach_backward(
                [gathered[place] for place in places], run.tensors_requiring_grad, run_mini_batch_backward
            )
            for place, tensor in zip(places, attached, strict=True):
                gathered[place] = tensor
        return pytree.tree_unflatten(gathered, spec)

    def loss(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFunction,
        *,
        reduction: Reduction | None = None,
    ) -> Tensor:
        """Compute the loss of a mini-batch, with alternating forwards and backwards (1F1B).

        Forward and backward both run in this call. Partition *j* of *n* therefore keeps at most *n - j* micro-batches,
        independent of *chunks*, and the last layer's outputs exist for one micro-batch at a time. The gradients are
        held by the returned loss, a scalar whose ``backward()`` adds them, times its own gradient, to ``.grad``. It may
        be divided, scaled or added to other losses first, like any loss. Without gradients (``torch.no_grad()``), this
        runs forward and the loss only.

        Args:
            inputs: inputs of the first layer: one value, or a tuple of values; see :meth:`forward`.
            targets: tensors in any nesting, with the same number of rows as *inputs*. They are moved to the last
                device.
            loss_fn: called with the last layer's output for a micro-batch and the micro-batch's targets; returns a
                scalar tensor.
            reduction: ``"mean"`` if *loss_fn* returns a mean over rows, ``"sum"`` if it returns a sum (default: the
                ``reduction`` attribute of *loss_fn*). A function without this attribute must return a mean over rows,
                which is checked once on two parts of a micro-batch. ``nn.CrossEntropyLoss`` and ``nn.NLLLoss`` (and
                their functional forms, without further arguments) may ignore targets and weight classes: their mean is
                then over the weights of the mini-batch's counted targets.

        Returns:
            loss of all rows; for means, the mean weighted by the rows of each micro-batch.

        Raises:
            InputError: inputs and targets have different numbers of rows, the loss is not a scalar, or it is neither a
                mean over rows nor declared to be a sum.
        """
        mini_batch_loss = MiniBatchLoss(loss_fn, reduction, self._known_losses)
        run = self._make_mini_batch_run(inputs if isinstance(inputs, tuple) else (inputs,), 4)
        targets = to_device(targets, self.devices[-1])
        if not 0 < run.rows == count_batch_rows(targets):
            raise InputError(
                f"the inputs have {run.rows} rows and the targets have {count_batch_rows(targets)}; expected"
                " equal numbers, at least 1. Give one target for each row, and skip empty batches"
            )
        scale = 1.0 if self._loss_scale is None else self._loss_scale()
        losses = mini_batch_loss.split(targets, run.count, scale)
        micro_batches = run.build_micro_batches(losses)
        plan = "1f1b" if run.grad else "gpipe_forward"

        def get_input_gradients(ctx: IterContext) -> list[Tensor | None]:
            gradients: list[Tensor | None] = getattr(ctx, get_input_gradient_field_name(0)).value if run.grad else []
            return gradients

        with run.suspend_parameter_hooks():
            first_gradients = self._lazy_scheduler.run(plan, micro_batches, get_input_gradients)
        run.check_generators()
        mini_batch_loss.check_is_mean(losses[0])
        total = sum_losses(losses)
        if not run.grad or not run.tensors_requiring_grad:
            return total
        collected = run.merge_micro_batch_gradients(first_gradients)

        def scale_collected_gradients(loss_gradient: Tensor) -> Sequence[Tensor | None]:
            factor = loss_gradient / scale
            return [
                None if gradient is None else gradient * factor.to(gradient.device, gradient.dtype)
                for gradient in collected
            ]

        return attach_precomputed_gradients(total, run.tensors_requiring_grad, scale_collected_gradients)

    # ------------------------------------------------------------------ tracing and closing

    def start_trace(self, max_spans: int | None = None) -> None:
        """Record start and end of each task; ``Forward0`` is the forward of partition 0.

        Args:
            max_spans: number of most recent spans to keep for each plan (default None: all).
        """
        self._lazy_scheduler.start_trace(max_spans)

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording and return the spans, sorted by end time.

        The *iteration* of a span is the index of the micro-batch in its mini-batch.
        """
        return self._lazy_scheduler.stop_trace()

    def set_loss_scale(self, scale: Callable[[], float] | None) -> None:
        """Scale the loss for the backward inside :meth:`loss`, and divide the gradients by the same factor.

        This keeps small gradients from underflowing in half precision, if the factor is the one that the caller
        multiplies the loss by afterwards (``torch.amp.GradScaler.get_scale``). The returned loss is not scaled.

        Args:
            scale: returns the factor, called once per mini-batch; None for no scaling.
        """
        self._loss_scale = scale

    def close(self) -> None:
        """End the worker threads. They also end with the pipe; the next forward starts new threads."""
        if self._scheduler is not None:
            self._scheduler.close()

    def _make_mini_batch_run(self, inputs: tuple[Any, ...], depth: int) -> MiniBatchRun:
        check_pipe_options(self.chunks, self.checkpoint)
        if [*map(id, self)] != [id(layer) for partition in self._partitions for layer in partition.layers]:
            raise SetupError(
                "layers of the pipe were added or replaced after its partitions were made. Change the Sequential"
                " instead, and build a new Pipe from it"
            )
        # In evaluation, backward is rare, and running layers twice would only cost time.
        checkpoint = self.checkpoint if self.training else "never"
        return MiniBatchRun(self._partitions, self._lazy_scheduler, self.chunks, checkpoint, inputs, depth)

    @property
    def _lazy_scheduler(self) -> Scheduler:
        if self._scheduler is None:
            self._scheduler = Scheduler(self._partitions, self._routes)
        return self._scheduler

    def __getstate__(self) -> dict[str, Any]:
        # Threads cannot be copied: a copy of the pipe starts its own.
        return {**super().__getstate__(), "_scheduler": None, "_known_losses": set()}

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Convert parameters and buffers to another type. Arguments are those of ``nn.Module.to``.

        Raises:
            SetupError: a device is given, and not all layers are on it.
        """
        device = device_from_to_args(*args, **kwargs)
        if device is not None and any(partition_device != device for partition_device in self.devices):
            self._refuse_move(f"to({str(device)!r})")
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        """Raise an error: the layers of a pipe stay on the devices that it was built with.

        Args:
            device: unused (default None).

        Raises:
            SetupError: always.
        """
        self._refuse_move("cuda()")

    def cpu(self) -> Pipe:
        """Return the pipe if all its layers are on the CPU.

        Raises:
            SetupError: a layer is on another device.
        """
        if any(device.type != "cpu" for device in self.devices):
            self._refuse_move("cpu()")
        return self

    def _refuse_move(self, call: str) -> NoReturn:
        raise SetupError(
            f"{call} would move all partitions of a pipe to one device; its layers are on"
            f" {', '.join(map(str, self.devices))}. Build a new Pipe with other devices"
        )


def compute_pipe_or_module_loss(
    module: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction,
    *,
    reduction: Reduction | None = None,
) -> Tensor:
    """Compute :meth:`Pipe.loss` for a pipe, or ``loss_fn(module(inputs), targets)`` for any other module.

    Use it in a ``training_step`` that must run with and without a pipe.

    Args:
        module: a :class:`Pipe` or any other module.
        inputs: see :meth:`Pipe.loss`; a tuple is passed as several inputs.
        targets: see :meth:`Pipe.loss`.
        loss_fn: see :meth:`Pipe.loss`.
        reduction: see :meth:`Pipe.loss`; ignored for other modules.
    """
    if isinstance(module, Pipe):
        return module.loss(inputs, targets, loss_fn, reduction=reduction)
    output = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    return loss_fn(output, targets)
