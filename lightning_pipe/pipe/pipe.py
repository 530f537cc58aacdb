"""An ``nn.Sequential`` on several devices of one process, which work on different micro-batches at the same time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_pipe.engine import InputError, PipelinePlan, SetupError, TaskSpan
from lightning_pipe.engine.thread_state import capture
from lightning_pipe.pipe.autograd import attach, attach_loss
from lightning_pipe.pipe.batch_norm import defer_batch_norm
from lightning_pipe.pipe.cell import Cell, MiniBatch
from lightning_pipe.pipe.gradients import GradientSums
from lightning_pipe.pipe.micro_batch import gather, rows_of, scatter
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.partitioning import Checkpoint, check_checkpoint, check_sequential, make_partitions
from lightning_pipe.pipe.plans import gradient_field, value_field
from lightning_pipe.pipe.randomness import MiniBatchSeed, SharedGenerators
from lightning_pipe.pipe.schedule import MicroBatch, Scheduler

__all__ = ["Pipe", "pipe_loss"]


class Pipe(nn.Module):
    """Runs a Sequential's layers in partitions, each on a device and in a thread of its own.

    A mini-batch is cut into micro-batches along its first dimension; while one partition is at a micro-batch, the one
    before it is at the next. Forward, backward and recomputation run in parallel, on CPUs too. Outputs, gradients and
    parameters are those of the Sequential on the same micro-batches, to the bit: what a layer does with a whole batch
    at once, such as batch normalisation, it does with each micro-batch.

    The layers stay what they are, with their hooks, and are moved to their devices; keys of the state dict are the
    Sequential's. Gradients and the optimiser's states are on the devices of their parameters.

    The design is GPipe's (Huang et al., 2019) as torchgpipe built it (Kim et al., 2020); :meth:`loss` runs 1F1B
    (Narayanan et al., 2019).

    Args:
        module: the Sequential.
        chunks: micro-batches to cut a mini-batch into. The more there are, the less partitions wait for each other:
            the part of the time is ``(n - 1) / (chunks + n - 1)`` with *n* partitions.
        checkpoint: which micro-batches keep no activations and run again before their backward: ``"always"`` all,
            ``"except_last"`` all but the last one, whose backward follows at once, ``"never"`` none. In :meth:`loss`
            what follows at once is the last partition's: ``"except_last"`` leaves that out.
        devices: of the partitions; one may be there several times. By default all GPUs, and without any the CPU, once
            for each entry of *balance*.
        balance: the number of layers of each partition. By default they are shared out by their parameters;
            ``balance_by_time`` and ``balance_by_memory`` measure.
        deferred_batch_norm: move the running statistics of batch normalisations once a mini-batch, to those of all of
            its rows; the layers are replaced for that.

    Raises:
        PlanError: a balance that does not fit, fewer layers than devices, no chunk.
        SetupError: no Sequential, a parameter in two partitions, a skip that leads nowhere, a device that is not there.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int,
        checkpoint: Checkpoint = "except_last",
        devices: Iterable[torch.device | str | int] | None = None,
        balance: Sequence[int] | None = None,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_sequential(module)
        self.chunks = chunks
        self.checkpoint = checkpoint
        check_checkpoint(chunks, checkpoint)
        if deferred_batch_norm:
            defer_batch_norm(module)
        for name, layer in module._modules.items():
            self.add_module(name, layer)
        # The Sequential's own.
        self._forward_hooks = module._forward_hooks
        self._forward_pre_hooks = module._forward_pre_hooks
        self.train(module.training)
        layers = [layer for layer in module._modules.values() if layer is not None]
        self._partitions, self._routes = make_partitions(layers, devices, balance)
        self._scheduler: Scheduler | None = None
        self._loss_scale: Callable[[], float] | None = None

    # ------------------------------------------------------------------ what it is made of

    @property
    def devices(self) -> list[torch.device]:
        """Of the partitions."""
        return [partition.device for partition in self._partitions]

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition."""
        return [len(partition.layers) for partition in self._partitions]

    @property
    def plans(self) -> dict[str, PipelinePlan]:
        """What runs when: the plans of forward, of backward, and of :meth:`loss`."""
        return self._schedule.plans

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        return [*self.children()][index]

    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for layer in self._modules.values() if layer is not None)

    def extra_repr(self) -> str:
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, balance={self.balance}, devices={self.devices}"

    def compile_partitions(self, **options: Any) -> Pipe:
        """Have ``torch.compile`` make one function of each partition's layers; returns the pipe.

        Partitions that draw random numbers run as they are, with a warning. Hooks of layers are compiled in.

        Args:
            options: those of ``torch.compile``.
        """
        for partition in self._partitions:
            partition.compile(**options)
        return self

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any) -> Any:
        """Run the layers.

        Args:
            inputs: of the first layer: tensors, in any nesting of tuples, lists and dictionaries, all with the same
                number of rows. They are moved to the first device. What is no tensor goes to every micro-batch.

        Returns:
            what the last layer returns, put together along the first dimension, on the last device.

        Raises:
            InputError: inputs that cannot be cut, or outputs that cannot be put together.
            Exception: what a layer raises, with a note of the partition and the micro-batch.
        """
        run = _Run(self, inputs)
        outputs = [None] * run.count
        for index, ctx in enumerate(self._schedule.run("gpipe_forward", run.micro_batches())):
            outputs[index] = getattr(ctx, value_field(len(self._partitions))).value
        run.check_generators()
        with torch.no_grad():
            gathered, spec = pytree.tree_flatten(gather(outputs))
        if not run.grad:
            return pytree.tree_unflatten(gathered, spec)
        leaves = [pytree.tree_leaves(output) for output in outputs]
        places = [
            place
            for place in range(len(gathered))
            if any(isinstance(one[place], Tensor) and one[place].requires_grad for one in leaves)
        ]
        if places:
            sizes = {place: [len(one[place]) for one in leaves] for place in places}

            # Not the outputs themselves: they hold this function, and nobody would ever let go of both.
            count = len(gathered)

            def backward(gradients: list[Tensor | None]) -> Sequence[Tensor | None]:
                return run.backward(count, dict(zip(places, gradients, strict=True)), sizes)

            attached = attach([gathered[place] for place in places], run.upstream, backward)
            for place, tensor in zip(places, attached, strict=True):
                gathered[place] = tensor
        return pytree.tree_unflatten(gathered, spec)

    def loss(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> Tensor:
        """The loss of a mini-batch, with forwards and backwards in turns (1F1B).

        All of it happens here, so that a partition keeps as many micro-batches as there are partitions from it to the
        last, however many chunks there are, and the last layer's outputs exist for one micro-batch at a time. The
        gradients are kept apart, and the loss returned is a scalar whose ``backward()`` adds them, times its own
        gradient, to ``.grad``: it may be divided, scaled or added to others before, as any loss. Where no gradients are
        wanted (``torch.no_grad()``), this is a forward and a loss.

        Args:
            inputs: of the first layer: one value, or a tuple of them; see :meth:`forward`.
            targets: tensors, in any nesting, with as many rows; they are moved to the last device.
            loss_fn: called with what the last layer returns for a micro-batch, and its targets.
            reduction: whether *loss_fn* returns a mean over rows, or a sum. By default what its ``reduction`` says,
                and a mean if it says none.

        Returns:
            the loss of all rows: of means the mean, weighted by the micro-batches' rows.

        Raises:
            InputError: inputs and targets that cannot be cut alike, or a loss that is no scalar.
        """
        reduction = reduction or getattr(loss_fn, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise InputError(
                f"loss_fn has the reduction {reduction!r}; needed is a scalar for a micro-batch: 'mean' or 'sum'"
            )
        run = _Run(self, inputs if isinstance(inputs, tuple) else (inputs,))
        targets = _to(targets, self.devices[-1])
        if rows_of(targets) != run.rows:
            raise InputError(f"the inputs have {run.rows} rows and the targets {rows_of(targets)}; needed are as many")
        scale = 1.0 if self._loss_scale is None else self._loss_scale()
        losses = [
            _MicroLoss(loss_fn, target, rows_of(target) / run.rows if reduction == "mean" else 1.0, scale)
            for target in scatter(targets, run.count)
        ]
        micro_batches = run.micro_batches(losses)
        plan = "1f1b" if run.grad else "gpipe_forward"
        first_gradients = []
        for ctx in self._schedule.run(plan, micro_batches):
            if run.grad:
                first_gradients.append(getattr(ctx, gradient_field(0)).value)
        run.check_generators()
        total = losses[0].value
        for one in losses[1:]:
            total = total + one.value
        if not run.grad or not run.upstream:
            return total
        known = run.collect(first_gradients)

        def gradients(given: Tensor) -> Sequence[Tensor | None]:
            factor = given / scale
            return [None if one is None else one * factor.to(one.device, one.dtype) for one in known]

        return attach_loss(total, run.upstream, gradients)

    # ------------------------------------------------------------------ measuring, and the end

    def start_trace(self, keep: int | None = None) -> None:
        """Record when each task runs: ``Forward0`` is partition 0's forward.

        Args:
            keep: the number of runs to keep of each plan, the latest; None for all.
        """
        self._schedule.start_trace(keep)

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the spans in the order in which they ended.

        Of a span *iteration* is the index of the micro-batch in its mini-batch.
        """
        return self._schedule.stop_trace()

    def scale_loss(self, scale: Callable[[], float] | None) -> None:
        """Have the backward inside :meth:`loss` run from the loss times a factor, which its gradients are divided by.

        Small gradients survive half precision by that, if the factor is the one that the loss is multiplied by
        afterwards (``torch.amp.GradScaler.get_scale``). The loss returned is not multiplied.

        Args:
            scale: gives the factor for each mini-batch; None for none.
        """
        self._loss_scale = scale

    def close(self) -> None:
        """End the worker threads. They end with the pipe, too; the next forward starts others."""
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _schedule(self) -> Scheduler:
        if self._scheduler is None:
            self._scheduler = Scheduler(self._partitions, self._routes)
        return self._scheduler

    def __getstate__(self) -> dict[str, Any]:
        # Threads stay where they are: a copy starts its own.
        return {**super().__getstate__(), "_scheduler": None}

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            self._refuse_move(f"to({str(device)!r})")
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        self._refuse_move("cuda()")

    def cpu(self) -> Pipe:
        if any(device.type != "cpu" for device in self.devices):
            self._refuse_move("cpu()")
        return self

    def _refuse_move(self, call: str) -> NoReturn:
        raise SetupError(
            f"{call} would move all partitions of a pipe to one device; its layers are on"
            f" {', '.join(map(str, self.devices))}: make another Pipe with other devices"
        )


def pipe_loss(
    module: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    reduction: Literal["mean", "sum"] | None = None,
) -> Tensor:
    """:meth:`Pipe.loss` of a pipe, and ``loss_fn(module(inputs), targets)`` of any other module.

    For a ``training_step`` that is to run with and without a pipe.

    Args:
        module: a pipe, or not.
        inputs: see :meth:`Pipe.loss`, as for the rest; a tuple is several inputs.
        targets: see there.
        loss_fn: see there.
        reduction: see there; means something to a pipe only.
    """
    if isinstance(module, Pipe):
        return module.loss(inputs, targets, loss_fn, reduction=reduction)
    output = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    return loss_fn(output, targets)


class _MicroLoss:
    """The loss of one micro-batch: its part of the whole, and that times what backward is scaled by."""

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], target: Any, weight: float, scale: float) -> None:
        self._loss_fn, self._target, self._weight, self._scale = loss_fn, target, weight, scale
        self.value: Tensor = torch.empty(())

    def __call__(self, output: Any) -> Tensor:
        loss = self._loss_fn(output, self._target)
        if not isinstance(loss, Tensor) or loss.dim():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn returned {found}; needed is a tensor without dimensions, a mean or a sum")
        if self._weight != 1.0:
            loss = loss * self._weight
        self.value = loss.detach()
        return loss if self._scale == 1.0 else loss * self._scale


class _Run:
    """One mini-batch.

    Args:
        pipe: that runs it.
        inputs: as they were given.
    """

    def __init__(self, pipe: Pipe, inputs: tuple[Any, ...]) -> None:
        self._pipe = pipe
        self._partitions: list[Partition] = pipe._partitions
        for partition in self._partitions:
            partition.check_device()
        self.rows = rows_of(inputs)
        inputs = _to(inputs, self._partitions[0].device)
        if self.rows < pipe.chunks:
            warnings.warn(
                f"a mini-batch has {self.rows} rows, and {pipe.chunks} micro-batches are to be cut from it; it runs as"
                f" {self.rows}: lower chunks, or give larger mini-batches",
                stacklevel=3,
            )
        self._pieces = scatter(inputs, pipe.chunks)
        self.count = len(self._pieces)
        self.grad = torch.is_grad_enabled()
        self._parameters = [partition.parameters() for partition in self._partitions]
        self._inputs = list(pytree.tree_leaves(inputs))
        self.upstream: list[Tensor] = [
            tensor
            for tensor in (*self._inputs, *(one for part in self._parameters for one in part))
            if isinstance(tensor, Tensor) and tensor.requires_grad
        ]
        self._sums = [GradientSums() for _ in self._partitions]
        self._seed = MiniBatchSeed()
        self._generators = SharedGenerators(pipe.devices)
        self._mini_batch = MiniBatch(
            self.count, self._seed, self.grad, capture(), [one.training for one in self._partitions], self._parameters
        )
        self._streams = [torch.cuda.current_stream(one) for one in dict.fromkeys(pipe.devices) if one.type == "cuda"]
        self._cells: list[list[Cell]] = []

    def micro_batches(self, losses: Sequence[_MicroLoss] = ()) -> list[MicroBatch]:
        """All micro-batches, for their forward."""
        last = self._partitions[-1]
        mode = self._pipe.checkpoint
        for index in range(self.count):
            # What is followed by its backward at once gains nothing from running again.
            at_once = index == self.count - 1 and not losses
            self._cells.append(
                [
                    Cell(
                        partition,
                        self._mini_batch,
                        index,
                        checkpointed=mode == "always"
                        or (mode == "except_last" and not at_once and not (losses and partition is last)),
                        loss=losses[index] if losses and partition is last else None,
                    )
                    for partition in self._partitions
                ]
            )
        pieces, self._pieces = self._pieces, []
        return [self._micro_batch(index, piece) for index, piece in enumerate(pieces)]

    def backward(
        self, leaves: int, gradients: dict[int, Tensor | None], sizes: dict[int, list[int]]
    ) -> list[Tensor | None]:
        """Run all backwards, the last micro-batch first; returns gradients of :attr:`upstream`.

        Args:
            leaves: of the outputs, flattened.
            gradients: of those, by place.
            sizes: rows of each micro-batch's, by place.
        """
        self._generators = SharedGenerators(self._pipe.devices)
        parts = {
            place: [None] * self.count if gradient is None else list(torch.split(gradient, sizes[place]))
            for place, gradient in gradients.items()
        }
        micro_batches = [
            self._micro_batch(index, None, [parts[place][index] if place in parts else None for place in range(leaves)])
            for index in reversed(range(self.count))
        ]
        found = [
            getattr(ctx, gradient_field(0)).value for ctx in self._pipe._schedule.run("gpipe_backward", micro_batches)
        ]
        self.check_generators()
        return self.collect(found[::-1])

    def collect(self, of_inputs: Sequence[list[Tensor | None]]) -> list[Tensor | None]:
        """Gradients of :attr:`upstream`.

        Args:
            of_inputs: gradients of the inputs, flattened, of each micro-batch.
        """
        found: list[Tensor | None] = []
        for place, leaf in enumerate(self._inputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                rows = torch.tensor_split(leaf.detach(), self.count)
                parts = [one[place] for one in of_inputs]
                if all(part is None for part in parts):
                    found.append(None)
                else:
                    found.append(
                        torch.cat(
                            [
                                torch.zeros_like(row) if part is None else part
                                for part, row in zip(parts, rows, strict=True)
                            ]
                        )
                    )
        for sums, parameters in zip(self._sums, self._parameters, strict=True):
            found += [sums.of(parameter) for parameter in parameters]
        return found

    def check_generators(self) -> None:
        """See :class:`SharedGenerators`; then the mini-batch's number is taken from the user's generator."""
        self._generators.check()
        self._seed.take()

    def _micro_batch(self, index: int, piece: Any, given: list[Tensor | None] | None = None) -> MicroBatch:
        return MicroBatch(index, self.count, self._cells[index], piece, self._sums, given, self._streams)


def _to(value: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value)
